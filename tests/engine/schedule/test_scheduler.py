"""The scheduler against a simulated device: random lengths, acceptance, stops, aborts, full pools, and states."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specbatch.core.request import Request, SamplingParams
from specbatch.engine.schedule.scheduler import (
    OutOfPagesError,
    PrefillPlan,
    ScheduledChunk,
    ScheduledRequest,
    Scheduler,
)
from specbatch.memory.page_pool import PagePool
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.state_cache import StateCache

STOP = 0


class Device:
    """What the device holds: page row and KV length of each slot, and the text that each KV slot was written for,
    by the target and by a drafter, which lacks the last token after a verify that accepts all drafts."""

    def __init__(self, page_size: int, rows: int, window: int | None = None) -> None:
        self.page_size = page_size
        self.rows = rows
        self.window = window
        self.table: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.target: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, offset) -> the text up to there
        self.draft: dict[tuple[int, int], tuple[int, ...]] = {}
        self.state: dict[int, tuple[int, ...] | None] = {}  # slot -> the text that its recurrent layers have seen
        self.kept: dict[int, tuple[int, ...]] = {}  # the same of cached states

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.table[slot][position // self.page_size], position % self.page_size

    def admit(self, request: Request) -> None:
        assert request.slot is not None
        self.table[request.slot] = list(request.pages)
        self.state[request.slot] = None

    def prefill(self, plan: PrefillPlan, states: bool, drafts: bool) -> None:
        chunks = plan.chunks
        for checkpoint, slot in plan.loads:  # before any is saved
            self.state[slot] = self.kept[checkpoint]
        for chunk in chunks if states else []:
            text = tuple(chunk.request.tokens)
            assert chunk.start == 0 or self.state[chunk.slot] == text[: chunk.start], "it goes on from another state"
            self.state[chunk.slot] = text[: chunk.end]
        assert len({checkpoint for _, checkpoint in plan.saves}) == len(plan.saves)
        for slot, checkpoint in plan.saves:
            state = self.state[slot]
            assert state is not None
            assert len(state) % self.page_size == 0
            self.kept[checkpoint] = state
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                place = self.place(chunk.request.slot or 0, position)
                self.target[place] = tuple(chunk.request.tokens[: position + 1])
                if drafts:
                    self.draft[place] = self.target[place]
        for chunk in chunks:  # all keys are written before any is read
            valid = chunk.request.draft_kv_valid_until
            self.read(chunk.request.slot or 0, chunk.request.tokens, chunk.end, chunk.end if valid is None else valid)
            if chunk.last:
                self.length[chunk.request.slot or 0] = chunk.end

    def read(self, slot: int, text: list[int], target: int, draft: int) -> None:
        """The KV of the first positions, as far as a window shows them, must have been written for this very text."""
        for name, memory, count in (("target", self.target, target), ("draft", self.draft, draft)):
            for position in range(0 if self.window is None else max(count - self.window + 1, 0), count):
                found = memory.get(self.place(slot, position))
                assert found == tuple(text[: position + 1]), f"{name} position {position} holds another text"

    def verify(self, slot: int, text: list[int], accepted: int) -> None:
        """Read what lies before, write the root and all drafts, right or wrong, and move on by what is accepted.

        text: prompt and output up to the token after the last accepted one."""
        length = self.length[slot]
        self.read(slot, text, length, length - 1)
        for position in range(length - 1, length + self.rows):
            wrong = text[: length + accepted + 1]
            seen = tuple((wrong + [-1] * self.rows)[: position + 1])
            if position >= length:
                self.target[self.place(slot, position)] = seen
            if position < length + self.rows - 1:
                self.draft[self.place(slot, position)] = seen
        self.length[slot] = length + accepted + 1

    def catch_up(self, chunk: ScheduledChunk, text: list[int]) -> None:
        """The draft computes what it lacks, but for the token before the root and those after it."""
        for position in range(chunk.start, chunk.end):
            self.draft[self.place(chunk.slot, position)] = tuple(text[: position + 1])

    def step(self, slot: int, text: list[int]) -> None:
        """A step of the target alone."""
        length = self.length[slot]
        self.read(slot, text, length, 0)
        self.target[self.place(slot, length)] = tuple(text[: length + 1])
        self.length[slot] = length + 1


class Launched:
    def __init__(self, rows: list[ScheduledRequest], outputs: list[list[int]], first: bool) -> None:
        self.rows, self.outputs, self.first = rows, outputs, first


class Machine(RuleBasedStateMachine):
    """Drives a Scheduler as the two schedules do; the results come at once (v1) or one step late (v2)."""

    @initialize(
        late=st.booleans(),
        cached=st.booleans(),
        page_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 4),
        slots=st.sampled_from([1, 2, 4, 6]),
        spare=st.sampled_from([0, 1, 2, 5, 40]),
        chunk=st.sampled_from([1, 3, 8, 100]),
        lazy=st.booleans(),
        places=st.sampled_from([0, 1, 2, 9]),
        window=st.sampled_from([None, None, 1, 2, 5, 16]),
        idle=st.sampled_from([0.0, 0.2, 0.8]),
    )
    def start(self, **options: Any) -> None:
        self.late, self.lazy = options["late"], options["lazy"]
        self.page_size, self.rows, self.slots = options["page_size"], options["rows"], options["slots"]
        self.longest = 40
        self.pool = PagePool(-(-(self.longest + 2 * self.rows) // self.page_size) + options["spare"])
        self.cache = PrefixCache(self.pool, self.page_size) if options["cached"] else None
        self.state_cache, self.places = None, options["places"]
        if self.cache is not None and self.places:
            self.state_cache = StateCache(self.cache, self.page_size, self.places)
        self.scheduler = Scheduler(
            self.pool, self.cache, page_size=self.page_size, max_running=self.slots,
            prefill_chunk=options["chunk"], kv_slots_per_step=self.rows, state_cache=self.state_cache,
            window=options["window"],
        )  # fmt: skip
        self.device = Device(self.page_size, self.rows, options["window"])
        self.truth: dict[int, list[int]] = {}  # what the device's tokens are: prompt and output, ahead of the host
        self.requests: list[Request] = []
        self.in_flight: Launched | None = None
        self.clock = 0.0
        self.idle, self.chance = options["idle"], random.Random(0)

    # -- events ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.add_one(data)

    def add_one(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 20), "prompt")
        prompt = data.draw(st.lists(st.integers(1, 2), min_size=length, max_size=length), "tokens")
        limit = data.draw(st.sampled_from([1, 2, 3, 4, 9, self.longest - length]), "max_new_tokens")
        params = SamplingParams(max_new_tokens=limit)
        request = Request(
            len(self.requests), prompt, params, end_tokens=frozenset({STOP}), decode=lambda _: "", submitted=self.clock
        )
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: any(not request.finished for request in self.requests))
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        alive = [request for request in self.requests if not request.finished]
        request = alive[pick % len(alive)]
        request.finish_reason = "abort"
        self.scheduler.finish(request)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8), ending=st.sampled_from([0.0, 0.03, 0.5]))
    def steps(self, seed: int, count: int, ending: float) -> None:
        chance = self.chance = random.Random(seed)
        for _ in range(count):
            self.advance(lambda: chance.randrange(self.rows), lambda: chance.random() < ending)
            self.pages_are_conserved()
            self.slots_are_conserved()

    @rule(data=st.data())
    def void_results_change_nothing(self, data: st.DataObject) -> None:
        if self.in_flight is None:
            return
        void = [row for row in self.in_flight.rows if self.void(row)]
        before = [(vars(row.request).copy(), list(row.request.tokens), list(row.request.pages)) for row in void]
        free, keep = self.pool.free, self.in_flight
        self.handle(Launched(void, [[1] * self.rows] * len(void), keep.first))
        assert [(vars(row.request), row.request.tokens, row.request.pages) for row in void] == before
        assert self.pool.free == free

    # -- one step of v1 or v2 -------------------------------------------------------------------------------------

    def advance(self, accept: Any, stops: Any) -> bool:
        self.clock += 1
        first = self.prefill(stops)
        passes = first is not None
        if first is not None and not (self.late and self.lazy):
            self.handle(first)
            first = None
        previous = self.in_flight
        try:
            self.in_flight = self.decode(accept, stops, may_retract=previous is None)
        except OutOfPagesError:
            assert previous is not None
            self.handle(previous)
            previous = None
            self.in_flight = self.decode(accept, stops, may_retract=True)
        moved = passes or previous is not None or self.in_flight is not None
        if previous is not None:
            self.handle(previous)
        if first is not None:
            self.handle(first)
        if not self.late and self.in_flight is not None:
            self.handle(self.in_flight)
            self.in_flight = None
        return moved

    def prefill(self, stops: Any) -> Launched | None:
        plan = self.scheduler.plan_prefill(self.clock)
        if plan is None:
            return None
        assert plan.chunks
        for request in plan.admitted:
            self.device.admit(request)
            self.truth[request.index] = list(request.tokens)
        drafts = not self.scheduler.keeps_pages or self.chance.random() >= self.idle
        self.scheduler.prompts_launched(plan.chunks, drafts=drafts)
        self.device.prefill(plan, self.state_cache is not None, drafts)
        rows, outputs = [], []
        for chunk in plan.chunks:
            if chunk.last:
                assert chunk.end == len(chunk.request.tokens)
                token = STOP if stops() else 1 + chunk.end % 2
                self.truth[chunk.request.index].append(token)
                rows.append(ScheduledRequest(chunk.request, chunk.epoch, chunk.request.slot or 0))
                outputs.append([token])
        return Launched(rows, outputs, True)

    def decode(self, accept: Any, stops: Any, may_retract: bool) -> Launched | None:
        plan = self.scheduler.plan_decode(may_retract=may_retract)
        if plan is None:
            return None
        for slot, index, page in plan.new_pages:
            row = self.device.table[slot]
            assert index <= len(row), "page rows grow at their end"
            row[index : index + 1] = [page]
        idle = [row for row in plan.requests if self.chance.random() < self.idle]
        drafting = [row for row in plan.requests if row not in idle]
        self.scheduler.draft_idles(idle)
        lacking = {row.slot: self.scheduler.lacking(row.request) for row in drafting}
        for chunk in self.scheduler.plan_catch_up(drafting, own=1):
            assert 0 < chunk.end - chunk.start <= lacking[chunk.slot]
            self.device.catch_up(chunk, self.truth[chunk.request.index])
        outputs = []
        for row in plan.requests:
            request = row.request
            assert row.slot == request.slot
            assert self.device.table[row.slot] == request.pages
            length = self.device.length[row.slot]
            assert length + self.rows <= len(request.pages) * self.page_size, "the pages cover what is written"
            assert length + self.rows <= plan.bound
            truth = self.truth[request.index]
            assert len(truth) == length + 1
            accepted = 0 if row in idle else accept()
            run = [STOP if stops() else 1 + (length + place) % 2 for place in range(accepted + 1)]
            if row in idle:
                self.device.step(row.slot, truth + run)
            else:
                self.device.verify(row.slot, truth + run, accepted)
            truth += run
            outputs.append(run)
        return Launched(plan.requests, outputs, False)

    def void(self, row: ScheduledRequest) -> bool:
        return self.scheduler.is_void(row.request, row.epoch)

    def handle(self, launched: Launched) -> None:
        for row, tokens in zip(launched.rows, launched.outputs, strict=True):
            request = row.request
            if self.void(row):
                continue
            self.scheduler.receive(request, None if launched.first else len(tokens) - 1)
            assert request.append(tokens, self.clock) > 0, "a step was launched past the limit"
            if not request.finished:
                assert request.tokens == self.truth[request.index][: len(request.tokens)]
                assert request.committed == len(request.tokens) - 1
            if request.finished:
                self.scheduler.finish(request)

    # -- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        cached = [] if self.cache is None else list(self.cache._order)
        assert all(self.cache is None or len(self.cache._order[page].key) == self.page_size for page in cached)
        holders = dict.fromkeys(range(1, self.pool.total + 1), 0)
        owners: dict[int, list[Request]] = {}
        for page in cached:
            holders[page] += 1
        for request in self.requests:
            assert not any(request.pages[: request.freed])
            held = request.pages[request.freed :]
            assert len({0, *held}) == len(held) + 1
            for page in held:
                holders[page] += 1
                owners.setdefault(page, []).append(request)
        assert {page: self.pool.refcount(page) for page in holders} == holders
        assert self.pool.free + sum(count > 0 for count in holders.values()) == self.pool.total
        for page, sharing in owners.items():
            if len(sharing) > 1:
                assert page in cached, "two requests share a page that the cache does not know"
                end = (sharing[0].pages.index(page) + 1) * self.page_size
                assert len({tuple(request.tokens[:end]) for request in sharing}) == 1
                assert all(request.pages.index(page) == end // self.page_size - 1 for request in sharing)

    @invariant()
    def slots_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        used = [request.slot for request in self.requests if request.slot is not None]
        assert sorted([*used, *self.scheduler.free_slots]) == list(range(1, self.slots + 1))
        alive = [request for request in self.requests if not request.finished]
        assert self.scheduler.unfinished == len(alive)
        for request in self.requests:
            if request.finished or request.slot is None:
                assert (request.pages, request.slot) == ([], None)
            else:
                assert len(request.pages) * self.page_size >= request.committed + request.in_flight * self.rows

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.unfinished or self.in_flight is not None:
            assert self.advance(lambda: 0, lambda: False), "requests are unfinished and nothing can run"
            steps += 1
            assert steps < 2000, "it does not end"
        assert all(request.finished for request in self.requests)
        self.pages_are_conserved()
        self.slots_are_conserved()
        kept = 0 if self.cache is None else len(self.cache)
        assert self.pool.free == self.pool.total - kept
        self.scheduler.forget_prefixes()
        assert self.pool.free == self.pool.total
        if self.state_cache is not None:
            assert len(self.state_cache) == 0
            assert sorted(self.state_cache._free) == list(range(1, self.places + 1))


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=25, stateful_step_count=40)


# -- single decisions -------------------------------------------------------------------------------------------------


def make(pages: int = 50, **settings: Any) -> tuple[Scheduler, PagePool]:
    pool = PagePool(pages)
    settings = {
        "page_size": 4,
        "max_running": 4,
        "prefill_chunk": 100,
        "kv_slots_per_step": 1,
    } | settings
    places = settings.pop("places", 0)
    cache = PrefixCache(pool, settings["page_size"]) if settings.pop("cached", False) or places else None
    if cache is not None and places:
        settings["state_cache"] = StateCache(cache, settings["page_size"], places)
    return Scheduler(pool, cache, **settings), pool


def add(scheduler: Scheduler, index: int, prompt: int, limit: int = 20, token: int = 1) -> Request:
    params = SamplingParams(max_new_tokens=limit)
    tokens = [token] * prompt
    request = Request(index, tokens, params, end_tokens=frozenset({STOP}), decode=lambda _: "", submitted=0.0)
    scheduler.add(request)
    return request


def spans(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    plan = scheduler.plan_prefill(0.0)
    return [(chunk.request.index, chunk.start, chunk.end, chunk.last) for chunk in plan.chunks] if plan else []


def book(request: Request, count: int = 1, first: bool = False) -> None:
    request.pending -= 1
    if not first:
        request.in_flight -= 1
        request.committed += count
    request.append([1] * count, 0.0)


def test_prompts_are_computed_in_order_and_in_chunks() -> None:
    scheduler, _ = make(prefill_chunk=10)
    for index, prompt in enumerate([7, 8, 2]):
        add(scheduler, index, prompt)
    assert spans(scheduler) == [(0, 0, 7, True), (1, 0, 3, False)]
    assert spans(scheduler) == [(1, 3, 8, True), (2, 0, 2, True)]
    assert spans(scheduler) == []


@pytest.mark.parametrize(("prompt", "limit"), [(3, 1), (6, 1), (8, 20), (40, 20)])
def test_a_pool_of_exactly_the_pages_needed_runs_all_requests(prompt: int, limit: int) -> None:
    """Also where the output fits into the prompt's last page."""
    each = -(-(prompt + limit + 2) // 4)
    scheduler, _ = make(pages=4 * each, max_running=4, prefill_chunk=1000)
    requests = [add(scheduler, index, prompt, limit) for index in range(4)]
    assert [span[0] for span in spans(scheduler)] == [0, 1, 2, 3]
    for request in requests:
        book(request, first=True)
    while not all(request.finished for request in requests):
        plan = scheduler.plan_decode(may_retract=False)
        assert plan is not None
        assert len(plan.requests) == 4
        for request in requests:
            book(request)


@pytest.mark.parametrize(("pages", "expected"), [(40, [3, 3]), (8, [3, 2])])
def test_what_waits_is_expected_to_run_as_far_as_there_are_slots_and_pages(pages: int, expected: list[int]) -> None:
    scheduler, _ = make(pages=pages, max_running=3)
    requests = [add(scheduler, index, prompt=8) for index in range(5)]
    found = [scheduler.expected]
    spans(scheduler)
    assert [*found, scheduler.expected] == expected
    for request in requests[1:]:
        scheduler.finish(request)
    assert spans(scheduler) == []
    assert scheduler.expected == 1


def test_a_prompt_that_is_computed_in_the_same_pass_is_shared() -> None:
    scheduler, _ = make(cached=True)
    first, second = add(scheduler, 0, 9), add(scheduler, 1, 11)
    assert spans(scheduler) == [(0, 0, 9, True), (1, 8, 11, True)]
    assert second.pages[:2] == first.pages[:2]
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 8)


