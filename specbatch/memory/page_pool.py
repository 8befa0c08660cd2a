"""Reference-counted KV page allocator. Host only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`."""
    return -(-tokens // page_size)


def reach_of(tokens: int, rows: int) -> int:
    """KV positions to reserve for a request of `tokens` tokens: a verify of `rows` rows may be in flight while the next
    one is launched."""
    return tokens + 2 * rows


def held_at_once(caps: Mapping[str, Any], lengths: Iterable[int]) -> int:
    """How many requests of these lengths (prompt and output tokens) an engine with the capacities `caps` holds at once,
    counted from the longest."""
    pages = (pages_for(reach_of(length, caps["verify_slots"]), caps["page_size"]) for length in lengths)
    held = sum(1 for total in accumulate(sorted(pages, reverse=True)) if total <= caps["kv_pages"])
    return min(held, int(caps["max_running"]))


class PagePool:
    """Pages 1..total with a reference count each. Page 0 is never allocated: padding rows write there.

    Requests and the prefix cache hold references. A page without references is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._holders = [0] * (total + 1)
        self._kept = bytearray(total + 1)  # 1: the prefix cache holds a reference
        self.idle = 0  # pages that only the prefix cache holds

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocate `count` free pages with one reference each. The caller has checked `free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages requested, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, page: int) -> None:
        """Add a reference to a page that is in use."""
        if self._holders[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._holders[page] += 1
        if self._kept[page] and self._holders[page] == 2:
            self.idle -= 1

    def release(self, page: int) -> None:
        """Remove a reference; the page is free after the last one."""
        if self._holders[page] <= self._kept[page]:
            raise RuntimeError(f"page {page} is released twice")
        self._holders[page] -= 1
        if self._kept[page] and self._holders[page] == 1:
            self.idle += 1
        if not self._holders[page]:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Add the prefix cache's reference."""
        if self._kept[page]:
            raise RuntimeError(f"page {page} is cached twice")
        self.hold(page)
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """Remove the prefix cache's reference."""
        if not self._kept[page]:
            raise RuntimeError(f"page {page} is not cached")
        self._kept[page] = 0
        if self._holders[page] == 1:
            self.idle -= 1
        self.release(page)

    def holders(self, page: int) -> int:
        return self._holders[page]
