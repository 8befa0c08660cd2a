"""Who runs next: admission, chunked prefill, page reservation, retraction. Pure Python.

Two lengths per request: `committed` is the KV length the last handled result told of; the pages held are reserved
for the most that iterations still in flight, and the next one, can write. Nothing held is given back before the
request is released, and whatever a new owner writes is launched behind the old owner's last write.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specbatch.core.request import Request
from specbatch.errors import refuse
from specbatch.memory.page_pool import PagePool, pages_for, reach_of
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.state_cache import Found, StateCache


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens start..end-1 of a request, to be computed in one pass; `last` if the prompt then is complete."""

    request: Request
    epoch: int
    slot: int
    start: int
    end: int
    last: bool


@dataclass
class PrefillPlan:
    """One pass. loads: (cached state, device row) of requests that start from a cached state; saves: (device row,
    cached state) to store after the pass."""

    admitted: list[Request] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's place in one iteration. `epoch` tells a result from before a retraction."""

    request: Request
    epoch: int
    slot: int


@dataclass
class DecodePlan:
    rows: list[ScheduledRequest]
    new_pages: list[tuple[int, int, int]]  # reserved since the last plan: slot, index in its page row, page
    bound: int  # no row's KV is longer than this after the iteration


class OutOfPagesError(Exception):
    """Reserving would need a retraction, and results are still in flight that may free pages first."""