def test_a_prompt_that_shares_pages_of_its_own_pass_lacks_drafts_from_there_on() -> None:
    """The draft skips the pass, which also computes the shared pages."""
    scheduler, _ = make(cached=True)
    first, second, third = add(scheduler, 0, 9), add(scheduler, 1, 11), add(scheduler, 2, 6, token=3)
    plan = scheduler.plan_prefill(0.0)
    assert plan is not None
    scheduler.prompts_launched(plan.chunks, drafts=False)
    assert [request.draft_kv_valid_until for request in (first, second, third)] == [0, 0, 0]
    rows = [scheduler._running[second]]
    assert [(chunk.start, chunk.end) for chunk in scheduler.plan_catch_up(rows, own=0)] == [(0, 10)]


@pytest.mark.parametrize("skipped", [[True, False, False], [True, False, True], [False, True, False]])
def test_pages_that_the_draft_computes_after_a_gap_are_noted(skipped: list[bool]) -> None:
    """A chunk ends within a page, which the next one completes."""
    scheduler, _ = make(cached=True, prefill_chunk=3)
    add(scheduler, 0, 9)
    for skips in skipped:
        plan = scheduler.plan_prefill(0.0)
        assert plan is not None
        scheduler.prompts_launched(plan.chunks, drafts=not skips)
    other = add(scheduler, 1, 11)
    assert spans(scheduler) == [(1, 8, 11, True)]
    assert other.draft_kv_valid_until == 0


