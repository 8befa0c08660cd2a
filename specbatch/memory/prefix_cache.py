"""Prefix cache: prompts with a common prefix share its KV pages. A radix tree with one full page per edge. Host only.

Following SGLang's RadixAttention (Zheng et al. 2023), at page granularity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from specbatch.memory.page_pool import PagePool


class Node:
    """A page that follows those of its parents. state: index of the cached recurrent state after it, 0 for none."""

    __slots__ = ("children", "key", "page", "parent", "state")

    def __init__(self, key: tuple[int, ...], page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.state = 0
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """Holds one reference to each of its pages. A page can be shared as soon as the pass that fills it is planned,
    because every read of it is launched later, or in the same pass after the write."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = Node((), 0, None)
        # Least recently used first. A touch moves a path leaf first, so a node never precedes its children.
        self._order: OrderedDict[int, Node] = OrderedDict()
        self.on_evict: Callable[[Node], None] = lambda node: None  # called with every evicted node

    def __len__(self) -> int:
        return len(self._order)

    def _keys(self, tokens: list[int], count: int) -> list[tuple[int, ...]]:
        size = self._page_size
        return [tuple(tokens[i * size : (i + 1) * size]) for i in range(count // size)]

    def path(self, tokens: list[int], count: int) -> list[Node]:
        """The nodes of the longest cached prefix among the first `count` tokens, from the root on."""
        path: list[Node] = []
        node = self._root
        for key in self._keys(tokens, count):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def incref(self, path: list[Node]) -> list[int]:
        """Add a reference to each page of a path, for the caller, and return the pages."""
        if path:
            self._touch(path[-1])
        for found in path:
            self._pool.incref(found.page)
        return [found.page for found in path]

    def match(self, tokens: list[int]) -> list[int]:
        """Pages of the longest cached prefix that leaves at least one token to compute. The caller gets a reference to
        each."""
        return self.incref(self.path(tokens, len(tokens) - 1))

    def insert(self, tokens: list[int], count: int, pages: list[int]) -> None:
        """Share the full pages of the first `count` tokens. If a prefix is cached already, the cached page stays and
        the caller's own page remains private."""
        node = self._root
        for key, page in zip(self._keys(tokens, count), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                self._pool.cache(page)
                self._order[page] = child
            node = child
        self._touch(node)

    def invalidate(self, tokens: list[int], kept: int) -> None:
        """Drop the cached prefix of `tokens` from page number `kept` on, with everything that continues it. Requests
        that hold its pages keep them."""
        path = self.path(tokens, len(tokens))
        dropped = path[kept : kept + 1]
        for node in dropped:  # grows
            dropped.extend(node.children.values())
        for node in reversed(dropped):
            self._remove(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that no request holds, least recently used first. Returns how many were freed.

        A page that is held is marked as used now, so that later calls do not pass over it again.
        """
        freed, first_held = 0, 0
        while freed < count and self._pool.idle:
            node = next(iter(self._order.values()))
            if node.page == first_held:  # all visited: the remaining idle pages have children that are held
                break
            assert not node.children
            if self._pool.refcount(node.page) > 1:
                first_held = first_held or node.page
                self._touch(node)
                continue
            self._remove(node)
            freed += 1
        return freed

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._order[node.page]
        self._pool.uncache(node.page)
        self.on_evict(node)

    def _touch(self, node: Node) -> None:
        while node.parent is not None:
            self._order.move_to_end(node.page)
            node = node.parent
