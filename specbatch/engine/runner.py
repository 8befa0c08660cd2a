"""Between the plan and the device: launches what the scheduler planned and books what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from specbatch.core.async_copy import AsyncCopy, StepTimer, seconds_of, upload
from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.device_batch import DeviceBatch, SamplingFlags
from specbatch.core.request import Request
from specbatch.core.step_input import StepInput
from specbatch.engine.draft_length import DraftLength, rising
from specbatch.engine.prefill import PromptPass
from specbatch.engine.scheduler import ScheduledRequest, Scheduler
from specbatch.engine.step import DecodeStep
from specbatch.errors import SpecbatchError
from specbatch.runtime.cuda_graphs import GraphCounters, Recorder, Result, WholeGraphs

OnTokens = Callable[[Request, list[int]], None]
ENOUGH_S = 0.05  # of timing the same thing


@dataclass(frozen=True)
class Launched:
    """Work on the device whose result the host has not looked at. `first` tells prefill from an iteration."""

    rows: list[ScheduledRequest]
    result: AsyncCopy
    first: bool
    timer: StepTimer | None = None  # device time of an iteration
    host_s: float = 0.0  # host time in launching it
    drafts: int = 0
    judged: frozenset[int] = frozenset()  # rows whose drafter had all it needs, by their place


@dataclass
class Counters:
    """What the device was asked to do since the record began."""

    iterations: int = 0
    iteration_rows: int = 0
    iteration_s: float = 0.0  # host time in launching iterations and in waiting for their results
    prefill_passes: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    void_results: int = 0  # rows computed for a request that had ended or was retracted
    host_waits: int = 0  # waits for an iteration with nothing launched behind it: the device runs dry
    overlapped: int = 0  # iterations launched straight behind one that was not handled yet
    late_launches: int = 0  # of those, launched when the one before was done already: the device ran dry
    launch_lead_s: float = 0.0  # summed over overlapped: from the end of a launch to the result of the one before
    device_s: float = 0.0  # device time of iterations, those aside that were recorded just before
    device_steps: int = 0
    device_idle_s: float = 0.0  # device time between iterations that follow each other with no prefill between
    device_gaps: int = 0
    # By the number of requests that ran, as text: steps, and their seconds: device time and the gap before it where
    # that is known; without a CUDA device the host's time in launching and waiting.
    steps_by_rows: dict[str, list[float]] = field(default_factory=dict)

    def add_step(self, rows: int, seconds: float) -> None:
        entry = self.steps_by_rows.setdefault(str(rows), [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    # iterations by batch bucket and drafts, where their number is chosen
    draft_lengths: dict[int, dict[int, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        lengths = {
            str(rows): {str(n): count for n, count in steps.items()} for rows, steps in self.draft_lengths.items()
        }
        return asdict(self) | {"draft_lengths": lengths}


class Runner:
    """The helpers that both schedules are made of: prefill, decode, handle."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: DeviceBatch,
        iteration: DecodeStep,
        prompt_pass: PromptPass,
        *,
        lengths: DraftLength,
        idle_at_zero: bool,
        depth: int,
        page_size: int,
        chunk: int,
        seed: int,
        on_tokens: OnTokens,
        recorder: Recorder | None = None,
    ) -> None:
        """lengths: who says how much is drafted; rests: see `DraftPlan`; depth: drafts that a verify can accept; chunk:
        tokens of the largest prompt pass; recorder: for whole-iteration graphs, or None to run eagerly."""
        self.scheduler = scheduler
        self.counters = Counters()
        self._batch = batch
        self._iteration = iteration
        self._prompt_pass = prompt_pass
        self._lengths = lengths
        self._idle_at_zero = idle_at_zero
        self._drafts = 0  # of the last iteration
        self._chunk = chunk
        self._depth = depth
        self._page_size = page_size
        self._seed = seed
        self._on_tokens = on_tokens
        self._stream = torch.cuda.Stream(batch.device) if batch.device.type == "cuda" else None
        self._launched_at = 0.0
        self._last_timer: StepTimer | None = None  # of the last iteration, if nothing was launched behind it
        self.decode_counters = GraphCounters()
        self.graphs: WholeGraphs | None = None
        if recorder is not None:
            self.graphs = WholeGraphs(self._run, recorder, batch.slots, lengths.lengths, batch.device)
            self.decode_counters = self.graphs.counters

    def watch_logits(self, see: Callable[[torch.Tensor], None] | None) -> None:
        """Show `see` the logits [B, V] behind each prompt that ends from now on; None: nobody."""
        self._prompt_pass.watch = see

    def start_record(self) -> Counters:
        """New counters. What the host did until now left a gap behind the last iteration that is not theirs."""
        self._last_timer = None
        self.counters = Counters()
        return self.counters

    @torch.inference_mode()
    def prefill(self) -> Launched | None:
        """Launch the next prompt chunks. None when there are none, or none completes its prompt."""
        start = time.perf_counter()
        plan = self.scheduler.plan_prefill(start)
        if plan is None:
            return None
        if plan.admitted:
            self._batch.admit(plan.admitted, [self._seed_of(request) for request in plan.admitted])
        result = self._prompt_pass(self._batch, plan)
        self._last_timer = None
        self.counters.prefill_passes += 1
        self.counters.prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        self.counters.prefill_s += time.perf_counter() - start
        if result is None:
            return None
        rows = [ScheduledRequest(chunk.request, chunk.epoch, chunk.slot) for chunk in plan.chunks if chunk.last]
        return Launched(rows, self._send(result), first=True)

    @torch.inference_mode()
    def decode(self, *, may_retract: bool) -> Launched | None:
        """Launch one iteration. None when no request can gain a token."""
        start = time.perf_counter()
        plan = self.scheduler.plan_decode(may_retract=may_retract)
        if plan is None:
            return None
        self._batch.add_pages(plan.new_pages)
        slots = [row.slot for row in plan.rows]
        flags = SamplingFlags.of(row.request for row in plan.rows)
        drafts = self._lengths.choose(len(slots))
        if self._prepare(plan.rows, drafts, plan.bound):
            self._last_timer = None  # that is no part of an iteration with so many drafts
        begun = time.perf_counter()
        timer, recorded = StepTimer.begin(self._batch.device), self.decode_counters.recorded_late
        result = self._launch(slots, flags, drafts, plan.bound)
        if self.decode_counters.recorded_late > recorded:
            timer = None  # its time is that of recording
        if timer is not None:
            timer.end(behind=self._last_timer)
        self._last_timer = timer
        judged = frozenset(place for place, row in enumerate(plan.rows) if row.request.draft_kv_valid_until is None)
        copy = self._send(result)
        self._launched_at = time.perf_counter()
        if self._lengths.is_auto:
            steps = self.counters.draft_lengths.setdefault(self._lengths.bucket(len(slots)), {})
            steps[drafts] = steps.get(drafts, 0) + 1
            if timer is None and self._stream is None:  # a CPU is done
                self._lengths.took(len(slots), drafts, self._launched_at - begun)
        self.counters.iterations += 1
        self.counters.iteration_rows += len(plan.rows)
        self.counters.iteration_s += self._launched_at - start
        host_s = self._launched_at - start
        return Launched(plan.rows, copy, first=False, timer=timer, host_s=host_s, drafts=drafts, judged=judged)

    @torch.inference_mode()
    def time_lengths(self) -> dict[int, dict[int, float]]:
        """Seconds of an iteration by batch bucket and drafts, over rows for padding, for whoever chooses.

        It is the shortest of what fits into ENOUGH_S, up to 5, behind one that warms up, and no longer than that of
        more requests or drafts (`rising`)."""
        lengths, device = self._lengths, self._batch.device

        def time_it(work: Callable[[], object]) -> float:
            times: list[float] = []
            work()
            while len(times) < 5 and sum(times) < ENOUGH_S:
                times.append(seconds_of(work, device))
            return min(times)

        measured: dict[int, dict[int, float]] = {}
        for bucket in reversed(lengths.buckets):
            slots, bound = [0] * bucket, self.scheduler.rows + 1
            # From long to short, so that what prepares the drafter runs once, too.
            measured[bucket] = {}
            for n in reversed(lengths.lengths):
                self._shorten(slots, n, bound)
                measured[bucket][n] = time_it(partial(self._launch, slots, SamplingFlags(), n, bound))
        lengths.times = rising(measured)
        if self._idle_at_zero:
            count = min(self._chunk, self._batch.width - 1)
            spans = [PromptChunk(0, 0, count)]
            lengths.catch_up_s = time_it(partial(self._prompt_pass.catch_up, self._batch, spans, self._chunk))
        return lengths.times

    def _prepare(self, rows: list[ScheduledRequest], drafts: int, bound: int) -> bool:
        """Let the drafter get ready for another number of drafts. True if anything was launched."""
        shortened = self._shorten([row.slot for row in rows], drafts, bound)
        return self._wake(rows, drafts) or shortened

    def _shorten(self, slots: list[int], drafts: int, bound: int) -> bool:
        """Before an iteration that drafts fewer than the one before."""
        before, self._drafts = self._drafts, drafts
        if drafts >= before:
            return False
        bucket = self._lengths.bucket(len(slots))
        rows = upload([*slots, *[0] * (bucket - len(slots))], self._batch.device)
        self._iteration.shorten(self._step(rows, SamplingFlags(), drafts, bound))
        return True

    def _wake(self, rows: list[ScheduledRequest], drafts: int) -> bool:
        """Let a drafter that rests while nothing is drafted catch up. True if anything was launched."""
        if not self._idle_at_zero:
            return False
        requests = [row.request for row in rows]
        if not drafts:
            for request in requests:
                if request.draft_kv_valid_until is None:  # the newest committed token may be without keys, too
                    request.draft_kv_valid_until = max(request.committed - 1, 0)
            return False
        spans: list[PromptChunk] = []
        budget = self._chunk
        # Each result in flight leaves a token, and no more where nothing was drafted. The draft runs the newest itself.
        missing = [
            (request.committed + request.in_flight - 2 - request.draft_kv_valid_until, request)
            for request in requests
            if request.draft_kv_valid_until is not None
        ]
        for count, request in sorted(missing, key=lambda item: item[0]):
            budget -= count
            if self._lengths.probing and budget < 0 and spans:
                break  # these are enough to learn from
            assert request.draft_kv_valid_until is not None
            assert request.slot is not None
            if count > 0:
                start = request.draft_kv_valid_until
                spans.append(PromptChunk(request.slot, start, start + count))
            request.draft_kv_valid_until = None
        self._prompt_pass.catch_up(self._batch, spans, self._chunk)
        return bool(spans)

    def _launch(self, slots: list[int], flags: SamplingFlags, drafts: int, bound: int) -> Result:
        """One iteration, replayed or not."""
        if self.graphs is not None:
            return self.graphs(slots, flags, drafts)
        self.decode_counters.fall_back("off")
        return self._run(upload(slots, self._batch.device), flags, drafts, bound)

    def _run(self, slots: torch.Tensor, flags: SamplingFlags, drafts: int, bound: int | None = None) -> Result:
        """One iteration over device rows [B]; what a graph records."""
        return self._iteration(self._step(slots, flags, drafts, self._batch.width - 1 if bound is None else bound))

    def _step(self, slots: torch.Tensor, flags: SamplingFlags, drafts: int, bound: int) -> StepInput:
        batch = self._batch
        lengths, sampling = batch.look_up(slots, flags)
        return StepInput(
            batch=batch,
            slots=slots,
            lengths=lengths,
            num_drafts=drafts,
            page_size=self._page_size,
            bound=bound,
            sampling=sampling,
        )

    def handle(self, launched: Launched, *, overlapped: bool = False) -> None:
        """Wait for a result and book it: tokens, lengths, endings. `overlapped`: another iteration is launched."""
        start = time.perf_counter()
        late = overlapped and launched.result.ready()
        values, *logprobs = launched.result.wait()
        now = time.perf_counter()
        if not launched.first:
            self._count_times(launched, start, now, overlapped, late)
        accepted = []
        for index, row in enumerate(launched.rows):
            request = row.request
            if self.scheduler.is_void(request, row.epoch):
                self.counters.void_results += 1
                continue
            if index in launched.judged:
                accepted.append(values[index][-3])
            self._book(request, values[index], logprobs[0][index] if logprobs else None, launched.first, now)
        if self._lengths.is_auto and not launched.first:
            self._lengths.learn(launched.drafts, accepted)

    def _count_times(self, launched: Launched, start: float, now: float, overlapped: bool, late: bool) -> None:
        counters = self.counters
        counters.iteration_s += now - start
        rows = len(launched.rows)
        if launched.timer is None:
            if self._stream is None:  # a CPU runs each operation before the host goes on
                counters.add_step(rows, launched.host_s + now - start)
            return
        if not overlapped:
            counters.host_waits += 1
        elif self._last_timer is not None and self._last_timer.follows:  # no prefill between them
            counters.overlapped += 1
            counters.late_launches += late
            counters.launch_lead_s += 0.0 if late else now - self._launched_at
        step, gap = launched.timer.seconds()
        counters.device_s += step
        counters.device_steps += 1
        if gap is not None:
            counters.device_idle_s += gap
            counters.device_gaps += 1
        counters.add_step(rows, step + (gap or 0.0))
        if self._lengths.is_auto:
            self._lengths.took(len(launched.rows), launched.drafts, step + (gap or 0.0))

    def _book(self, request: Request, values: list[int], logprobs: list[float] | None, first: bool, now: float) -> None:
        request.pending -= 1
        if first:
            tokens, sound = values[:1], values[1]
            accepted = drafted = 0
        else:
            *tokens, accepted, drafted, sound = values
            request.in_flight -= 1
            request.committed += accepted + 1
        if not sound:
            raise SpecbatchError(
                f"logits of prompt {request.index} are not finite behind token {len(request.tokens)}: the weights "
                "are damaged or overflow in this dtype; try dtype='float32' or 'bfloat16'"
            )
        kept = request.append(tokens[: accepted + 1], now, logprobs if request.params.logprobs else None)
        if not first:
            request.count_verify(kept, drafted, accepted, self._depth)
        if request.finished:
            self.scheduler.release(request)
        self._on_tokens(request, request.tokens[len(request.tokens) - kept :])

    def _send(self, result: tuple[torch.Tensor, torch.Tensor | None]) -> AsyncCopy:
        return AsyncCopy(*(item for item in result if item is not None), stream=self._stream)

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or one from the engine's seed and its index; as a signed 64-bit number."""
        own = request.params.seed
        value = int(own) if own is not None else (self._seed << 32) + request.index
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)
