"""The cache of recurrent states matches a plain model: retention, eviction order, lookups."""

from __future__ import annotations

from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specbatch.memory.page_pool import PagePool
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.state_cache import StateCache, StateCounters

PAGES, SLOTS, SIZE = 14, 3, 2
Prefix = tuple[int, ...]

# Zeros with at most one 1: few enough that many prompts share a prefix.
PROMPTS = st.builds(lambda count, one: [int(at == one) for at in range(count)], st.integers(1, 11), st.integers(0, 11))


class Owner:
    """Models a request."""

    def __init__(self, tokens: list[int], pages: list[int], start: int, branch: int) -> None:
        self.tokens, self.pages, self.done, self.branch = tokens, pages, start, branch


class StateCacheMachine(RuleBasedStateMachine):
    """The model: prefixes with a state in order of use, and the content of each slot on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool, SIZE)
        self.state_cache = StateCache(self.cache, SIZE, SLOTS)
        self.owners: list[Owner] = []
        self.probationary: list[Prefix] = []
        self.protected: list[Prefix] = []
        self.slot_of: dict[Prefix, int] = {}
        self.device: dict[int, Prefix] = {}  # content after the launched passes
        self.saves: list[tuple[int, Prefix]] = []  # stored by the pass that is being planned
        self.counted = StateCounters()

    def is_cached(self, prefix: Prefix) -> bool:
        return len(self.cache.path(list(prefix), len(prefix))) * SIZE == len(prefix)

    def is_due(self, prefix: Prefix) -> bool:
        return (self.slot_of[prefix], prefix) in self.saves

    def evict(self, count: int) -> None:
        """Evicts pages and, with them, their states."""
        self.cache.evict(count)
        for prefix in [prefix for prefix in self.slot_of if not self.is_cached(prefix)]:
            self.drop(prefix)

    def drop(self, prefix: Prefix) -> None:
        (self.probationary if prefix in self.probationary else self.protected).remove(prefix)
        del self.slot_of[prefix]
        self.counted.evicted += 1

    @rule(tokens=PROMPTS)
    def admit(self, tokens: list[int]) -> None:
        """The state that a prompt starts from was computed for the same prefix by an earlier pass."""
        known = [tuple(tokens[:end]) for end in range(SIZE, len(tokens), SIZE)]
        known = [prefix for prefix in known if self.is_cached(prefix)]
        kept = [prefix for prefix in known if prefix in self.slot_of]
        found = self.state_cache.find(tokens)
        assert found.branch == SIZE * len(known)
        assert found.storing == bool(kept and self.is_due(kept[-1]))
        if not kept or found.storing:
            assert (found.pages, found.state) == ([], 0)
        else:
            assert found.state == self.slot_of[kept[-1]]
            assert len(found.pages) * SIZE == len(kept[-1])
            assert self.device[found.state] == kept[-1]
        if found.storing:
            return
        need = -(-len(tokens) // SIZE) - len(found.pages)
        self.evict(need - self.pool.free)
        if need > self.pool.free:
            for page in found.pages:
                self.pool.decref(page)
            return
        if kept:
            self.state_cache.promote(found.state)
            (self.probationary if kept[-1] in self.probationary else self.protected).remove(kept[-1])
            self.protected.append(kept[-1])
            self.counted.loaded += 1
        self.owners.append(Owner(tokens, found.pages + self.pool.allocate(need), len(found.pages) * SIZE, found.branch))

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 8))
    def compute(self, pick: int, count: int) -> None:
        owner = self.owners[pick % len(self.owners)]
        end = min(owner.done + count, len(owner.tokens))
        if end == owner.done:
            return
        owner.done = end
        self.cache.insert(owner.tokens, end, owner.pages)
        prefix, is_branch = tuple(owner.tokens[:end]), end == owner.branch
        slot = self.state_cache.allocate(owner.tokens, end, is_branch=is_branch)
        assert bool(slot) == self.has_room(prefix, is_branch)
        if slot:
            (self.protected if is_branch else self.probationary).append(prefix)
            self.slot_of[prefix] = slot
            self.saves.append((slot, prefix))
            self.counted.kept += 1

    def has_room(self, prefix: Prefix, is_branch: bool) -> bool:
        if len(prefix) % SIZE or prefix in self.slot_of:
            return False
        busy = {*self.slot_of.values(), *(slot for slot, _ in self.saves)}
        if len(busy) < SLOTS:
            return True
        oldest = self.probationary[:1] + self.protected[:1]
        for victim in oldest if is_branch else oldest[:1]:
            if not self.is_due(victim):
                self.drop(victim)
                return True
        return False

    @rule()
    def launch(self) -> None:
        self.state_cache.launched()
        assert len({slot for slot, _ in self.saves}) == len(self.saves), "two states are stored to one slot in a pass"
        self.device |= dict(self.saves)
        self.saves.clear()

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        for page in self.owners.pop(pick % len(self.owners)).pages:
            self.pool.decref(page)

    @rule(count=st.integers(1, 6) | st.just(PAGES))
    def evict_pages(self, count: int) -> None:
        self.evict(count)

    @invariant()
    def every_slot_is_free_lost_or_used(self) -> None:
        ours = self.state_cache
        assert {tuple(path): node.state for path, node in self.nodes() if node.state} == self.slot_of
        assert len(ours) == len(self.slot_of) == len(set(self.slot_of.values()))
        for kept, expected in ((ours._probationary, self.probationary), (ours._protected, self.protected)):
            assert [node.state for node in kept.values()] == [self.slot_of[item] for item in expected]
        assert sorted([*ours._free, *ours._orphaned, *self.slot_of.values()]) == list(range(1, SLOTS + 1))
        assert not {slot for slot, _ in self.saves} & set(ours._free), "the planned pass still writes to this slot"
        assert ours.counters == self.counted

    def nodes(self) -> list[tuple[list[int], object]]:
        found = []
        for node in self.cache._order.values():
            tokens, parent = [], node
            while parent.parent is not None:
                tokens = [*parent.key, *tokens]
                parent = parent.parent
            found.append((tokens, node))
        return found

    def teardown(self) -> None:
        while self.owners:
            self.end(0)
        self.launch()
        self.cache.evict(PAGES)
        assert (len(self.state_cache), self.pool.free) == (0, PAGES)
        assert sorted(self.state_cache._free) == list(range(1, SLOTS + 1))


TestStateCache = StateCacheMachine.TestCase
TestStateCache.settings = examples(60, stateful_step_count=40)


def test_long_chunked_prompt_evicts_one_state_only() -> None:
    """All but one: the least recently used."""
    pool = PagePool(30)
    cache = PrefixCache(pool, 2)
    state_cache = StateCache(cache, 2, 4)

    def compute(tokens: list[int], *, is_branch: bool) -> None:
        pages = pool.allocate(len(tokens) // 2)
        cache.insert(tokens, len(tokens), pages)
        for page in pages:
            pool.decref(page)
        for end in range(2, len(tokens) + 1, 2):
            assert state_cache.allocate(tokens, end, is_branch=is_branch)
            state_cache.launched()

    for kind in (1, 2, 3, 4):
        compute([kind] * 2, is_branch=True)
    compute([9] * 16, is_branch=False)
    assert [state_cache.find([kind] * 3).state > 0 for kind in (1, 2, 3, 4)] == [False, True, True, True]
    assert len(state_cache.find([9] * 17).pages) == 8
