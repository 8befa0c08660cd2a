"""Which states of recurrent layers are kept for prompts that begin alike. Host only.

Keys and values of a prefix lie in pages; a state is there for the places alone at which it was kept. It is kept where a
chunk of a prompt ends at a full page. Chunks end there as far as they can, and also where a prompt leaves a prefix that
is known: the second prompt of a kind pays for the state that all later ones begin with.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from specbatch.memory.prefix_cache import Node, PrefixCache


class Found(NamedTuple):
    """What a prompt begins with.

    pages: held for the caller; checkpoint: of the state behind them, 0 if there are none; branch: tokens of the known
    prefix, where a chunk should end; due: the state that it would begin with is kept by the pass that is being planned:
    it had better wait for the next.
    """

    pages: list[int]
    checkpoint: int
    branch: int
    due: bool = False


class Checkpoints:
    """`count` places for states, numbered from 1. The least recently used one goes first."""

    def __init__(self, cache: PrefixCache, page_size: int, count: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._free = list(range(count, 0, -1))
        self._used: OrderedDict[int, Node] = OrderedDict()
        self._due: set[int] = set()  # kept by the pass that is being planned
        cache.dropped = self._forget

    def __len__(self) -> int:
        return len(self._used)

    def find(self, tokens: list[int]) -> Found:
        """The longest prefix with a state that leaves at least one token to compute."""
        path = self._cache.path(tokens, len(tokens) - 1)
        known = len(path)
        while path and not path[-1].checkpoint:
            path.pop()
        branch = known * self._page_size
        if not path:
            return Found([], 0, branch)
        checkpoint = path[-1].checkpoint
        if checkpoint in self._due:
            return Found([], 0, branch, due=True)
        self._used.move_to_end(checkpoint)
        return Found(self._cache.hold(path), checkpoint, branch)

    def keep(self, tokens: list[int], count: int) -> int:
        """Where to keep the state behind the first `count` tokens, whose pages are cached; 0 for nowhere: it is kept
        already, or what would have to go is of this very pass."""
        if count % self._page_size:
            return 0
        path = self._cache.path(tokens, count)
        if len(path) * self._page_size != count or not path or path[-1].checkpoint:
            return 0
        if not self._free:
            oldest, node = next(iter(self._used.items()), (0, None))
            if node is None or oldest in self._due:
                return 0
            self._forget(node)
        place = path[-1].checkpoint = self._free.pop()
        self._used[place] = path[-1]
        self._due.add(place)
        return place

    def planned(self) -> None:
        """The pass is launched: what it keeps is there for those behind it."""
        self._due.clear()

    def _forget(self, node: Node) -> None:
        if node.checkpoint:
            del self._used[node.checkpoint]
            self._free.append(node.checkpoint)
            self._due.discard(node.checkpoint)
            node.checkpoint = 0
