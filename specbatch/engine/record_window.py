"""The measured window of an engine: totals, times and counters since the last reset, as a run record."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from specbatch.core.completion import Completion
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.runner import Runner
from specbatch.engine.scoring import Tally
from specbatch.memory.state_cache import StateCache, StateCounters
from specbatch.records.environment import hardware
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import RunTotals
from specbatch.records.summarize import most_at_once, peak_throughput, request_metrics, step_metrics

EXAMPLES = 8  # completions that are kept with their tokens


class RequestWindow:
    """What a window knows of its requests. It opens with the first submission and ends with the last completion.

    tally   of what was scored
    """

    def __init__(self, tally: Tally, *, rows: bool) -> None:
        """rows: whether to keep the numbers of each request."""
        self.tally = tally
        self._totals = RunTotals()
        self._rows: list[Completion] | None = [] if rows else None  # without tokens and text
        self._opened: float | None = None
        self._closed: float | None = None
        self._tokens: Counter[int] = Counter()  # output tokens by second of the window
        self._spans: list[tuple[float, float]] = []  # submission and end of each request with a row

    def open(self, now: float) -> None:
        """Start the clock, unless it runs."""
        if self._opened is None:
            self._opened = now

    def add_tokens(self, now: float, count: int) -> None:
        """Count output tokens at a time after the opening."""
        assert self._opened is not None
        self._tokens[int(now - self._opened)] += count

    def add(self, completion: Completion, now: float) -> None:
        self._closed = now
        self._totals.add(completion)
        if self._rows is not None:
            self._spans.append((now - completion.metrics.e2e_s, now))
            numbers = replace(completion, prompt_token_ids=[], token_ids=[], text="")
            numbers = replace(numbers, logprobs=None, top_logprobs=None, prompt_logprobs=None)
            self._rows.append(numbers)

    def complete(
        self, counters: dict[str, Any], concurrency: int | None, *, replicas: int = 1
    ) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """Metrics, counters and the rows of the requests, for a record. counters: of the steps, to which those of the
        requests are added."""
        seconds = 0.0
        if self._opened is not None:  # up to the last completion, or to now if there is none yet
            seconds = (time.perf_counter() if self._closed is None else self._closed) - self._opened
        metrics = request_metrics(self._totals, seconds, concurrency)
        metrics["peak_output_throughput"] = peak_throughput(self._tokens, seconds)
        metrics["peak_concurrency"] = most_at_once(self._spans)
        counters["emitted_histogram"] = list(self._totals.emitted_histogram)
        counters["acceptance"] = self._totals.acceptance.as_counters()
        if self._totals.errors:
            counters["errors"] = dict(self._totals.errors)
        metrics |= step_metrics(counters, concurrency, metrics["accept_length"], replicas=replicas)
        requests = [item.as_row() for item in self._rows or ()]
        if self.tally.rows:
            counters["scoring"] = self.tally.numbers()
            if self._closed is None:  # nothing was generated
                metrics, requests = counters["scoring"], list(self.tally.rows)
        return metrics, counters, requests


class RecordWindow(RequestWindow):
    """The window of one engine, with the counters of its steps.

    examples   the first completions of text prompts, for a diagnosis
    """

    def __init__(
        self, runner: Runner, worker: DeviceWorker, state_cache: StateCache | None, tally: Tally, *, rows: bool
    ) -> None:
        """Resets all counters."""
        tally.reset()
        super().__init__(tally, rows=rows)
        self.examples: list[Completion] = []
        self._counters = runner.start_record()
        self._graphs = {"decode": worker.decode_counters}
        self._graphs |= {f"{role}_prefill": forward.counters for role, forward in worker.forwards.items()}
        for counters in self._graphs.values():
            counters.reset()
        self._state_cache = state_cache
        if state_cache is not None:
            state_cache.counters = StateCounters()

    @property
    def iterations(self) -> int:
        """Decode steps launched."""
        return self._counters.iterations

    def add(self, completion: Completion, now: float) -> None:
        super().add(completion, now)
        if len(self.examples) < EXAMPLES and completion.is_complete and not completion.metrics.embedded_tokens:
            self.examples.append(completion)

    def record(
        self, config: dict[str, Any], caps: dict[str, Any], concurrency: int | None, workload: dict[str, Any]
    ) -> RunRecord:
        counters = self._counters.as_dict()
        counters["graphs"] = {name: asdict(item) for name, item in self._graphs.items()}
        if self._state_cache is not None:
            counters["states"] = asdict(self._state_cache.counters)
        metrics, counters, requests = self.complete(counters, concurrency)
        return RunRecord(config, caps, metrics, counters, requests, workload, hardware=hardware(caps["device"]))
