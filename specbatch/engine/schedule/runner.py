"""Runner: executes the scheduler's plans (prefill and decode launches) and handles their results on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from specbatch.core.async_copy import AsyncCopy, StepTimer
from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.request import Logprobs, Request
from specbatch.core.sampling_flags import SamplingFlags
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests
from specbatch.engine.schedule.host_grammars import HostDrafting, host_masks
from specbatch.engine.schedule.launched import Launched
from specbatch.engine.schedule.plans import ScheduledChunk, ScheduledRequest
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.engine.schedule.smaller_batch import Launch
from specbatch.engine.schedule.worker_calls import admission, prefill_work, scored
from specbatch.memory.shared_prefixes import PrefixGroups
from specbatch.records.steps import Counters
from specbatch.runtime.cuda_graphs import Result

UNKNOWN = 256  # tokens that an answer of unknown length is expected to have yet, at least
OnTokens = Callable[[Request, list[int]], None]


class Runner:
    """The three operations that both schedules consist of: prefill, decode, handle. It keeps the host's side: times,
    counters and bookkeeping. The worker launches."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: DeviceWorker,
        draft_length: DraftLength,
        *,
        catch_up: str,
        skips_prompts: bool,
        depth: int,
        has_budget: bool,
        seed: int,
        on_tokens: OnTokens,
        on_result: Callable[[float, int], None],
        meanwhile: Callable[[], bool],
        on_prefill: Callable[[int], None],
    ) -> None:
        """catch_up: see `DraftPlan`; skips_prompts: whether the drafter need not run for prompts, and may catch up with
        them later; depth: the most drafts that a verify can accept; has_budget: whether verifies have a budget of rows;
        seed: of the engine; on_tokens: called with the new tokens of a request; on_result: called with the time of a
        result and the number of its tokens, after them; meanwhile: called again and again while a result is awaited;
        does a part of what can wait, and returns whether there was any; on_prefill: called with the number of tokens of
        a prefill pass."""
        self.scheduler = scheduler
        self.counters = Counters()
        self._worker = worker
        self._draft_length = draft_length
        self._lags = catch_up != "none"
        self._own = int(catch_up == "draft")  # of the newest tokens, so many are computed in the step itself
        self._skips_prompts = skips_prompts and self._lags
        self._depth = depth
        self._has_budget = has_budget
        self._seed = seed
        self._on_tokens = on_tokens
        self._on_result = on_result
        self._meanwhile = meanwhile
        self._on_prefill = on_prefill
        device = worker.batch.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.launch = Launch()  # the last one, which may have failed
        self._num_drafts = 0  # of the last decode step that the drafter took part in
        self._sharing: PrefixGroups | None = None  # what the worker knows of it
        self._launched_at = 0.0
        self._last_timer: StepTimer | None = None  # of the last launch, if nothing without a timer came after it
        self._passes: list[StepTimer] = []  # prefill passes since the last decode step

    def start_record(self) -> Counters:
        """Reset the counters."""
        self.rest()
        self.counters = Counters()
        return self.counters

    def rest(self) -> None:
        """There is nothing to do: the time until the next launch is not idle time."""
        self._last_timer = None
        self._passes = []

    @torch.inference_mode()
    def prefill(self) -> Launched | None:
        """Launch the next prompt chunks. None if there are none, or the host needs nothing of them."""
        start = time.perf_counter()
        plan = self.scheduler.plan_prefill(start)
        if plan is None:
            return None
        timer = StepTimer.begin(self._worker.batch.device, is_prefill=True)
        tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
        self.launch = Launch(tokens, prefills=True, rank=self._worker.rank)
        for place, automaton in self.scheduler.grammars.take_new():
            self._worker.load_grammar(place, automaton.cells)
        if plan.admitted:
            self._worker.admit([admission(request, self._seed) for request in plan.admitted])
        counts = [(chunk, scored(chunk)) for chunk in plan.chunks]
        drafts = self._drafts_prompts(plan.chunks)
        result = self._worker.prefill(prefill_work(plan, counts, drafts=drafts))
        if timer is not None:
            timer.end(previous=self._last_timer)
            self._passes.append(timer)
        self._last_timer = timer
        self.counters.prefill_passes += 1
        self.counters.prefill_tokens += tokens
        self.counters.prefill_s += time.perf_counter() - start
        self._on_prefill(tokens)
        first = None if result.first is None else self._copy(result.first)
        found = result.prompt_logprobs
        scores = None if found is None else AsyncCopy(found, stream=self._stream)
        if first is None and scores is None:
            return None
        ending = [chunk for chunk in plan.chunks if chunk.last]
        return Launched(ending, first, first=True, scored=counts, scores=scores)

    @torch.inference_mode()
    def decode(self, *, may_retract: bool) -> Launched | None:
        """Launch one decode step. None if no request can gain a token."""
        start = time.perf_counter()
        plan = self.scheduler.plan_decode(may_retract=may_retract)
        if plan is None:
            return None
        self.launch = Launch(len(plan.requests), rank=self._worker.rank)
        if plan.new_pages:
            self._worker.add_pages(plan.new_pages)
        flags = SamplingFlags.union(item.request.flags for item in plan.requests)
        choice = self._draft_length.choose(len(plan.requests), lambda: self._describe(plan.requests))
        in_parts = self.scheduler.matched_on_host > 0 and any(item.request.matcher for item in plan.requests)
        if in_parts and choice.members is not None:
            choice = choice._replace(members=None)  # steps that run in parts have one form
        requests, drafting = _drafting_first(plan.requests, choice)
        slots = [item.slot for item in requests]
        self._share_prefixes(slots, choice.num_drafts)
        if self._prepare_draft(requests, drafting, choice, plan.bound):
            self._last_timer = None  # the gap before this step is not idle time
        begun = time.perf_counter()
        timer, late = StepTimer.begin(self._worker.batch.device), self._worker.decode_counters.recorded_late
        is_split = 0 < drafting < len(requests)
        if in_parts:
            result = self._decode_with_masks(requests, slots, flags, choice, plan.bound)
        else:
            some = drafting if is_split else None
            result = self._worker.decode(slots, flags, choice.num_drafts, plan.bound, some, choice.budget)
        if self._worker.decode_counters.recorded_late > late:
            timer = None  # it would show the time of recording
        if timer is not None:
            timer.end(previous=self._last_timer)
        self._last_timer = timer
        passes, self._passes = self._passes, []
        copy = self._copy(result)
        self._launched_at = time.perf_counter()
        if self._draft_length.is_auto:
            self._count_choice(requests, choice, drafting if is_split else None)
            if timer is None and self._stream is None and not in_parts:  # a CPU is done
                self._draft_length.took(choice, self._launched_at - begun)
        host_s = self._launched_at - start
        self.counters.iterations += 1
        self.counters.iteration_rows += len(requests)
        self.counters.iteration_s += host_s
        return Launched(
            requests, copy, first=False, timer=timer, passes=passes, host_s=host_s, choice=choice, in_parts=in_parts
        )

    def _decode_with_masks(
        self, requests: Sequence[ScheduledRequest], slots: list[int], flags: SamplingFlags, choice: Choice, bound: int
    ) -> Result:
        """A decode step that waits for its drafts: grammars on the host tell which tokens may follow them."""
        self._worker.host.answers = HostDrafting(requests)
        drafts = self._worker.propose(slots, flags, choice.num_drafts, bound, choice.budget)
        copy = AsyncCopy(*(item for item in drafts if item is not None), stream=self._stream)
        self._worker.verify()
        tokens, drafted, *ancestors = copy.wait()
        kept = [row[:count] for row, count in zip(tokens, drafted, strict=True)]
        masks = host_masks(requests, kept, ancestors[0] if ancestors else None)
        assert masks is not None
        return self._worker.accept(masks)

    def handle(self, launched: Launched, *, overlapped: bool = False) -> None:
        """Wait for a result and book it. `overlapped`: another decode step is launched already."""
        start = time.perf_counter()
        self._note_prompt_logprobs(launched)
        if launched.result is None:
            return
        late = overlapped and launched.result.ready()
        while not launched.result.ready() and self._meanwhile():
            pass
        values, *more = launched.result.wait()
        if self._worker.others is not None:
            self._worker.others.check()
        now = time.perf_counter()
        if not launched.first:
            self._count_times(launched, start, now, overlapped, late)
        finished: list[Request] = []
        accepted: list[tuple[int, int]] = []
        emitted = kept = 0
        choice = launched.choice
        values_of_drafts = more.pop() if choice.budget is not None else []
        found: list[list[float]] = []
        drafting = len(launched.requests if choice.members is None else choice.members) if choice.num_drafts else 0
        for index, item in enumerate(launched.requests):
            emitted += 1 if launched.first else values[index][-3] + 1
            request = item.request
            if self.scheduler.is_void(request, item.epoch):
                self.counters.void_results += 1
                continue
            if index < drafting:
                accepted.append((request.committed, values[index][-3]))
                found += values_of_drafts[index : index + 1]
            logprobs = Logprobs(*(of_requests[index] for of_requests in more)) if more else None
            kept += self._book(request, values[index], logprobs, launched.first, now)
            if request.finish_reason is not None and request.is_answered:
                finished.append(request)
        self._on_result(now, kept)
        self._add_to_corpus(finished)
        if self._draft_length.is_auto and not launched.first:
            self._draft_length.learn(choice, accepted, emitted, kept, len(finished), found)

    def _note_prompt_logprobs(self, launched: Launched) -> None:
        if launched.scores is None:
            return
        [values] = launched.scores.wait()
        taken = 0
        for chunk, count in launched.scored:
            found, taken = values[taken : taken + count], taken + count
            if count and not self.scheduler.is_void(chunk.request, chunk.epoch):
                assert chunk.request.prompt_logprobs is not None
                chunk.request.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + count] = found

    def _share_prefixes(self, slots: list[int], num_drafts: int) -> None:
        """Tell the worker what the requests of a step in these slots share, if it has changed."""
        found = self.scheduler.shared_prefixes(slots, num_drafts)
        if found is not self._sharing:
            self._sharing = None  # should writing fail
            self._worker.share_prefixes(found)
            self._sharing = found
        if found is not None:
            self.counters.sharing_iterations += 1
            self.counters.shared_tokens += found.saved

    def _drafts_prompts(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether the drafter runs for these chunks of prompts."""
        if not self._skips_prompts:
            return True
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        contexts, left = zip(*((len(chunk.request.tokens), _left(chunk.request)) for chunk in chunks), strict=True)
        drafts = self._draft_length.drafts_prompts(self.scheduler.expected, contexts, left, tokens)
        self.scheduler.draft_kv.prompts_launched(chunks, drafts=drafts)
        return drafts

    def _describe(self, scheduled: Sequence[ScheduledRequest]) -> Requests:
        requests = [item.request for item in scheduled]
        draft_kv = self.scheduler.draft_kv
        missing = [draft_kv.lacking(request) for request in requests] if self._lags else [0] * len(requests)
        shared = 0 if self._sharing is None else self._sharing.saved  # of the step before, which had nearly the same
        contexts, left = [request.committed for request in requests], list(map(_left, requests))
        return Requests(contexts, missing, left, shared, self.scheduler.expected)

    def _prepare_draft(self, requests: Sequence[ScheduledRequest], drafting: int, choice: Choice, bound: int) -> bool:
        """Prepare the drafter for what the first requests draft. True if anything was launched."""
        num_drafts, members = choice.num_drafts, requests
        if self._lags:
            members = requests[:drafting]
            self.scheduler.draft_kv.idles(requests[drafting:])
            if not members:
                return False
        fewer, self._num_drafts = num_drafts < self._num_drafts, num_drafts
        if fewer:
            padding = self._draft_length.bucket(len(members)) - len(members)
            self._worker.shorten([*(item.slot for item in members), *[0] * padding], num_drafts, bound)
        if not self._lags or choice.timing:
            return fewer
        chunks = self.scheduler.draft_kv.plan_catch_up(members, self._own)
        if chunks:
            step, most = self.launch, self.scheduler.prefill_chunk
            tokens = min(sum(chunk.end - chunk.start for chunk in chunks), most)
            self.launch = Launch(tokens, prefills=True, rank=self._worker.rank)
            self._worker.catch_up(
                [PromptChunk(chunk.slot, chunk.start, chunk.end, chunk.request.embeddings) for chunk in chunks], most
            )
            self.launch = step
        return fewer or bool(chunks)

    def _count_choice(self, requests: Sequence[ScheduledRequest], choice: Choice, drafting: int | None) -> None:
        """Count what a step drafts or verifies. drafting: see `Counters.add_draft_length`."""
        bucket = self._draft_length.bucket(len(requests))
        if self._draft_length.chooses_rows:
            self.counters.add_verify_budget(bucket, choice.budget or 1.0)
            return
        cached = sum(item.request.committed for item in requests) // len(requests)
        self.counters.add_draft_length(bucket, cached, choice.num_drafts, drafting)

    def _count_times(self, launched: Launched, start: float, now: float, overlapped: bool, late: bool) -> None:
        counters = self.counters
        counters.iteration_s += now - start
        rows = len(launched.requests)
        if launched.timer is None:
            if self._stream is None:  # a CPU runs each operation before the host continues
                counters.add_step(rows, launched.host_s + now - start)
            return
        if not overlapped:
            counters.host_waits += 1
        elif self._last_timer is not None and self._last_timer.follows:  # else a prefill ran between them
            counters.overlapped += 1
            counters.late_launches += late
            counters.launch_lead_s += 0.0 if late else now - self._launched_at
        follows = launched.timer.follows
        for one in launched.passes:
            counters.add_pass(*one.seconds())
        step = counters.add_device_step(*launched.timer.seconds(), follows=follows)
        counters.add_step(rows, step)
        if self._draft_length.is_auto and not launched.in_parts:
            self._draft_length.took(launched.choice, step)

    def _book(self, request: Request, values: list[int], logprobs: Logprobs | None, first: bool, now: float) -> int:
        """Note the result of a request. Returns how many tokens were kept."""
        if first:
            tokens, flags = values[:1], values[1]
            accepted = drafted = 0
        else:
            *tokens, accepted, drafted, flags = values
        finite, of_corpus = flags & 1, bool(flags & 2)
        self.scheduler.receive(request, None if first else accepted)
        if not finite and self.scheduler.retry_without_shared(request):
            return 0
        if reason := _no_match(request):
            return self._fail(request, reason)
        if not finite:
            return self._fail(
                request,
                f"its logits are not finite after token {len(request.tokens)}: the weights are damaged or overflow in "
                "this dtype; try dtype='float32' or 'bfloat16'",
            )
        tokens = tokens[: accepted + 1]
        if request.matcher is not None:
            tokens = request.matcher.until_dead_end(tokens)
        kept = request.append(tokens, now, logprobs if request.params.logprobs else None)
        if not first:
            request.count_verify(kept, drafted, accepted, self._depth, of_corpus=of_corpus, has_budget=self._has_budget)
        if request.finish_reason is not None:
            self.scheduler.finish(request)
        self._on_tokens(request, tokens[:kept])
        if request.finish_reason is None and (reason := _no_match(request)):
            self._fail(request, reason)
        return kept

    def _fail(self, request: Request, reason: str) -> int:
        request.finish_reason = "error"
        request.error = reason
        self.scheduler.fail(request)
        self._on_tokens(request, [])
        return 0

    def _add_to_corpus(self, finished: list[Request]) -> None:
        corpus = self._worker.corpus
        if corpus is not None and finished:
            self._worker.add_answers([corpus.answer(item.tokens, item.prompt_len) for item in finished])

    def _copy(self, result: Result) -> AsyncCopy:
        return AsyncCopy(*result.tensors(), stream=self._stream)


def _drafting_first(scheduled: Sequence[ScheduledRequest], choice: Choice) -> tuple[Sequence[ScheduledRequest], int]:
    """The requests of a step, those that draft first, and how many these are."""
    if not choice.num_drafts:
        return scheduled, 0
    if choice.members is None:
        return scheduled, len(scheduled)
    chosen = set(choice.members)
    others = (item for index, item in enumerate(scheduled) if index not in chosen)
    return [*(scheduled[index] for index in sorted(chosen)), *others], len(chosen)


def _left(request: Request) -> int:
    """Tokens that it is expected to generate yet. An answer that a token may end is expected to grow by a half: too
    few tokens rather than too many, because catching up is paid at once."""
    left = request.params.max_new_tokens - request.generated
    return max(left if request.params.ignore_eos else min(left, max(request.generated // 2, UNKNOWN)), 4)


def _no_match(request: Request) -> str | None:
    """Why a request whose grammar is matched on the host cannot go on, if so."""
    error = request.matcher.error if request.matcher is not None else ""
    return f"llguidance cannot go on with its grammar: {error}" if error else None
