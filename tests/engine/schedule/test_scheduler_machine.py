"""The scheduler against a simulated device: random lengths, acceptance, stops, aborts, full pools, and states."""

from __future__ import annotations

import random
from typing import Any

from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled import STOP

from specbatch.core.request import Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.schedule.plans import PrefillPlan, ScheduledChunk, ScheduledRequest
from specbatch.engine.schedule.scheduler import OutOfPagesError, Scheduler
from specbatch.memory.page_pool import PagePool
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.state_cache import StateCache


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
        self.scheduler.draft_kv.prompts_launched(plan.chunks, drafts=drafts)
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
        self.scheduler.draft_kv.idles(idle)
        lacking = {row.slot: self.scheduler.draft_kv.lacking(row.request) for row in drafting}
        for chunk in self.scheduler.draft_kv.plan_catch_up(drafting, own=1):
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
TestScheduler.settings = examples(25, stateful_step_count=40)