def test_a_request_that_waits_for_pages_takes_none_from_the_cache() -> None:
    scheduler, pool = make(pages=8, cached=True)
    done = add(scheduler, 0, 9)
    spans(scheduler)
    done.finish_reason = "abort"
    scheduler.finish(done)
    assert (pool.free, pool.idle) == (6, 2)
    add(scheduler, 1, 20, token=2)
    assert [span[0] for span in spans(scheduler)] == [1]
    add(scheduler, 2, 20, token=3)
    assert spans(scheduler) == []
    assert (pool.free, pool.idle) == (0, 2)


def test_a_request_longer_than_its_window_holds_few_pages() -> None:
    """One that reads all keys takes 30 pages for the same text."""
    scheduler, pool = make(pages=8, window=6)
    request = add(scheduler, 0, 9, 110)
    assert spans(scheduler) == [(0, 0, 9, True)]
    book(request, first=True)
    while not request.finished:
        plan = scheduler.plan_decode(may_retract=False)
        assert plan is not None
        assert pool.total - pool.free <= 4
        book(request)
    assert (len(request.pages), request.freed) == (30, 27)
    scheduler.finish(request)
    assert pool.free == pool.total


def test_the_request_with_the_fewest_tokens_is_retracted_and_readmitted_first() -> None:
    scheduler, pool = make(pages=7)
    old, young = add(scheduler, 0, 7, 15), add(scheduler, 1, 6, 15)
    waiting = add(scheduler, 2, 9, 15)
    assert [span[0] for span in spans(scheduler)] == [0, 1]
    for request in (old, young):
        book(request, first=True)
    scheduler.plan_decode(may_retract=True)
    book(old)
    book(young)
    old.append([1] * 3, 0.0)  # as if a verify had left more
    old.committed += 3
    while True:
        plan = scheduler.plan_decode(may_retract=True)
        assert plan is not None
        if len(plan.requests) == 1:
            break
        for row in plan.requests:
            book(row.request)
    assert plan.requests[0].request is old
    assert (young.slot, young.pages, young.epoch, young.metrics.retractions) == (None, [], 1, 1)
    assert scheduler.is_void(young, 0)
    old.finish_reason = "abort"
    scheduler.finish(old)
    assert spans(scheduler) == [(1, 0, len(young.tokens), True)]
    assert waiting.slot is None
    assert pool.free == 7 - len(young.pages)


