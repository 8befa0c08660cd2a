"""Plans of the scheduler: which requests a prefill pass or a decode step computes, and the pages they got."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.core.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """A request in one launch. Its result is void if `epoch` is no longer the request's."""

    request: Request
    epoch: int
    slot: int


@dataclass(frozen=True)
class ScheduledChunk(ScheduledRequest):
    """Tokens start..end-1 of a request, computed in one pass; `last` if the prompt is complete after it."""

    start: int
    end: int
    last: bool


@dataclass
class PrefillPlan:
    """One pass. loads: (cached state, slot) of requests that start from a cached state; saves: (slot, cached state) to
    store after the pass."""

    admitted: list[Request] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class DecodePlan:
    """One decode step. new_pages: (slot, index in its page row, page) reserved since the last plan, and page 0 in place
    of freed ones; bound: no KV is longer than this after the step."""

    requests: list[ScheduledRequest]
    new_pages: list[tuple[int, int, int]]
    bound: int
