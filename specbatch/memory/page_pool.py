"""Who owns which KV page. Host only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`."""
    return -(-tokens // page_size)


def reach_of(tokens: int, rows: int) -> int:
    """KV positions that must be there for a request to get to `tokens`: a verify of `rows` rows may be in flight while
    the next one is launched."""
    return tokens + 2 * rows


def held_at_once(caps: Mapping[str, Any], lengths: Iterable[int]) -> int:
    """How many requests of these lengths (prompt and output) an engine of such caps runs at once, the longest first."""
    pages = (pages_for(reach_of(length, caps["verify_slots"]), caps["page_size"]) for length in lengths)
    held = sum(1 for total in accumulate(sorted(pages, reverse=True)) if total <= caps["kv_pages"])
    return min(held, int(caps["max_running"]))


class PagePool:
    """Pages 1..total with a count of holders each; page 0 is never handed out, padding rows write there.

    A page is free when nobody holds it. Requests and the prefix cache hold pages alike.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._holders = [0] * (total + 1)
        self._kept = bytearray(total + 1)  # 1: the prefix cache is one of the holders
        self.idle = 0  # pages that the prefix cache alone holds

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, held once each. The caller has checked `free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, page: int) -> None:
        """One more holder of a page that is in use."""
        if self._holders[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._holders[page] += 1
        if self._kept[page] and self._holders[page] == 2:
            self.idle -= 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if self._holders[page] <= self._kept[page]:
            raise RuntimeError(f"page {page} is released twice")
        self._holders[page] -= 1
        if self._kept[page] and self._holders[page] == 1:
            self.idle += 1
        if not self._holders[page]:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache becomes a holder."""
        if self._kept[page]:
            raise RuntimeError(f"page {page} is cached twice")
        self.hold(page)
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache is no holder any more."""
        if not self._kept[page]:
            raise RuntimeError(f"page {page} is not cached")
        self._kept[page] = 0
        if self._holders[page] == 1:
            self.idle -= 1
        self.release(page)

    def holders(self, page: int) -> int:
        return self._holders[page]