def test_nothing_is_retracted_while_results_are_in_flight() -> None:
    scheduler, _ = make(pages=5, max_running=2)
    requests = [add(scheduler, index, 6, 8) for index in range(2)]
    spans(scheduler)
    for request in requests:
        book(request, first=True)
    for _ in range(2):
        assert scheduler.plan_decode(may_retract=False) is not None
    with pytest.raises(OutOfPagesError):
        scheduler.plan_decode(may_retract=False)
    assert all(request.epoch == 0 for request in requests)


def test_steps_past_the_output_limit_are_not_launched() -> None:
    scheduler, _ = make()
    request = add(scheduler, 0, 3, limit=3)
    spans(scheduler)
    assert scheduler.plan_decode(may_retract=True) is not None  # the first token is pending, this leaves the second
    assert scheduler.plan_decode(may_retract=True) is not None
    assert scheduler.plan_decode(may_retract=True) is None
    assert request.pending == 3


def test_thousands_of_waiting_requests_can_be_aborted() -> None:
    scheduler, pool = make()
    requests = [add(scheduler, index, 3) for index in range(5000)]
    spans(scheduler)
    for request in requests:
        request.finish_reason = "abort"
        scheduler.finish(request)
    assert (scheduler.unfinished, pool.free) == (0, 50)


