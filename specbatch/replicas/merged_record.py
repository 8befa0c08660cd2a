"""The record of a data-parallel engine: requests as its user sees them, and the counters of all replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specbatch.core.completion import Completion
from specbatch.engine.record_window import RequestWindow
from specbatch.engine.scoring import Tally
from specbatch.records.run_record import RunRecord

_OF_REQUESTS = {"acceptance", "emitted_histogram", "errors", "scoring"}  # counters of requests, which the window has


class MergedWindow(RequestWindow):
    """The window of all replicas. replaced: replicas that had been replaced when it opened."""

    def __init__(self, *, rows: bool, replaced: int) -> None:
        super().__init__(Tally(), rows=rows)
        self.replaced = replaced

    def complete_request(self, completion: Completion, arrived: float) -> None:
        """Add a completion that has just come. arrived: when its prompt did."""
        self.add(completion, time.perf_counter())
        metrics = completion.metrics
        if metrics.ttft_s is None:
            return
        assert self._opened is not None
        seconds = np.cumsum([max(0.0, arrived - self._opened) + metrics.ttft_s, *metrics.itl_s]).astype(np.int64)
        for second, count in enumerate(np.bincount(seconds - seconds[0]), int(seconds[0])):
            self._tokens[second] += int(count)

    def record(
        self,
        config: dict[str, Any],
        caps: dict[str, Any],
        concurrency: int | None,
        workload: dict[str, Any],
        parts: list[RunRecord],
    ) -> RunRecord:
        """The record of the window. parts: of the replicas."""
        sums = _sums({name: part.counters[name] for name in part.counters.keys() - _OF_REQUESTS} for part in parts)
        for part in parts:
            _lower(caps, part.caps)
        metrics, counters, requests = self.complete(sums, concurrency, replicas=config["data_parallel"])
        return RunRecord(config, caps, metrics, counters, requests, workload, hardware=_hardware(parts))


def _lower(caps: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Take over what a replica lowered after a lack of memory. own: its capacities."""
    for name in ("max_running", "prefill_chunk", "graphs"):
        if name in own and (name not in caps or own[name] < caps[name]):
            caps[name] = own[name]
            if why := own["reasons"].get(name):
                caps["reasons"] = caps["reasons"] | {name: why}


def _hardware(parts: list[RunRecord]) -> dict[str, Any]:
    """That of the first replica, with the names of all kinds of GPUs."""
    found = dict(parts[0].hardware)
    if gpus := dict.fromkeys(str(part.hardware["gpu"]) for part in parts if "gpu" in part.hardware):
        found["gpu"] = " and ".join(gpus)
    return found


def _sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all numbers, by their places in the counters."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = value if name not in found else _sum(found[name], value)
    return found


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return _sums((one, other))
    if isinstance(one, list):
        return [value + more for value, more in zip(one, other, strict=True)]
    return one + other
