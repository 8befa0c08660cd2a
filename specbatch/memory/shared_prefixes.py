"""Groups of running requests that share a KV prefix, which decode attention then reads once for each group. Host only.

A radix tree over the pages of running requests shows who shares them. Its nodes are groups that could be made; those
are made that save the most reads. It is renewed only when a request comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

MOST_GROUPS = 64  # a power of two
# What sharing costs, in keys that a processor could read meanwhile.
GROUP_KEYS = 256  # a group: its last tile of rows is not full
MEMBER_KEYS = 32  # a member: its partial results are written and read again
TILE_READS = 3  # to multiply the keys with a tile of rows, full or not, takes as long as so many requests read them
MOST_ROWS = 32  # of a request and KV head: with more, to multiply takes about as long as to read
LEAST_SAVED = 100 << 20  # bytes of keys and values of a layer, below which a step shares nothing: one kernel more


def most_tokens(group: int) -> int:
    """Of a request in a step that shares prefixes, where a KV head has `group` query heads; 0: no step shares any."""
    return MOST_ROWS // max(1, group)


class PrefixGroups(NamedTuple):
    """int32 arrays, see `SharedPrefixes`: lengths [B], members [M], groups [3, MOST_GROUPS]; saved: tokens whose keys a
    step need not read in a layer."""

    lengths: np.ndarray
    members: np.ndarray
    groups: np.ndarray
    saved: int


class _Node:
    """Pages that follow those of its parent, `reach` with them, and the requests below it."""

    __slots__ = ("children", "count", "pages", "parent", "reach", "shared")

    def __init__(self, pages: list[int], reach: int, parent: _Node | None) -> None:
        self.pages = pages
        self.reach = reach
        self.parent = parent
        self.count = 0
        self.children: dict[int, _Node] = {}  # by their first page
        self.shared: dict[int, _Node] = {}  # those of more than one request


class SharedPrefixPlanner:
    """Keeps the tree, and plans steps. Requests are known by their slots.

    page_size  tokens of a page
    key_bytes  of one token in one layer, keys and values
    group      query heads of a KV head
    """

    def __init__(self, page_size: int, key_bytes: int, group: int = 1) -> None:
        self._page_size = page_size
        self._least = LEAST_SAVED // key_bytes
        self._most_tokens = most_tokens(group)
        self._root = _Node([], 0, None)
        self._ends: dict[int, _Node] = {}
        self._planned: list[int] | None = None  # the slots of the last plan, None if requests came or went since
        self._plan: PrefixGroups | None = None

    def add(self, slot: int, pages: Sequence[int]) -> None:
        """A request begins to decode. pages: its first ones, as far as they are full and no step writes to them."""
        node, at = self._root, 0
        while at < len(pages):
            child = node.children.get(pages[at])
            if child is None:
                child = node.children[pages[at]] = _Node(list(pages[at:]), len(pages), node)
            elif child.pages != pages[at : at + len(child.pages)]:
                child = self._split(child, pages, at)
            node, at = child, child.reach
        self._ends[slot] = node
        self._count(node, 1)

    def remove(self, slot: int) -> None:
        """A request gives its pages back, whether it had begun or not."""
        node = self._ends.pop(slot, None)
        if node is not None:
            self._count(node, -1)

    def plan(self, slots: list[int], tokens: int = 1) -> PrefixGroups | None:
        """The groups of a step over `slots`, in this order, with so many tokens of each; None if sharing does not pay.
        The same object as long as nothing changes."""
        if tokens > self._most_tokens:
            return None
        if slots != self._planned:
            self._planned = list(slots)
            plan = self._group(slots) if self._root.shared else None
            if plan is None or self._plan is None or not _equal(plan, self._plan):
                self._plan = plan
        return self._plan

    def _count(self, node: _Node, change: int) -> None:
        self._planned = None
        while node.parent is not None:
            node.count += change
            parent, first = node.parent, node.pages[0]
            if node.count > 1:
                parent.shared[first] = node
            else:
                parent.shared.pop(first, None)
            if not node.count:
                del parent.children[first]
            node = parent

    def _split(self, child: _Node, pages: Sequence[int], at: int) -> _Node:
        """Divide a node where its pages cease to be those from `at` on. Returns the part in front."""
        pairs = zip(child.pages, pages[at:], strict=False)
        same = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pages) - at)
        parent, first = child.parent, child.pages[0]
        assert parent is not None
        front = parent.children[first] = _Node(child.pages[:same], at + same, parent)
        child.pages, child.parent = child.pages[same:], front
        front.children[child.pages[0]] = child
        front.count = child.count
        if child.count > 1:
            parent.shared[first] = front
            front.shared[child.pages[0]] = child
        return front

    def _group(self, slots: list[int]) -> PrefixGroups | None:
        members: dict[_Node, list[int]] = {node: [] for node in self._worthwhile()}
        nearest: dict[_Node, _Node | None] = {self._root: None, **{node: node for node in members}}
        for place, slot in enumerate(slots):
            node = self._ends[slot]
            above = node.parent or node  # an end is rarely that of another request, and not worth a note
            if above not in nearest:
                _find(above, nearest)
            if (group := nearest.get(node, nearest[above])) is not None:
                members[group].append(place)
        for node in reversed(list(members)):  # parts of a group before the group
            if self._saved(node, len(members[node])) <= 0:
                _leave(node, members)
        by_saved = sorted(members, key=lambda node: self._saved(node, len(members[node])))
        for node in by_saved[:-MOST_GROUPS]:
            _leave(node, members)
        saved = sum((len(places) - 1) * node.reach * self._page_size for node, places in members.items())
        if sum(self._saved(node, len(places)) for node, places in members.items()) < self._least:
            return None
        lengths, groups = np.zeros(len(slots), np.int32), np.zeros((3, MOST_GROUPS), np.int32)
        first = 0
        for index, (node, places) in enumerate(members.items()):
            lengths[places] = keys = node.reach * self._page_size
            groups[:, index] = first, len(places), keys
            first += len(places)
        return PrefixGroups(lengths, np.fromiter(chain(*members.values()), np.int32), groups, saved)

    def _worthwhile(self) -> list[_Node]:
        """Nodes that save reads as groups, given those above them. A group is before its parts."""
        found: list[_Node] = []
        stack = [(node, 0) for node in self._root.shared.values()]
        while stack:
            node, base = stack.pop()
            keys, longer = node.reach * self._page_size, any(one.count == node.count for one in node.shared.values())
            if not longer and node.count * (keys - max(base, MEMBER_KEYS)) > TILE_READS * keys + GROUP_KEYS:
                found.append(node)
                base = keys
            stack.extend((child, base) for child in node.shared.values())
        return found

    def _saved(self, node: _Node, count: int) -> int:
        """Keys that a group of so many need not read, less what sharing costs."""
        keys = node.reach * self._page_size
        return (count - TILE_READS) * keys - count * MEMBER_KEYS - GROUP_KEYS


def _find(node: _Node, nearest: dict[_Node, _Node | None]) -> None:
    """Note which group is the nearest above the node, and above those on the way to it."""
    way = [node]
    while (parent := way[-1].parent) not in nearest:
        assert parent is not None
        way.append(parent)
    nearest.update(dict.fromkeys(way, nearest[parent]))


def _leave(node: _Node, members: dict[_Node, list[int]]) -> None:
    """Dissolve a group into the nearest above it, if there is one."""
    places, above = members.pop(node), node.parent
    while above is not None and above not in members:
        above = above.parent
    if above is not None:
        members[above] += places


def _equal(one: PrefixGroups, other: PrefixGroups) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))
