"""Counters of the steps of an engine, as the metrics of a run read them: step times, CUDA graphs, full batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbatch.records.run_record import RunRecord

MIN_FULL_STEPS = 20  # iterations at full batch whose mean is a step time


@dataclass(frozen=True)
class Steps:
    """The counters of a record, of a run of `concurrency` requests on so many replicas."""

    counters: Mapping[str, Any]
    concurrency: int | None = None
    accept_length: float | None = None
    replicas: int = 1

    def mean(self, total: str, count: str) -> float | None:
        """One counter over another one; None if that is 0."""
        return self.counters[total] / self.counters[count] if self.counters[count] else None

    @property
    def time_s(self) -> float | None:
        """From one iteration to the next."""
        busy = self.mean("device_s", "device_steps")
        if busy is None:
            return self.mean("iteration_s", "iterations")
        return busy + (self.mean("device_idle_s", "device_gaps") or 0.0)

    @property
    def idle_share(self) -> float | None:
        """Gaps are measured for some of the steps; the others are assumed to have the same mean."""
        gap = self.mean("device_idle_s", "device_gaps")
        if gap is None:
            return None
        idle: float = gap * self.counters["device_steps"]
        return idle / (idle + self.counters["device_s"])

    @property
    def graph_coverage(self) -> float | None:
        """ "off" is not a fallback: no graph was requested."""
        graphs = self.counters["graphs"].values()
        replays = sum(graph["replays"] for graph in graphs)
        passes = replays + sum(count for one in graphs for why, count in one["fallbacks"].items() if why != "off")
        return replays / passes if passes else None

    @property
    def graphs(self) -> dict[str, Mapping[str, Any]]:
        """The graphs that were requested, by kind: decode, target_prefill, draft_prefill."""
        return {name: one for name, one in self.counters["graphs"].items() if "off" not in one["fallbacks"]}

    def replays(self, kind: str) -> int | None:
        return self.graphs[kind]["replays"] if kind in self.graphs else None

    @property
    def fallbacks(self) -> int | None:
        return sum(sum(one["fallbacks"].values()) for one in self.graphs.values()) if self.graphs else None

    @property
    def padding(self) -> int | None:
        return sum(one["padded"] for one in self.graphs.values()) if self.graphs else None

    @property
    def full(self) -> tuple[int, float | None] | None:
        """How many iterations ran the share of one replica of all requests, and their mean time."""
        return steps_at(self.counters, -(-self.concurrency // self.replicas)) if self.concurrency else None

    @property
    def full_count(self) -> int | None:
        return self.full[0] if self.full else None

    @property
    def full_s(self) -> float | None:
        return self.full[1] if self.full and self.full[0] >= MIN_FULL_STEPS else None

    @property
    def full_throughput(self) -> float | None:
        """Tokens per second of a full batch."""
        if self.concurrency and self.accept_length and self.full_s:
            return self.concurrency * self.accept_length / self.full_s
        return None


def steps_at(counters: Mapping[str, Any], rows: int) -> tuple[int, float | None]:
    """How many iterations ran exactly `rows` requests, and their mean step time in seconds (None without any)."""
    steps, seconds = counters["steps_by_rows"].get(str(rows), (0, 0.0))
    return int(steps), seconds / steps if steps else None


def break_even(drafting: RunRecord, baseline: RunRecord) -> float | None:
    """The accept length that `drafting` needs to be as fast as `baseline`; None if a time is missing.

    It is the time of its steps over the time of as many baseline steps, each with the same number of requests. Batch
    sizes that one of the two runs never had are left out.
    """
    steps, others = (record.counters.get("steps_by_rows", {}) for record in (drafting, baseline))
    shared = [rows for rows in steps if rows in others]
    drafting_s = sum(steps[rows][1] for rows in shared)
    baseline_s = sum(steps[rows][0] * others[rows][1] / others[rows][0] for rows in shared)
    return drafting_s / baseline_s if drafting_s and baseline_s else None
