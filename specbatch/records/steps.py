"""Counters of the steps of an engine, and what the metrics of a run read from them: step times, CUDA graphs, full
batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specbatch.records.run_record import RunRecord

MIN_FULL_STEPS = 20  # iterations at full batch whose mean is a step time


@dataclass
class Counters:
    """Counts and times in seconds since the record was opened. An iteration is one decode step."""

    iterations: int = 0
    iteration_rows: int = 0  # requests, summed over iterations
    iteration_s: float = 0.0  # host time spent launching iterations and waiting for their results
    prefill_passes: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0  # host time spent launching
    void_results: int = 0  # results for requests that had ended or were retracted
    host_waits: int = 0  # waits for an iteration with nothing launched after it: the device runs dry
    overlapped: int = 0  # iterations launched directly after one that was not handled yet
    late_launches: int = 0  # of those, launched after the previous one was done: the device ran dry
    launch_lead_s: float = 0.0  # summed over overlapped: from the end of a launch to the result of the previous one
    device_s: float = 0.0  # device time of iterations, without those that recorded a graph first
    device_steps: int = 0
    device_idle_s: float = 0.0  # device time between consecutive iterations with no prefill between them
    device_gaps: int = 0
    sharing_iterations: int = 0  # that read prefixes which requests share once
    shared_tokens: int = 0  # summed over those: whose keys a layer would else have read again
    prefill_device_s: float = 0.0  # device time of prefill passes before iterations, launches within a pass included
    prefill_idle_s: float = 0.0  # device time between these passes and what was launched before and after them
    # By the number of requests, as text: iterations and their seconds. Device time and the gap before it where known;
    # without a CUDA device the host's time for launching and waiting.
    steps_by_rows: dict[str, list[float]] = field(default_factory=dict)
    # With draft_tokens="auto", iterations by batch bucket and number of drafts, "3 for 4" where only 4 requests draft;
    # and the same by bucket and by the mean context of the requests, as the power of two at or below it.
    draft_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    draft_lengths_by_context: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    # With verify_budget="auto", iterations by batch bucket and rows per request; 1 where nothing is drafted.
    verify_budgets: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_pass(self, seconds: float, gap: float | None) -> None:
        """Add a prefill pass and the gap before it, if that is known."""
        self.prefill_device_s += seconds
        self.prefill_idle_s += gap or 0.0

    def add_device_step(self, seconds: float, gap: float | None, *, follows: bool) -> float:
        """Add an iteration and the gap before it, if that is known. follows: directly after another iteration. Returns
        its seconds, with the gap if it follows."""
        self.device_s += seconds
        self.device_steps += 1
        if gap is None or not follows:
            self.prefill_idle_s += gap or 0.0
            return seconds
        self.device_idle_s += gap
        self.device_gaps += 1
        return seconds + gap

    def add_step(self, rows: int, seconds: float) -> None:
        entry = self.steps_by_rows.setdefault(str(rows), [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    def add_draft_length(self, bucket: int, context: int, drafts: int, drafting: int | None = None) -> None:
        """drafting: the number of requests that draft; None for all."""
        rows, name = str(bucket), str(drafts) if drafting is None else f"{drafts} for {drafting}"
        by_context = self.draft_lengths_by_context.setdefault(rows, {})
        power = str(1 << (max(context, 1).bit_length() - 1))
        for steps in (self.draft_lengths.setdefault(rows, {}), by_context.setdefault(power, {})):
            steps[name] = steps.get(name, 0) + 1

    def add_verify_budget(self, bucket: int, budget: float) -> None:
        steps, name = self.verify_budgets.setdefault(str(bucket), {}), f"{budget:g}"
        steps[name] = steps.get(name, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Steps:
    """The counters of a record, of a run of `concurrency` requests on so many replicas."""

    counters: Mapping[str, Any]
    concurrency: int | None = None
    accept_length: float | None = None
    replicas: int = 1

    def mean(self, total: str, count: str) -> float | None:
        """One counter over another one; None if that is 0."""
        number = self.counters[count]
        return float(self.counters[total] / number) if number else None

    @property
    def time_s(self) -> float | None:
        """From one iteration to the next."""
        busy = self.mean("device_s", "device_steps")
        if busy is None:
            return self.mean("iteration_s", "iterations")
        return busy + (self.mean("device_idle_s", "device_gaps") or 0.0)

    @property
    def idle_share(self) -> float | None:
        """In records without the time of prefill passes, all steps are assumed to have the mean gap of those that
        follow each other."""
        gap = self.mean("device_idle_s", "device_gaps")
        if gap is None:
            return None
        counters, idle = self.counters, gap * self.counters["device_steps"]
        busy = counters["device_s"] + counters.get("prefill_device_s", 0.0)
        if "prefill_idle_s" in counters:
            idle = counters["device_idle_s"] + counters["prefill_idle_s"]
        return float(idle / (idle + busy))

    @property
    def graph_coverage(self) -> float | None:
        """The fallback "off" does not count: no graph was requested."""
        graphs = self.counters["graphs"].values()
        replays = sum(graph["replays"] for graph in graphs)
        passes = replays + sum(count for one in graphs for why, count in one["fallbacks"].items() if why != "off")
        return replays / passes if passes else None

    @property
    def graphs(self) -> dict[str, Mapping[str, Any]]:
        """The graphs that were requested, by kind: decode, target_prefill, draft_prefill."""
        return {name: one for name, one in self.counters["graphs"].items() if "off" not in one["fallbacks"]}

    def of_graphs(self, count: Callable[[Mapping[str, Any]], int]) -> int | None:
        """A count, summed over these graphs; None without any."""
        return sum(map(count, self.graphs.values())) if self.graphs else None

    @property
    def full(self) -> tuple[int | None, float | None]:
        """How many iterations ran all requests, or the share of one replica, and the mean time of enough of them."""
        if not self.concurrency:
            return None, None
        count, seconds = steps_at(self.counters, -(-self.concurrency // self.replicas))
        return count, seconds if count >= MIN_FULL_STEPS else None

    @property
    def full_throughput(self) -> float | None:
        """Tokens per second of a full batch."""
        _, seconds = self.full
        if self.concurrency and self.accept_length and seconds:
            return self.concurrency * self.accept_length / seconds
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
