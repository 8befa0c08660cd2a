"""Continuous batching: admission, chunked prefill, page reservation, retraction. Pure Python.

Each request has two lengths: `committed` is its KV length by the last result that the host has handled; its pages are
reserved for the most that iterations in flight and the next one can write. No page is freed before the request is
finished, and whatever a new owner writes is launched after the old owner's last write.

Only the scheduler and its `DraftKV` write the scheduling fields of a `Request`.
"""

from __future__ import annotations

from collections import deque

from specbatch.core.request import Request
from specbatch.engine.schedule.draft_kv import DraftKV
from specbatch.engine.schedule.plans import DecodePlan, PrefillPlan, ScheduledChunk, ScheduledRequest
from specbatch.memory.grammar_pool import GrammarPool
from specbatch.memory.page_pool import PagePool, pages_for, reserved_length
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.shared_prefixes import PrefixGroups, SharedPrefixPlanner
from specbatch.memory.state_cache import Found, StateCache


class OutOfPagesError(Exception):
    """Reserving pages takes a retraction, and results in flight may free pages first."""


class Scheduler:
    """Decides which requests run.

    kv_slots_per_step  KV slots, from the root's on, that a step may write to: the most that it can add to a request
    uncached_tail      of a finished request, so many of the newest positions are not cached (see `DraftPlan`)
    window             no layer of target and draft reads more keys than this; None: some read all. Pages outside of it
                       are freed, and such requests leave no prefix of their answers in `cache`
    state_cache        of the prefixes in `cache`, for a model with recurrent layers
    samples_share      whether the samples of a prompt share its pages, even if `cache` is None
    sharing            plans decode steps that read a shared prefix once; None: they read it for each request
    max_running, prefill_chunk  may be lowered at any time
    """

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache | None,
        *,
        page_size: int,
        max_running: int,
        prefill_chunk: int,
        kv_slots_per_step: int,
        uncached_tail: int = 1,
        window: int | None = None,
        state_cache: StateCache | None = None,
        samples_share: bool = True,
        sharing: SharedPrefixPlanner | None = None,
    ) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, page_size) if cache is None else cache
        self._reuses_prefixes = cache is not None
        self._samples_share = samples_share
        self.state_cache = state_cache
        self._sharing = sharing
        self._page_size = page_size
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.kv_slots_per_step = kv_slots_per_step
        self._uncached_tail = uncached_tail
        self._window = window
        self.grammars = GrammarPool()
        self.matched_on_host = 0  # requests that hold a slot and have a grammar on the host
        self.free_slots = list(range(max_running, 0, -1))
        self._waiting: deque[Request] = deque()
        # Admitted requests, each as it stands in every launch until it gives its slot back.
        self._prefilling: dict[Request, ScheduledRequest] = {}
        self._running: dict[Request, ScheduledRequest] = {}
        self._new_pages: dict[tuple[int, int], int] = {}  # by slot and place: not yet handed to the device
        self._lacks_pages = False  # or a place for its grammar, for the next request that waits
        self.draft_kv = DraftKV(page_size, uncached_tail)

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + self.admitted

    @property
    def admitted(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefilling) + len(self._running)

    @property
    def expected(self) -> int:
        """How many requests run once those that wait have joined, as far as there are slots and pages."""
        return self.admitted if self._lacks_pages else min(self.unfinished, self.max_running)

    @property
    def holders(self) -> list[Request]:
        """The requests that hold a slot."""
        return [*self._running, *self._prefilling]

    @property
    def keeps_pages(self) -> bool:
        """Whether requests keep all of their pages until they end."""
        return self._window is None

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    # -- planning ---------------------------------------------------------------------------------------------

    def plan_prefill(self, now: float) -> PrefillPlan | None:
        """Chunks of up to `prefill_chunk` tokens together: requests already admitted first, then new ones."""
        plan = PrefillPlan()
        budget = self.prefill_chunk
        for request in list(self._prefilling):
            budget -= self._plan_chunk(plan, request, budget)
        if budget > 0 and self._waiting and self._has_slot:
            # A spare page for each request that may need one: admitting must not force a retraction in the next step.
            spare = sum(map(_grows, self._running)) + sum(map(_grows, self._prefilling))
            while budget > 0 and self._waiting and self._has_slot and self._admit(plan, self._waiting[0], now, spare):
                request = self._waiting.popleft()
                assert request.slot is not None
                spare += _grows(request)
                plan.admitted.append(request)
                self._prefilling[request] = ScheduledRequest(request, request.epoch, request.slot)
                budget -= self._plan_chunk(plan, request, budget)
        if self.state_cache is not None:
            self.state_cache.launched()
        return plan if plan.chunks else None

    @property
    def _has_slot(self) -> bool:
        return bool(self.free_slots) and self.admitted < self.max_running

    def _admit(self, plan: PrefillPlan, request: Request, now: float, spare: int) -> bool:
        """Give a request its slot and its pages, if `spare` other pages then are free."""
        if self._shares_prompt(request) and any(item.index == request.index for item in self._prefilling):
            return False  # another sample computes the prompt
        found = self._match_prefix(request)
        if found.storing:
            return False
        shared = found.pages
        need = self._pages_for(reserved_length(len(request.tokens), self.kv_slots_per_step)) - len(shared)
        self._lacks_pages = not self._ensure_free(need + spare) or not self._allocate_grammar(request)
        if self._lacks_pages:
            for page in shared:
                self.pool.decref(page)
            return False
        request.shared = len(shared)
        request.pages = shared + self._allocate(need)
        self.draft_kv.admitted(request)
        request.most_pages = self._pages_for(reserved_length(request.most_tokens, self.kv_slots_per_step))
        request.slot = self.free_slots.pop()
        self.matched_on_host += request.matcher is not None
        request.prefilled = len(shared) * self._page_size
        request.branch = found.branch
        if request.params.n > 1:  # the other samples start from a state after the full pages
            request.branch = max(found.branch, (request.prompt_len - 1) // self._page_size * self._page_size)
        if self.state_cache is not None and found.state:
            self.state_cache.promote(found.state)
            plan.loads.append((found.state, request.slot))
        if request.admitted is None:
            request.admitted = now
            request.metrics.cached_tokens = request.prefilled
        return True

    def _allocate_grammar(self, request: Request) -> bool:
        """Whether there is a place for its grammar, if it has one."""
        if request.automaton is None:
            return True
        start = self.grammars.allocate(request.automaton)
        request.table = 0 if start is None else start
        return start is not None

    def _shares_prompt(self, request: Request) -> bool:
        """Whether it shares its prompt with other samples."""
        return request.params.n > 1 and self._samples_share

    def _match_prefix(self, request: Request) -> Found:
        """The cached part of a prompt. Without a prefix cache the first sample computes all of it."""
        if request.unshared or request.lacks_prompt_logprobs:
            return Found([], 0, 0)
        tokens = request.tokens[: request.textual + 1]  # the last token is computed in any case
        if self.state_cache is not None:
            return self.state_cache.find(tokens)
        if self._reuses_prefixes or (self._shares_prompt(request) and request.sample):
            return Found(self.cache.match(tokens), 0, 0)
        return Found([], 0, 0)

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk ends: as far as the budget goes. With states to cache, at the end of a known prefix, or
        at a full page if the rest then takes no additional pass."""
        start, length = request.prefilled, len(request.tokens)
        end = min(start + budget, length)
        if self.state_cache is None:
            return end
        if start < request.branch < end:
            return request.branch
        full = end - end % self._page_size
        more = pages_for(length - full, self.prefill_chunk) > pages_for(length - end, self.prefill_chunk)
        return end if full <= start or more else full

    def _plan_chunk(self, plan: PrefillPlan, request: Request, budget: int) -> int:
        assert request.slot is not None
        end = self._chunk_end(request, budget)
        count = end - request.prefilled
        if count <= 0:
            return 0
        last = end == len(request.tokens)
        plan.chunks.append(ScheduledChunk(request, request.epoch, request.slot, request.prefilled, end, last))
        request.prefilled = end
        if self._reuses_prefixes or self._shares_prompt(request):
            self.cache.insert(request.tokens, min(end, request.textual), request.pages)
        if self.state_cache is not None and end <= request.textual:
            is_branch = end == request.branch
            if place := self.state_cache.allocate(request.tokens, end, is_branch=is_branch):
                plan.saves.append((request.slot, place))
        if last:
            request.committed = end
            request.pending = 1
            self._running[request] = self._prefilling.pop(request)
            if self._sharing is not None:
                # The draft may still have to write the newest positions.
                full = max(end - 1 - self._uncached_tail, 0) // self._page_size
                self._sharing.add(request.slot, request.pages[:full])
        return count

    def plan_decode(self, *, may_retract: bool) -> DecodePlan | None:
        """One decode step over every running request that can still gain a token.

        Raises OutOfPagesError when pages run out and `may_retract` is false; pages reserved by then stay reserved.
        """
        # The body runs for every request in every step: what most of them need comes first, without calls.
        scheduled: list[ScheduledRequest] = []
        bound, rows, page_size = 0, self.kv_slots_per_step, self._page_size
        for item in list(self._running.values()):
            request = item.request
            # Each pending result leaves at least one token: skip requests whose result could only be thrown away.
            if len(request.tokens) + request.pending >= request.most_tokens or request.slot is None:
                continue
            if self._window is not None:
                self._free_outside_window(request, self._window)
            reach = request.committed + (request.in_flight + 1) * rows
            if reach > len(request.pages) * page_size:
                retracted = self._reserve(request, reach, may_retract=may_retract)
                if retracted:
                    scheduled = [item for item in scheduled if item.request not in retracted]
                if request in retracted:
                    continue
            scheduled.append(item)
            if reach > bound:
                bound = reach
        if not scheduled:
            return None
        for item in scheduled:
            item.request.in_flight += 1
            item.request.pending += 1
        new_pages, self._new_pages = self._new_pages, {}
        return DecodePlan(scheduled, [(*place, page) for place, page in new_pages.items()], bound)

    def shared_prefixes(self, slots: list[int], num_drafts: int) -> PrefixGroups | None:
        """What the requests of a step in these slots share, if reading it once pays. The same object until it
        changes."""
        return None if self._sharing is None else self._sharing.plan(slots, num_drafts + 1)

    def _reserve(self, request: Request, reach: int, *, may_retract: bool) -> set[Request]:
        """Reserve pages up to a KV length of `reach`. Returns the requests that were retracted for it, perhaps this
        very one."""
        assert request.slot is not None
        retracted: set[Request] = set()
        while not self._ensure_free(need := self._pages_for(reach) - len(request.pages)):
            if not may_retract:
                raise OutOfPagesError
            admitted = (*self._prefilling, *self._running)
            victim = min(admitted, key=lambda item: (item.generated, -item.index, -item.sample))
            self._retract(victim)
            retracted.add(victim)
            if victim is request:
                return retracted
        for page in self._allocate(need):
            self._new_pages[request.slot, len(request.pages)] = page
            request.pages.append(page)
        return retracted

    def expects_all_to_end(self) -> bool:
        """Whether the results in flight are expected to bring every admitted request to its length limit. Stops are not
        foreseen."""
        return not self._prefilling and all(
            request.expected_tokens >= request.params.max_new_tokens for request in self._running
        )

    def _free_outside_window(self, request: Request, window: int) -> None:
        """Release the pages that no later step reads. Their places in the page table show page 0 from then on."""
        assert request.slot is not None
        computed = request.committed if request.draft_kv_valid_until is None else request.draft_kv_valid_until
        for place in range(request.freed, max(computed - self._uncached_tail - window, 0) // self._page_size):
            self.pool.decref(request.pages[place])
            request.pages[place] = 0
            self._new_pages[request.slot, place] = 0
            request.freed = place + 1

    # -- results and endings ----------------------------------------------------------------------------------

    def is_void(self, request: Request, epoch: int) -> bool:
        """Is a result void, because the request has ended or was retracted after the launch?"""
        return request.finish_reason is not None or request.epoch != epoch

    def receive(self, request: Request, accepted: int | None) -> None:
        """A result has arrived: of a verify that accepted so many drafts, or None, the first token of a prompt."""
        request.pending -= 1
        if accepted is not None:
            request.in_flight -= 1
            request.committed += accepted + 1

    def finish(self, request: Request) -> None:
        """End a request: cache its prefix, give its pages and its slot back."""
        if request.slot is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return
        if self._reuses_prefixes and request.committed and not request.freed:
            # Without the newest committed positions, where the drafter may not have written its own KV yet.
            known = max(min(len(request.tokens), request.committed) - self._uncached_tail, 0)
            known = min(known, request.textual)
            self.draft_kv.cached(request, known)
            self.cache.insert(request.tokens, known, request.pages)
        self._deallocate(request)

    def retry_without_shared(self, request: Request) -> bool:
        """Compute a request again without shared pages, if it has any: another request may have written NaN to them
        before its own result showed that. False if it has none; it must `fail`."""
        if not request.shared:
            return False
        self.cache.invalidate(request.tokens, 0)
        request.unshared = True
        self._retract(request)
        return True

    def fail(self, request: Request) -> None:
        """End a request whose pages may hold anything: what it cached is forgotten, too."""
        self.cache.invalidate(request.tokens, request.shared)
        self._deallocate(request)

    def forget_prefixes(self) -> None:
        """Evict all cached pages that no request holds."""
        self.cache.evict(len(self.cache))

    def retract_all(self) -> int:
        """Take the memory of all running requests, and that of cached prefixes: a pass has failed, so that pages may
        hold anything. They wait in their order. Returns how many."""
        running = sorted(self.holders, key=lambda item: (item.index, item.sample), reverse=True)
        for request in running:
            self._retract(request)
        self.forget_prefixes()
        return len(running)

    def _retract(self, request: Request) -> None:
        """Take the memory of a running request; it waits at the front and is computed again from its tokens."""
        self._deallocate(request)
        request.epoch += 1
        request.prefilled = request.committed = request.in_flight = request.pending = 0
        request.draft_kv_valid_until = None
        request.metrics.retractions += 1
        self._waiting.appendleft(request)

    def _deallocate(self, request: Request) -> None:
        assert request.slot is not None
        for page in request.pages[request.freed :]:
            self.pool.decref(page)
        request.pages = []
        request.freed = 0
        if self._new_pages:
            self._new_pages = {place: page for place, page in self._new_pages.items() if place[0] != request.slot}
        if self._sharing is not None:
            self._sharing.remove(request.slot)
        self.free_slots.append(request.slot)
        request.slot = None
        self.matched_on_host -= request.matcher is not None
        if request.automaton is not None:
            self.grammars.decref(request.automaton)
        (self._running if request in self._running else self._prefilling).pop(request)

    def _allocate(self, count: int) -> list[int]:
        pages = self.pool.allocate(count)
        self.draft_kv.allocated(pages)
        return pages

    def _ensure_free(self, count: int) -> bool:
        """Are `count` pages free, after evicting cached ones if necessary?"""
        missing = count - self.pool.free
        if 0 < missing <= self.pool.idle:
            missing -= self.cache.evict(missing)
        return missing <= 0

    def _pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self._page_size)


def _grows(request: Request) -> bool:
    """Whether it may need more pages."""
    return len(request.pages) < request.most_pages