def test_uncomputed_pages_are_not_shared() -> None:
    scheduler, _ = make(cached=True, prefill_chunk=6)
    dropped = add(scheduler, 0, 20)
    assert spans(scheduler) == [(0, 0, 6, False)]
    dropped.finish_reason = "abort"
    scheduler.finish(dropped)
    add(scheduler, 1, 20)
    assert spans(scheduler) == [(1, 4, 10, False)]


def crowded(tokens: list[int]) -> tuple[Scheduler, list[Request]]:
    """Requests that run, each with its last page full but for one place, and no page free."""
    scheduler, pool = make(pages=2 * len(tokens), kv_slots_per_step=1)
    requests = [add(scheduler, index, 6, 2) for index in range(len(tokens))]
    for request, generated in zip(requests, tokens, strict=True):
        request.params, request.most_tokens = SamplingParams(max_new_tokens=30), request.prompt_len + 30
        request.pages, request.slot = pool.allocate(2), scheduler.free_slots.pop()
        request.tokens += [1] * generated
        request.committed = 8
        scheduler._waiting.remove(request)
        scheduler._running[request] = ScheduledRequest(request, request.epoch, request.slot)
    return scheduler, requests


def test_a_retracted_request_leaves_the_plan() -> None:
    scheduler, (first, second, third) = crowded([3, 2, 5])
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert [row.request for row in plan.requests] == [first, third]
    assert second.slot is None
    scheduler, (first, second, third) = crowded([2, 2, 5])
    first.committed = second.committed = 7  # they need no page, the third does
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert [row.request for row in plan.requests] == [first, third]
    assert (first.pending, second.pending) == (1, 0)


