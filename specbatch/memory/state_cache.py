"""Which states of recurrent layers are kept for prompts that begin alike. Host only.

Keys and values of a prefix lie in pages; a state is there for the places alone at which it was kept. It is kept where a
chunk of a prompt ends at a full page. Chunks end there where that costs no pass more, and also where a prompt leaves a
prefix that is known: the second prompt of a kind pays for the state that all later ones begin with.

Where two prompts part others will, too. Where a chunk happens to end is a guess: such a state goes before all of the
first kind, until a prompt has begun with it. So a long prompt in small chunks costs the others next to nothing. (Two
lists, as in the segmented LRU of Karedla et al. 1994.)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from specbatch.memory.prefix_cache import Node, PrefixCache


class Found(NamedTuple):
    """What a prompt begins with.

    pages: held for the caller; state: of the state behind them, 0 if there are none; branch: tokens of the known
    prefix, where a chunk should end; due: the state that it would begin with is kept by the pass that is being planned:
    it had better wait for the next.
    """

    pages: list[int]
    state: int
    branch: int
    due: bool = False


@dataclass
class StateCounters:
    """States kept, begun with, and gone since the record began: with their pages, or to make room for others."""

    kept: int = 0
    loaded: int = 0
    evicted: int = 0


class StateCache:
    """`count` places for states, numbered from 1."""

    def __init__(self, cache: PrefixCache, page_size: int, count: int) -> None:
        self.counters = StateCounters()
        self._cache = cache
        self._page_size = page_size
        self._free = list(range(count, 0, -1))
        # Least recently used first.
        self._probationary: OrderedDict[int, Node] = OrderedDict()
        self._protected: OrderedDict[int, Node] = OrderedDict()
        self._due: set[int] = set()  # kept by the pass that is being planned
        self._lost: list[int] = []  # of these, what went with its pages: the pass still writes there
        cache.dropped = self._forget

    def __len__(self) -> int:
        return len(self._probationary) + len(self._protected)

    def find(self, tokens: list[int]) -> Found:
        """The longest prefix with a state that leaves at least one token to compute."""
        path = self._cache.path(tokens, len(tokens) - 1)
        branch = len(path) * self._page_size
        while path and not path[-1].state:
            path.pop()
        state = path[-1].state if path else 0
        if state in self._due:
            return Found([], 0, branch, due=True)
        return Found(self._cache.hold(path), state, branch)

    def use(self, state: int) -> None:
        """A prompt begins with it."""
        part = self._probationary if state in self._probationary else self._protected
        self._protected[state] = part.pop(state)
        self.counters.loaded += 1

    def keep(self, tokens: list[int], count: int, *, is_branch: bool) -> int:
        """Allocate a slot for the state after the first `count` tokens, whose pages are cached. Returns 0 for none:
        the tokens do not end at a full page, the state is cached already, or this very pass fills every candidate
        for eviction. is_branch: prompts diverge here."""
        if count % self._page_size:
            return 0
        node = self._cache.path(tokens, count)[-1]
        if node.state or not (self._free or self._make_room(is_branch)):
            return 0
        node.state = self._free.pop()
        (self._protected if is_branch else self._probationary)[node.state] = node
        self._due.add(node.state)
        self.counters.kept += 1
        return node.state

    def planned(self) -> None:
        """The pass is launched: what it keeps is there for those behind it."""
        self._due.clear()
        self._free += self._lost
        self._lost.clear()

    def _make_room(self, is_branch: bool) -> bool:
        """Give the least recently used one up. A guess takes the place of another guess, if there is any."""
        parts = [part for part in (self._probationary, self._protected) if part]
        oldest = [next(iter(part.items())) for part in (parts if is_branch else parts[:1])]
        for place, node in oldest:
            if place not in self._due:
                self._forget(node)
                return True
        return False

    def _forget(self, node: Node) -> None:
        place, node.state = node.state, 0
        if place:
            (self._probationary if place in self._probationary else self._protected).pop(place)
            (self._lost if place in self._due else self._free).append(place)
            self.counters.evicted += 1
