"""Between the plan and the device: launches what the scheduler planned and books what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbatch.batch import DeviceBatch
from specbatch.drafters.base import Step
from specbatch.errors import SpecbatchError
from specbatch.iteration import Iteration
from specbatch.memory.pages import pages_for
from specbatch.prefill import PromptPass
from specbatch.request import Request
from specbatch.scheduler import Row, Scheduler
from specbatch.transfer import Ticket, upload

OnTokens = Callable[[Request, list[int]], None]


@dataclass(frozen=True)
class Launched:
    """Work on the device whose result the host has not looked at. `first` tells prefill from an iteration."""

    rows: list[Row]
    ticket: Ticket
    first: bool


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


class Runner:
    """The helpers that both schedules are made of: prefill, decode, handle."""

    def __init__(
        self,
        scheduler: Scheduler,
        batch: DeviceBatch,
        iteration: Iteration,
        prompt_pass: PromptPass,
        *,
        page_size: int,
        seed: int,
        on_tokens: OnTokens,
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._batch = batch
        self._iteration = iteration
        self._prompt_pass = prompt_pass
        self._page_size = page_size
        self._seed = seed
        self._on_tokens = on_tokens
        self._stream = torch.cuda.Stream(batch.device) if batch.device.type == "cuda" else None

    @torch.inference_mode()
    def prefill(self) -> Launched | None:
        """Launch the next prompt chunks. None when there are none, or none completes its prompt."""
        start = time.perf_counter()
        plan = self.scheduler.plan_prefill(start)
        if plan is None:
            return None
        if plan.admitted:
            self._batch.admit(plan.admitted, [self._seed_of(request) for request in plan.admitted])
        result = self._prompt_pass(self._batch, plan.chunks)
        self.counters.prefill_passes += 1
        self.counters.prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        self.counters.prefill_s += time.perf_counter() - start
        if result is None:
            return None
        rows = [Row(chunk.request, chunk.epoch, chunk.slot) for chunk in plan.chunks if chunk.last]
        return Launched(rows, self._send(result), first=True)

    @torch.inference_mode()
    def decode(self, *, may_retract: bool) -> Launched | None:
        """Launch one iteration. None when no request can gain a token."""
        start = time.perf_counter()
        plan = self.scheduler.plan_decode(may_retract=may_retract)
        if plan is None:
            return None
        batch = self._batch
        batch.add_pages(plan.new_pages)
        rows = upload([row.slot for row in plan.rows], batch.device)
        step = Step(
            batch=batch,
            rows=rows,
            lengths=batch.lengths[rows],
            page_table=batch.page_table[rows, : pages_for(plan.bound, self._page_size)],
            page_size=self._page_size,
            bound=plan.bound,
            sampling=batch.sampling(rows, [row.request for row in plan.rows]),
        )
        launched = Launched(plan.rows, self._send(self._iteration(step)), first=False)
        self.counters.iterations += 1
        self.counters.iteration_rows += len(plan.rows)
        self.counters.iteration_s += time.perf_counter() - start
        return launched

    def handle(self, launched: Launched) -> None:
        """Wait for a result and book it: tokens, lengths, endings."""
        start = time.perf_counter()
        values, *logprobs = launched.ticket.wait()
        now = time.perf_counter()
        if not launched.first:
            self.counters.iteration_s += now - start
        for index, row in enumerate(launched.rows):
            request = row.request
            if self.scheduler.is_void(request, row.epoch):
                self.counters.void_results += 1
                continue
            self._book(request, values[index], logprobs[0][index] if logprobs else None, launched.first, now)

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
            request.count_verify(kept, drafted, accepted, len(tokens))
        if request.finished:
            self.scheduler.release(request)
        self._on_tokens(request, request.tokens[len(request.tokens) - kept :])

    def _send(self, result: tuple[torch.Tensor, torch.Tensor | None]) -> Ticket:
        return Ticket(*(item for item in result if item is not None), stream=self._stream)

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or one from the engine's seed and its index; as a signed 64-bit number."""
        own = request.params.seed
        value = int(own) if own is not None else (self._seed << 32) + request.index
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)
