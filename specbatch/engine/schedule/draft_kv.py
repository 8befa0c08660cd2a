"""Which KV the draft has computed. Where it did not run, it catches up before it drafts again.

A draft may be idle in a step that drafts nothing, and in prefill passes. From `Request.draft_kv_valid_until` on it then
lacks the keys and values of the request; those of pages that requests share, it may lack for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbatch.core.request import Request
from specbatch.engine.schedule.plans import ScheduledChunk, ScheduledRequest


class DraftKV:
    """What the draft lacks.

    uncached_tail  see `Scheduler`
    undrafted      pages of prefixes for which the draft has not run
    """

    def __init__(self, page_size: int, uncached_tail: int) -> None:
        self._page_size = page_size
        self._uncached_tail = uncached_tail
        self.undrafted: set[int] = set()

    def allocated(self, pages: Iterable[int]) -> None:
        """Pages have a new owner, which computes them."""
        self.undrafted.difference_update(pages)

    def admitted(self, request: Request) -> None:
        """A request begins with the shared pages that it has."""
        lacking = self._first_undrafted(request, 0)
        request.draft_kv_valid_until = None if lacking is None else lacking * self._page_size

    def idles(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A step is launched in which the draft does not run for these requests."""
        for item in scheduled:
            request = item.request
            if request.draft_kv_valid_until is None:  # the draft may lack the newest committed tokens, too
                request.draft_kv_valid_until = max(request.committed - self._uncached_tail, 0)

    def prompts_launched(self, chunks: Sequence[ScheduledChunk], *, drafts: bool) -> None:
        """A prefill pass is launched in which the draft runs or not."""
        for chunk in chunks:
            request = chunk.request
            if not drafts and request.draft_kv_valid_until is None:
                lacking = self._first_undrafted(request, 0)  # of the pages that an earlier chunk of this pass fills
                request.draft_kv_valid_until = chunk.start if lacking is None else lacking * self._page_size
            self.cached(request, chunk.end)

    def cached(self, request: Request, end: int) -> None:
        """Its full pages up to `end` go to the prefix cache; the draft lacks those from where it was idle."""
        if request.draft_kv_valid_until is not None:
            places = slice(request.draft_kv_valid_until // self._page_size, end // self._page_size)
            self.undrafted.update(request.pages[places])

    def plan_catch_up(self, scheduled: Sequence[ScheduledRequest], own: int) -> list[ScheduledChunk]:
        """What the draft has to compute before a step that drafts for these requests, but for the `own` newest tokens,
        which it computes in the step."""
        chunks: list[ScheduledChunk] = []
        for item in scheduled:
            request = item.request
            start = self._drafted_until(request)
            if start is None:
                continue
            # Each result in flight leaves a token, and no more where nothing was drafted.
            end = request.committed + request.in_flight - 1 - own
            if end > start:
                chunks.append(ScheduledChunk(request, item.epoch, item.slot, start, end, last=False))
        for item in scheduled:
            if item.request.draft_kv_valid_until is not None:
                item.request.draft_kv_valid_until = None
                self.undrafted.difference_update(item.request.pages)
        return chunks

    def lacking(self, request: Request) -> int:
        """How many of its tokens the draft has not computed."""
        start = self._drafted_until(request)
        return 0 if start is None else max(request.committed + request.in_flight - 1 - start, 1)

    def _drafted_until(self, request: Request) -> int | None:
        """From this position on its draft has no keys; None: it has them all. Another request may have computed those
        of a shared prefix."""
        start = request.draft_kv_valid_until
        if start is None or start >= request.shared * self._page_size:
            return start
        lacking = self._first_undrafted(request, start // self._page_size)
        place = request.shared if lacking is None else lacking
        request.draft_kv_valid_until = max(start, place * self._page_size)
        return request.draft_kv_valid_until

    def _first_undrafted(self, request: Request, first: int) -> int | None:
        """The place of the first page from `first` on that it shares and the draft lacks; None if there is none."""
        places = range(first, request.shared)
        return next((place for place in places if request.pages[place] in self.undrafted), None)