class Scheduler:
    """rows: KV slots that an iteration may write to behind a root, the most it can add to a request; lag: of one that
    has ended, so many of the newest committed positions are not worth keeping (see `DraftPlan`); state_cache: of the
    prefixes in `cache`, for a model with recurrent layers."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache | None,
        *,
        page_size: int,
        max_running: int,
        max_model_len: int,
        prefill_chunk: int,
        rows: int,
        uncached_tail: int = 1,
        state_cache: StateCache | None = None,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self.state_cache = state_cache
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._prefill_chunk = prefill_chunk
        self.rows = rows
        self._uncached_tail = uncached_tail
        self._slots = list(range(max_running, 0, -1))
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._new_pages: list[tuple[int, int, int]] = []  # reserved, not yet handed to the device

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._running)

    def check(self, prompt_len: int, max_new_tokens: int, index: int) -> None:
        """Refuse a request that could never run."""
        if not prompt_len:
            raise refuse(f"prompt {index}", "", "it has no tokens; give at least one")
        if prompt_len + max_new_tokens > self._max_model_len:
            room = self._max_model_len - prompt_len
            works = (
                f"the prompt's {prompt_len} tokens leave room for {room} of max_model_len={self._max_model_len}"
                if room > 0
                else f"the prompt has {prompt_len} tokens and max_model_len={self._max_model_len}; shorten it"
            )
            raise refuse(f"max_new_tokens of prompt {index}", max_new_tokens, works)
        need = self._pages_for(reach_of(prompt_len + max_new_tokens, self.rows))
        if need > self._pool.total:
            raise refuse(
                "kv_pages", self._pool.total, f"prompt {index} with its output needs {need}; use at least that"
            )

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    # -- planning ---------------------------------------------------------------------------------------------

    def plan_prefill(self, now: float) -> PrefillPlan | None:
        """Chunks for up to `prefill_chunk` tokens: requests already admitted first, then new ones."""
        plan = PrefillPlan()
        budget = self._prefill_chunk
        for request in list(self._prefilling):
            budget -= self._plan_chunk(plan, request, budget)
        while budget > 0 and self._waiting and self._slots and self._admit(plan, self._waiting[0], now):
            request = self._waiting.popleft()
            plan.admitted.append(request)
            self._prefilling.append(request)
            budget -= self._plan_chunk(plan, request, budget)
        if self.state_cache is not None:
            self.state_cache.planned()
        return plan if plan.chunks else None

    def _admit(self, plan: PrefillPlan, request: Request, now: float) -> bool:
        found = self._shared(request.tokens[: request.textual + 1])  # the last one is not looked for
        if found.due:
            return False
        shared = found.pages
        # A spare page for each request that may ask for more: admitting must not force a retraction in the next step.
        spare = sum(len(item.pages) < self._most_pages(item) for item in (*self._running, *self._prefilling))
        need = self._pages_for(reach_of(len(request.tokens), self.rows)) - len(shared)
        if not self._make_free(need + spare):
            for page in shared:
                self._pool.release(page)
            return False
        request.pages = shared + self._pool.take(need)
        request.slot = self._slots.pop()
        request.prefilled = len(shared) * self._page_size
        request.branch = found.branch
        if self.state_cache is not None and found.state:
            self.state_cache.use(found.state)
            plan.loads.append((found.state, request.slot))
        if request.admitted is None:
            request.admitted = now
            request.metrics.cached_tokens = request.prefilled
        return True

    def _shared(self, tokens: list[int]) -> Found:
        """What is there of a prompt already."""
        if self.state_cache is not None:
            return self.state_cache.find(tokens)
        return Found(self._cache.match(tokens) if self._cache is not None else [], 0, 0)

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk ends: with states to be kept, where a known prefix ends, or at a full page if the rest
        then takes no pass more."""
        start, length = request.prefilled, len(request.tokens)
        end = min(start + budget, length)
        if self.state_cache is None:
            return end
        if start < request.branch < end:
            return request.branch
        full = end - end % self._page_size
        more = pages_for(length - full, self._prefill_chunk) > pages_for(length - end, self._prefill_chunk)
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
        if self._cache is not None:
            self._cache.insert(request.tokens, min(end, request.textual), request.pages)
        if self.state_cache is not None and end <= request.textual:
            is_branch = end == request.branch
            if place := self.state_cache.keep(request.tokens, end, is_branch=is_branch):
                plan.saves.append((request.slot, place))
        if last:
            request.committed = end
            request.pending = 1
            self._prefilling.remove(request)
            self._running.append(request)
        return count

    def plan_decode(self, *, may_retract: bool) -> DecodePlan | None:
        """One iteration over every running request that can still gain a token.

        Raises OutOfPagesError when pages run out and `may_retract` is false; what was reserved until then stays so.
        """
        rows: list[ScheduledRequest] = []
        bound = 0
        for request in list(self._running):
            # Each pending result leaves at least one token: skip an iteration that could only be thrown away.
            if request.slot is None or request.generated + request.pending >= request.params.max_new_tokens:
                continue
            reach = request.committed + (request.in_flight + 1) * self.rows
            while (need := self._pages_for(reach) - len(request.pages)) > 0 and not self._make_free(need):
                if not may_retract:
                    raise OutOfPagesError
                victim = min(self._prefilling + self._running, key=lambda item: (item.generated, -item.index))
                self._retract(victim)
                rows = [row for row in rows if row.request is not victim]
                if victim is request:
                    break
            else:
                for page in self._pool.take(max(need, 0)):
                    self._new_pages.append((request.slot, len(request.pages), page))
                    request.pages.append(page)
                rows.append(ScheduledRequest(request, request.epoch, request.slot))
                bound = max(bound, reach)
        if not rows:
            return None
        for row in rows:
            row.request.in_flight += 1
            row.request.pending += 1
        new_pages, self._new_pages = self._new_pages, []
        return DecodePlan(rows, new_pages, bound)

    # -- results and endings ----------------------------------------------------------------------------------

    def is_void(self, request: Request, epoch: int) -> bool:
        """Is a result void: the request has ended, or was retracted after the launch?"""
        return request.finished or request.epoch != epoch

    def release(self, request: Request) -> None:
        """End a request that runs: share what is worth keeping, give its pages and its slot back."""
        if request.slot is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return
        if self._cache is not None and request.committed:
            # The newest committed positions are left out: a drafter may not have written its own KV there yet.
            known = max(min(len(request.tokens), request.committed) - self._uncached_tail, 0)
            known = min(known, request.textual)
            if request.draft_kv_valid_until is not None:
                known = min(known, request.draft_kv_valid_until)
            self._cache.insert(request.tokens, known, request.pages)
        self._vacate(request)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, as far as no request holds its pages."""
        if self._cache is not None:
            self._cache.evict(len(self._cache))

    def _retract(self, request: Request) -> None:
        """Take a running request's memory; it waits at the front and is computed again from its tokens."""
        self._vacate(request)
        request.epoch += 1
        request.prefilled = request.committed = request.in_flight = request.pending = 0
        request.draft_kv_valid_until = None
        request.metrics.retractions += 1
        self._waiting.appendleft(request)

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None
        for page in request.pages:
            self._pool.release(page)
        request.pages = []
        self._new_pages = [item for item in self._new_pages if item[0] != request.slot]
        self._slots.append(request.slot)
        request.slot = None
        (self._running if request in self._running else self._prefilling).remove(request)

    def _make_free(self, count: int) -> bool:
        """Are `count` pages free, after evicting cached ones if need be?"""
        missing = count - self._pool.free
        if 0 < missing <= self._pool.idle and self._cache is not None:
            missing -= self._cache.evict(missing)
        return missing <= 0

    def _most_pages(self, request: Request) -> int:
        """What a request can come to hold."""
        return self._pages_for(reach_of(request.prompt_len + request.params.max_new_tokens, self.rows))

    def _pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self._page_size)
