"""Reference-counted KV page allocator. Host only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`."""
    return -(-tokens // page_size)


def reserved_length(tokens: int, rows: int) -> int:
    """KV positions to reserve for a request of `tokens` tokens: a verify of `rows` rows may be in flight while the next
    one is launched."""
    return tokens + 2 * rows


def held_at_once(caps: Mapping[str, Any], lengths: Iterable[int]) -> int:
    """How many requests of these lengths (prompt and output tokens) an engine with the capacities `caps` holds at once,
    counted from the longest."""
    pages = (pages_for(reserved_length(length, caps["verify_slots"]), caps["page_size"]) for length in lengths)
    held = sum(1 for total in accumulate(sorted(pages, reverse=True)) if total <= caps["kv_pages"])
    return min(held, int(caps["max_running"]))


class PagePool:
    """Pages 1..total with a reference count each. Page 0 is never allocated: padding rows write there.

    Requests and the prefix cache hold references. A page without references is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._refcounts = [0] * (total + 1)
        self._cached = bytearray(total + 1)  # 1: the prefix cache holds a reference
        self.idle = 0  # pages that only the prefix cache holds

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free pages with one reference each. The caller has checked `free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages requested, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._refcounts[page] = 1
        return taken

    def incref(self, page: int) -> None:
        """Add a reference to a page that is in use."""
        if self._refcounts[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._refcounts[page] += 1
        if self._cached[page] and self._refcounts[page] == 2:
            self.idle -= 1

    def decref(self, page: int) -> None:
        """Remove a reference; the page is free after the last one."""
        if self._refcounts[page] <= self._cached[page]:
            raise RuntimeError(f"page {page} is released twice")
        self._refcounts[page] -= 1
        if self._cached[page] and self._refcounts[page] == 1:
            self.idle += 1
        if not self._refcounts[page]:
            self._free.append(page)

    def cache(self, page: int) -> None:
        """Add the prefix cache's reference."""
        if self._cached[page]:
            raise RuntimeError(f"page {page} is cached twice")
        self.incref(page)
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """Remove the prefix cache's reference."""
        if not self._cached[page]:
            raise RuntimeError(f"page {page} is not cached")
        self._cached[page] = 0
        if self._refcounts[page] == 1:
            self.idle -= 1
        self.decref(page)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]
