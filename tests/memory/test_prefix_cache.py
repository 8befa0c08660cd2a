"""The radix tree of cached pages matches a plain dictionary of prefixes."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specbatch.memory.page_pool import PagePool
from specbatch.memory.prefix_cache import PrefixCache

TOTAL = 24

# Zeros with at most one 1: few enough that many prompts share a prefix.
PROMPTS = st.builds(lambda count, one: [int(at == one) for at in range(count)], st.integers(1, 9), st.integers(0, 9))


class Owner:
    """Models a request: its tokens and the pages it holds."""

    def __init__(self, tokens: list[int], pages: list[int]) -> None:
        self.tokens = tokens
        self.pages = pages


class CacheMachine(RuleBasedStateMachine):
    """The model: every cached prefix (a tuple of tokens) with its page, and when it was last used."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.pool = PagePool(TOTAL)
        self.cache = PrefixCache(self.pool, self.size)
        self.known: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.owners: list[Owner] = []
        self.clock = 0

    def touch(self, tokens: list[int], count: int) -> None:
        self.clock += 1
        for end in range(self.size, count * self.size + 1, self.size):
            self.used[tuple(tokens[:end])] = self.clock

    @rule(tokens=PROMPTS)
    def admit(self, tokens: list[int]) -> None:
        """Match what is cached, take pages for the rest."""
        count = 0
        while (count + 1) * self.size < len(tokens) and tuple(tokens[: (count + 1) * self.size]) in self.known:
            count += 1
        found = self.cache.match(tokens)
        assert found == [self.known[tuple(tokens[: (i + 1) * self.size])] for i in range(count)]
        assert len(found) * self.size < len(tokens), "a token must be left to compute"
        self.touch(tokens, count)
        need = -(-len(tokens) // self.size) - count
        if need > self.pool.free:
            for page in found:
                self.pool.decref(page)
        else:
            self.owners.append(Owner(tokens, found + self.pool.allocate(need)))

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99), share=st.integers(0, 9))
    def insert(self, pick: int, share: int) -> None:
        owner = self.owners[pick % len(self.owners)]
        share = min(share, len(owner.tokens))
        self.cache.insert(owner.tokens, share, owner.pages)
        for index in range(share // self.size):
            self.known.setdefault(tuple(owner.tokens[: (index + 1) * self.size]), owner.pages[index])
        self.touch(owner.tokens, share // self.size)

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        for page in self.owners.pop(pick % len(self.owners)).pages:
            self.pool.decref(page)

    @rule(tokens=PROMPTS, kept=st.integers(0, 3))
    def forget(self, tokens: list[int], kept: int) -> None:
        """A cached prefix from some page on, with everything that continues it."""
        self.cache.invalidate(tokens, kept)
        start = tuple(tokens[: (kept + 1) * self.size])
        if len(start) == (kept + 1) * self.size:
            for prefix in [prefix for prefix in self.known if prefix[: len(start)] == start]:
                del self.known[prefix]
                self.used.pop(prefix, None)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        """Unreferenced leaves, one at a time, least recently used first."""
        held = {page for owner in self.owners for page in owner.pages}
        before, free = dict(self.known), self.pool.free
        freed = self.cache.evict(count)
        assert self.pool.free == free + freed
        evicted = {prefix for prefix, page in before.items() if self.pool.refcount(page) == 0}
        assert len(evicted) == freed <= count
        assert not held & {self.known.pop(prefix) for prefix in evicted}
        for prefix in evicted:
            assert not any(len(other) > len(prefix) and other[: len(prefix)] == prefix for other in self.known)

        def free_to_go(prefix: tuple[int, ...]) -> bool:  # itself and all its descendants
            return all(page not in held for key, page in self.known.items() if key[: len(prefix)] == prefix)

        left = [prefix for prefix in self.known if free_to_go(prefix)]
        assert freed == count or not left, "unreferenced pages were kept although more were requested"
        ages = [[self.used[prefix] for prefix in group if prefix in self.used] for group in (evicted, left)]
        assert not all(ages) or max(ages[0]) <= min(ages[1])
        for prefix in self.known:
            if not free_to_go(prefix):
                self.used.pop(prefix, None)  # held: counts as used at an eviction that meets it

    @invariant()
    def nothing_is_lost(self) -> None:
        holders = dict.fromkeys(range(1, TOTAL + 1), 0)
        for owner in self.owners:
            for page in owner.pages:
                holders[page] += 1
        for page in self.known.values():
            holders[page] += 1
        assert {page: self.pool.refcount(page) for page in holders} == holders
        assert self.pool.free == sum(count == 0 for count in holders.values())
        assert self.pool.idle == sum(holders[page] == 1 for page in self.known.values())
        assert len(self.cache) == len(self.known) == len(set(self.known.values()))

    def teardown(self) -> None:
        while self.owners:
            self.end(0)
        assert self.cache.evict(TOTAL) == len(self.known)
        assert (self.pool.free, len(self.cache)) == (TOTAL, 0)


TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = examples(40, stateful_step_count=40)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(10)


def test_eviction_time_does_not_grow_with_the_cache() -> None:
    """Under pressure a page is evicted for every page that decoding needs."""
    looked_at = 0

    class Watched(PagePool):
        def refcount(self, page: int) -> int:
            nonlocal looked_at
            looked_at += 1
            return super().refcount(page)

    pool = Watched(4000)
    cache = PrefixCache(pool, 1)
    for start in range(4000):  # every other one is held; the oldest are looked at first
        (page,) = pool.allocate(1)
        cache.insert([start], 1, [page])
        if start % 2:
            pool.decref(page)
    assert pool.idle == 2000
    assert sum(cache.evict(1) for _ in range(1000)) == 1000
    assert looked_at <= 2002


def test_eviction_terminates_when_nothing_can_be_freed(pool: PagePool) -> None:
    cache = PrefixCache(pool, 1)
    known, own = pool.allocate(1), pool.allocate(2)
    cache.insert([1], 1, known)
    cache.insert([1, 2], 2, own)  # holds the page of [1, 2], but not the known one of [1]
    pool.decref(known[0])
    assert pool.idle == 1
    assert cache.evict(1) == 0
    pool.decref(own[1])
    assert cache.evict(3) == 2
    assert pool.free == 9
