"""The runner: how waits, late launches and launch leads are counted, and who writes a request's scheduling fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import late_results, timed_by

import specbatch
from specbatch import Engine, SamplingParams, Speculation

SCHEDULING = {
    "slot",
    "pages",
    "prefilled",
    "branch",
    "committed",
    "in_flight",
    "pending",
    "draft_kv_valid_until",
    "epoch",
}


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_waits_and_leads_are_counted(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: str, ready: bool
) -> None:
    """ready: the device is done whenever the host asks, so that all overlapped launches are late."""
    timed_by(monkeypatch)
    late_results(monkeypatch, late=not ready)
    engine = toy_engine(speculation=Speculation(schedule=schedule))
    engine.generate([list(toy.prompts()[3])], SamplingParams(max_new_tokens=9, ignore_eos=True))
    counters = engine.record().counters
    steps = counters["iterations"]
    assert steps == counters["device_steps"] == 8
    overlapped = steps - 1 if schedule == "v2" else 0  # the last step has nothing launched after it
    assert counters["host_waits"] == steps - overlapped
    assert counters["overlapped"] == overlapped
    assert counters["late_launches"] == overlapped * ready
    assert (counters["launch_lead_s"] > 0) == (overlapped > 0 and not ready)
    assert counters["device_idle_s"] == 0.5 * counters["device_gaps"] == 0.5 * (steps - 1)
    assert (counters["prefill_device_s"], counters["prefill_idle_s"]) == (1.0, 0.5)  # the gap after it


@pytest.mark.parametrize(
    ("how", "around"),
    [
        ({"concurrency": 1}, 3),  # after the first pass, before and after the second one
        ({"concurrency": 2}, 3),
        ({"arrivals": [0.0, 0.1]}, 2),  # before the second one there is nothing to do
    ],
)
def test_gaps_around_prefills_are_idle_time(
    toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], around: int
) -> None:
    timed_by(monkeypatch)
    engine = toy_engine(max_running=2, prefill_chunk=4)
    engine.generate([[3, 4, 5], [6, 7, 8]], SamplingParams(max_new_tokens=3, ignore_eos=True), **how)
    record = engine.record()
    counters = record.counters
    launches = counters["prefill_passes"] + counters["device_steps"]
    assert counters["prefill_device_s"] == counters["prefill_passes"] == 2
    assert counters["prefill_idle_s"] == 0.5 * around
    idle = counters["device_idle_s"] + 0.5 * around
    assert record.metrics["device_idle_share"] == idle / (idle + launches)


def test_only_the_scheduler_writes_the_scheduling_fields_of_a_request() -> None:
    """`request.slot = ...` and the like, with any name for the request; `self` of other classes aside."""
    root = Path(specbatch.__file__).parent
    writers = set()
    named = re.compile(rf"\.({'|'.join(SCHEDULING)})\b.*=")
    for path in root.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if named.search(text) else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
                if isinstance(target, ast.Attribute) and target.attr in SCHEDULING:
                    owner = target.value.id if isinstance(target.value, ast.Name) else ""
                    if owner != "self" or path.name == "request.py":
                        writers.add(path.relative_to(root).as_posix())
    writing = "core/request.py", "engine/schedule/draft_kv.py", "engine/schedule/scheduler.py"
    assert writers == {*writing}