def test_pages_of_an_ended_request_do_not_reach_the_next_owner_of_its_slot() -> None:
    scheduler, (first, second) = crowded([3, 3])
    scheduler.pool.decref(second.pages.pop())  # room for one more page, not for two
    second.committed = 12
    with pytest.raises(OutOfPagesError):
        scheduler.plan_decode(may_retract=False)
    assert len(first.pages) == 3
    slot = first.slot
    for request in (first, second):
        request.finish_reason = "stop"
        scheduler.finish(request)
    assert scheduler.plan_decode(may_retract=True) is None
    heir = add(scheduler, 2, 2, 2)
    add(scheduler, 3, 2, 2)
    spans(scheduler)
    assert slot in (heir.slot, list(scheduler._running)[-1].slot)
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert plan.new_pages == []


# -- states of prefixes -----------------------------------------------------------------------------------------------


def passes(scheduler: Scheduler, tokens: list[int], index: int = 0) -> list[tuple[int, int]]:
    """The chunks of a prompt that runs alone, and ends with it."""
    request = submit(scheduler, tokens, index)
    found = []
    while request.prefilled < len(tokens):
        found += [(start, end) for _, start, end, _ in spans(scheduler)]
    end(scheduler, request)
    return found


def submit(scheduler: Scheduler, tokens: list[int], index: int) -> Request:
    params = SamplingParams(max_new_tokens=4)
    request = Request(index, tokens, params, end_tokens=frozenset(), decode=lambda _: "", submitted=0.0)
    scheduler.add(request)
    return request


