"""Traces: steps, host waits by source line, and exclusive kernel times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crossed import slow_but

from specbatch import SpecbatchError
from specbatch.engine.trace import EXCLUSIVE, HostWaits, kernel_rows, text, trace


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
def test_steps_are_recorded(toy: Any, toy_engine: Callable[..., Any], tmp_path: Path, schedule: str) -> None:
    from specbatch.config.speculation import Speculation

    engine = toy_engine(speculation=Speculation("ngram", schedule, draft_tokens=2), max_model_len=250)
    path = tmp_path / "trace.json"
    result = trace(engine, [list(prompt) for prompt in toy.prompts()[:2]], 5, path)
    assert 5 <= result["steps"] <= 7
    assert result["step_ms"] > 0
    assert result["waits"] is None  # a CPU has nothing to wait for
    assert result["rows_per_step"] == 2.0
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("linear" in str(name) or "mm" in str(name) for name in names)
    assert text(result).startswith(
        f"batch 2; ngram, 2 drafted, schedule {schedule}, eager\n{result['steps']} steps of 2.0 requests, "
    )
    assert "Where the host waited:\n\nnot known: no CUDA device" in text(result)
    assert result["metrics"]["duration_s"] > 0
    [again] = engine.generate([list(toy.prompts()[0])])  # the engine is still usable
    assert again.token_ids


def test_waits_are_listed_by_line_the_most_frequent_first() -> None:
    waits = HostWaits()
    waits.add("specbatch/a.py:3 f", None)
    for _ in range(4):
        waits.add("specbatch/b.py:9 g", 0.002)
    assert waits.rows(4) == [
        {"where": "specbatch/b.py:9 g", "waits": 4, "per step": 1.0, "ms": 8.0},
        {"where": "specbatch/a.py:3 f", "waits": 1, "per step": 0.25, "ms": None},
    ]


def on_device(name: str, stream: int, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        device_resource_id=stream,
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_exclusive_times_add_up_to_the_busy_time_of_a_stream() -> None:
    events = [
        on_device("late", 7, 9, 30),  # began early and waited for the two before it
        on_device("first", 7, 0, 10),
        on_device("inside", 7, 2, 8),
        on_device("first", 7, 40, 44),  # after a gap
        on_device("copy", 20, 5, 25),  # beside them
        on_device("host", 7, 0, 100, "CPU"),
    ]
    rows = {row["kernel"]: row for row in kernel_rows(events, 2)}
    assert {name: row["us exclusive"] for name, row in rows.items()} == {
        "late": 10.0, "copy": 10.0, "first": 7.0, "inside": 0.0
    }  # fmt: skip
    assert {name: row["us per step"] for name, row in rows.items()} == {
        "late": 10.5, "copy": 10.0, "first": 7.0, "inside": 3.0
    }  # fmt: skip
    assert rows["first"]["per step"] == 1.0
    assert list(rows)[-1] == "inside"
    busy = (30 - 0) + (44 - 40) + (25 - 5)
    assert sum(row["us exclusive"] for row in rows.values()) == busy / 2


def test_a_table_of_kernels_explains_its_columns() -> None:
    result = {
        "batch": 1, "configuration": "x", "steps": 2, "rows_per_step": 1.0, "step_ms": 1.0, "waits": [],
        "metrics": dict.fromkeys(("device_idle_share", "launch_lead_s", "host_waits_per_step", "graph_coverage")),
        "kernels": kernel_rows([on_device("a", 1, 0, 3)], 2),
    }  # fmt: skip
    assert text(result).endswith(EXCLUSIVE)
    assert "us exclusive |" in text(result)
    assert EXCLUSIVE not in text(result | {"kernels": []})


def test_a_batch_that_does_not_fit_is_refused(toy: Any, toy_engine: Callable[..., Any], tmp_path: Path) -> None:
    engine = toy_engine(max_running=2, max_model_len=250)
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    with pytest.raises(SpecbatchError, match="batch=3: the engine holds 2 such requests"):
        trace(engine, prompts, 5, tmp_path / "trace.json")


def test_prompts_in_many_chunks_all_decode_before_the_trace_begins(
    toy: Any, toy_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engine = toy_engine(prefill_chunk=4, max_model_len=250)
    result = trace(engine, [list(prompt) for prompt in toy.prompts()[-3:]], 5, tmp_path / "trace.json")
    assert result["rows_per_step"] == 3.0
