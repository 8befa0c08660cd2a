"""Metrics of steps by their definitions: step times, CUDA graphs, full batches, break-even."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.records.run_record import RunRecord
from specbatch.records.steps import break_even, steps_at
from specbatch.records.summarize import step_metrics

COUNTERS: dict[str, Any] = {
    "iterations": 8, "iteration_s": 0.8, "host_waits": 0, "overlapped": 0, "launch_lead_s": 0.0, "late_launches": 0,
    "device_s": 0.4, "device_steps": 8, "device_idle_s": 0.05, "device_gaps": 5, "graphs": {},
    "steps_by_rows": {},
}  # fmt: skip


def metrics(**changes: Any) -> dict[str, float | None]:
    return step_metrics(COUNTERS | changes, None, None)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 0.05 + 0.01),  # from one iteration to the next, on the device
        ({"device_gaps": 0, "device_idle_s": 0.0}, 0.05),
        ({"device_steps": 0, "device_s": 0.0, "device_gaps": 0}, 0.1),  # no device clock: the host's
        ({"device_steps": 0, "device_gaps": 0, "iterations": 0}, None),
    ],
)
def test_step_time(changes: dict[str, Any], wanted: float | None) -> None:
    found = metrics(**changes)["step_time_s"]
    assert found == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 0.08 / 0.48),  # five gaps of 0.01 are known, of eight steps
        ({"prefill_device_s": 0.5, "prefill_idle_s": 0.05}, 0.1),
        ({"device_gaps": 0, "device_idle_s": 0.0}, None),
    ],
)
def test_device_idle(changes: dict[str, Any], wanted: float | None) -> None:
    found = metrics(**changes)["device_idle_share"]
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_step_time_by_number_of_requests() -> None:
    counters = {"steps_by_rows": {"1": [2, 0.5], "32": [4, 0.1]}}
    assert steps_at(counters, 32) == (4, pytest.approx(0.025))
    assert steps_at(counters, 1) == (2, 0.25)
    assert steps_at(counters, 31) == (0, None)


@pytest.mark.parametrize(
    ("concurrency", "replicas", "wanted"),
    [
        (4, 1, (20, pytest.approx(0.01), pytest.approx(1000))),
        (8, 2, (20, pytest.approx(0.01), pytest.approx(2000))),  # the share of one replica
        (3, 1, (19, None, None)),  # too few
        (None, 1, (None, None, None)),
    ],
)
def test_metrics_of_a_full_batch_need_enough_steps(concurrency: int | None, replicas: int, wanted: Any) -> None:
    counters = COUNTERS | {"steps_by_rows": {"4": [20, 0.2], "3": [19, 0.1]}}
    found = step_metrics(counters, concurrency, 2.5, replicas=replicas)
    assert tuple(found[name] for name in ("full_batch_steps", "step_s", "decode_throughput")) == wanted


def test_graphs_are_counted_by_kind_where_they_were_requested() -> None:
    graphs = {
        "decode": {"replays": 7, "fallbacks": {"logprobs": 2}, "padded": 4},
        "target_prefill": {"replays": 6, "fallbacks": {"too long": 1}, "padded": 30},
        "draft_prefill": {"replays": 0, "fallbacks": {"off": 3}, "padded": 0},
    }
    found = metrics(graphs=graphs)
    names = ("decode_replays", "target_prefill_replays", "draft_prefill_replays", "graph_fallbacks", "graph_padding")
    assert [found[name] for name in names] == [7, 6, None, 3, 34]
    assert found["host_step_s"] == pytest.approx(0.1)
    assert {metrics()[name] for name in names} == {None}


def timed(seconds: float | None, **more: list[float]) -> RunRecord:
    """seconds: of a step of 8 requests; more: steps and seconds by the number of requests, such as n4."""
    steps = {"8": [10, 10 * seconds]} if seconds else {}
    return RunRecord({}, {}, {}, {"steps_by_rows": steps | {name[1:]: item for name, item in more.items()}}, [])


def test_break_even_is_relative_to_the_baseline_step() -> None:
    assert break_even(timed(0.015), timed(0.01)) == pytest.approx(1.5)
    assert break_even(timed(0.008), timed(0.01)) == pytest.approx(0.8)
    without = RunRecord({}, {}, {}, {}, [])  # of a failed point or an older version
    assert {break_even(*pair) for pair in ((timed(None), timed(0.01)), (timed(0.01), timed(None)))} == {None}
    assert {break_even(*pair) for pair in ((without, timed(0.01)), (timed(0.01), without))} == {None}


def test_break_even_compares_steps_with_the_same_number_of_requests() -> None:
    """Where requests end one by one, drafting has more of its steps with few of them."""
    plain = timed(0.010, n4=[1, 0.004], n2=[5, 0.001])
    drafting = timed(0.020, n4=[30, 0.180], n3=[9, 9.0])
    assert break_even(drafting, plain) == pytest.approx((0.2 + 0.18) / (0.1 + 30 * 0.004))