def end(scheduler: Scheduler, request: Request) -> None:
    request.finish_reason = "abort"
    scheduler.finish(request)


COMMON = list(range(10, 21))  # 11 tokens, 2 pages and a part


def test_the_second_prompt_with_a_prefix_saves_its_state() -> None:
    scheduler, _ = make(places=8)
    assert passes(scheduler, [*COMMON, *[1] * 7]) == [(0, 18)]
    assert passes(scheduler, [*COMMON, *[2] * 7]) == [(0, 8), (8, 18)]
    assert scheduler.state_cache is not None
    assert len(scheduler.state_cache._protected) == 1, "branch points are protected"
    assert passes(scheduler, [*COMMON, *[3] * 9]) == [(8, 20)]
    assert (scheduler.state_cache.counters.kept, scheduler.state_cache.counters.loaded) == (2, 1)  # 20 is a full page


def test_a_repeated_prompt_computes_its_last_page_only() -> None:
    scheduler, _ = make(places=8)
    prompt = [*COMMON, 1, 2, 3]
    assert [passes(scheduler, prompt) for _ in range(3)] == [[(0, 14)], [(0, 12), (12, 14)], [(12, 14)]]


def test_three_prompts_with_a_new_prefix_in_one_pass() -> None:
    """The second computes its prefix as there is no state of the first's; the third waits for that, one pass."""
    scheduler, pool = make(places=8)
    requests = [submit(scheduler, [*COMMON, *[kind] * 3], kind) for kind in (1, 2, 3)]
    first, second, third = (scheduler.plan_prefill(0.0) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is None
    assert [(chunk.request.index, chunk.start, chunk.end) for chunk in first.chunks] == [(1, 0, 14), (2, 0, 8)]
    assert [(chunk.request.index, chunk.start, chunk.end) for chunk in second.chunks] == [(2, 8, 14), (3, 8, 14)]
    ((slot, place),) = first.saves
    assert slot == requests[1].slot
    assert (first.loads, second.loads) == ([], [(place, requests[2].slot)])
    assert [request.metrics.cached_tokens for request in requests] == [0, 0, 8]
    # Pages after the state that a prompt begins with are its own.
    assert [len(request.pages) for request in requests] == [4, 4, 4]
    for request in requests:
        end(scheduler, request)
    assert pool.free + pool.idle == pool.total


def test_each_turn_of_a_conversation_computes_itself_and_the_previous_one() -> None:
    scheduler, _ = make(places=8, pages=200)
    texts = [[*range(100, 114)]]
    for turn in range(1, 4):
        texts.append([*texts[-1], *range(100 * turn + 500, 100 * turn + 511)])
    # With the pages of the answer, too: the next turn finds them known, and saves a state after them.
    assert passes(scheduler, texts[0]) == [(0, 14)]
    assert passes(scheduler, texts[1]) == [(0, 12), (12, 25)]
    assert passes(scheduler, texts[2]) == [(12, 24), (24, 36)]
    assert passes(scheduler, texts[3]) == [(36, 47)]  # 36 is a full page: there the whole prompt has its state


@pytest.mark.parametrize(
    ("chunk", "length", "expected"),
    [
        (10, 18, [(0, 8), (8, 18)]),
        (10, 20, [(0, 10), (10, 20)]),  # at full pages: 8, 16 and 20
        (8, 21, [(0, 8), (8, 16), (16, 21)]),
        (3, 8, [(0, 3), (3, 6), (6, 8)]),  # 4 and 8 are reached in no chunk more, but not from 3
    ],
)
def test_chunks_end_at_full_pages_where_that_needs_no_more_passes(
    chunk: int, length: int, expected: list[tuple[int, int]]
) -> None:
    scheduler, _ = make(places=8, prefill_chunk=chunk)
    assert passes(scheduler, list(range(length))) == expected
