"""Cache of recurrent states for prompts with a common prefix: which states are kept, and which are evicted. Host only.

The keys and values of a prefix are in pages and can be reused at any page boundary. A recurrent state can be reused
only at the position where it was stored, which is where a chunk of a prompt ends at a full page. Prompt chunks end
there if that needs no additional pass, and also where a prompt diverges from a cached prefix: the second prompt with a
prefix pays for the state from which all later ones start.

Branch points of prompts tend to be reused. The end of a chunk elsewhere is only a guess. Eviction is therefore a
segmented LRU (Karedla et al. 1994): states at chunk ends are probationary and evicted before the protected ones, which
are the states at branch points and those that a prompt has started from. A long prompt in small chunks so evicts hardly
any useful state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from specbatch.memory.prefix_cache import Node, PrefixCache


class Found(NamedTuple):
    """The cached prefix that a prompt starts from.

    pages    the prefix's pages, with a reference for the caller
    state    slot of the recurrent state after them, 0 if the prefix is empty
    branch   tokens of the longest cached prefix, with or without a state; a chunk should end there
    storing  the state is being stored by the pass that is being planned, so the prompt should wait for the next pass
    """

    pages: list[int]
    state: int
    branch: int
    storing: bool = False


@dataclass
class StateCounters:
    """States stored, loaded and evicted (with their pages, or to make room for others) since the record began."""

    kept: int = 0
    loaded: int = 0
    evicted: int = 0


class StateCache:
    """Allocates `count` state slots, numbered from 1, to nodes of the prefix cache."""

    def __init__(self, cache: PrefixCache, page_size: int, count: int) -> None:
        self.counters = StateCounters()
        self._cache = cache
        self._page_size = page_size
        self._free = list(range(count, 0, -1))
        # Least recently used first.
        self._probationary: OrderedDict[int, Node] = OrderedDict()
        self._protected: OrderedDict[int, Node] = OrderedDict()
        self._storing: set[int] = set()  # stored by the pass that is being planned
        # Those of `_storing` whose pages were evicted: the pass still writes to their slots.
        self._orphaned: list[int] = []
        cache.on_evict = self._free_slot

    def __len__(self) -> int:
        return len(self._probationary) + len(self._protected)

    def find(self, tokens: list[int]) -> Found:
        """The longest prefix with a state that leaves at least one token to compute."""
        path = self._cache.path(tokens, len(tokens) - 1)
        branch = len(path) * self._page_size
        while path and not path[-1].state:
            path.pop()
        state = path[-1].state if path else 0
        if state in self._storing:
            return Found([], 0, branch, storing=True)
        return Found(self._cache.incref(path), state, branch)

    def promote(self, state: int) -> None:
        """Record that a prompt starts from this state, which protects it."""
        part = self._probationary if state in self._probationary else self._protected
        self._protected[state] = part.pop(state)
        self.counters.loaded += 1

    def allocate(self, tokens: list[int], count: int, *, is_branch: bool) -> int:
        """Allocate a slot for the state after the first `count` tokens, whose pages are cached. Returns 0 for none:
        the tokens do not end at a full page, the state is cached already, or this very pass fills every candidate
        for eviction. is_branch: prompts diverge here."""
        if count % self._page_size:
            return 0
        node = self._cache.path(tokens, count)[-1]
        if node.state or not (self._free or self._evict_one(is_branch)):
            return 0
        node.state = self._free.pop()
        (self._protected if is_branch else self._probationary)[node.state] = node
        self._storing.add(node.state)
        self.counters.kept += 1
        return node.state

    def launched(self) -> None:
        """The planned pass is launched: later passes can load what it stores."""
        self._storing.clear()
        self._free += self._orphaned
        self._orphaned.clear()

    def _evict_one(self, is_branch: bool) -> bool:
        """Evict the least recently used state. A state at a chunk end replaces another one of its kind, if any."""
        parts = [part for part in (self._probationary, self._protected) if part]
        oldest = [next(iter(part.items())) for part in (parts if is_branch else parts[:1])]
        for slot, node in oldest:
            if slot not in self._storing:
                self._free_slot(node)
                return True
        return False

    def _free_slot(self, node: Node) -> None:
        slot, node.state = node.state, 0
        if slot:
            (self._probationary if slot in self._probationary else self._protected).pop(slot)
            (self._orphaned if slot in self._storing else self._free).append(slot)
            self.counters.evicted += 1
