"""Times of Qwen3-8B and EAGLE-3 on an H200, and acceptance that falls with the context, for simulations of
`draft_tokens="auto"`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from specbatch.engine.schedule.draft_length import DraftLength
from specbatch.engine.schedule.step_model import StepModel
from specbatch.runtime.cuda_graphs import batch_buckets

# Milliseconds of steps with 0 to 3 drafts and short contexts (results/h200: qwen3-8b, qwen3-8b-eagle3-auto; 256 and 512
# from closed loops), and nanoseconds per cached token.
STEPS = {
    1: (3.8, 4.15, 4.6, 5.05),
    8: (4.4, 4.75, 5.1, 5.5),
    32: (4.9, 5.5, 6.0, 6.5),
    128: (5.8, 8.0, 11.0, 14.0),
    256: (8.3, 14.5, 20.5, 27.0),
    512: (14.0, 27.0, 40.0, 53.0),
}
CACHED_NS = (33.0, 34.0, 35.0, 36.0)
PROMPT_S = 22e-6  # per prompt token, and at the end of a context of 32,768 ...
LONGER_S = 21e-6  # ... so much more
HEAD = 0.015  # of the first, more where the head runs for the prompt, too
LENGTHS = (0, 1, 2, 3)
MODEL = StepModel([*STEPS], {size: dict(enumerate(times)) for size, times in STEPS.items()})

Acceptance = Callable[[float], Sequence[float]]


def step_s(rows: int, drafts: int, cached: int, drafting: int | None = None) -> float:
    """Seconds of a step in which so many of the requests draft; None: all."""
    plain = 1e-3 * MODEL.expected((rows, 0, 0), 0) + 1e-9 * CACHED_NS[0] * cached
    if not drafts:
        return plain
    whole = 1e-3 * MODEL.expected((rows, drafts, rows), 0) + 1e-9 * CACHED_NS[drafts] * cached
    if drafting is None:
        return whole
    single = 1e-3 * (STEPS[1][drafts] - STEPS[1][0])
    return plain + single + (whole - plain - single) * drafting / rows


def prompt_s(start: int, end: int) -> float:
    """Seconds of these tokens of a prompt."""
    return (end - start) * (PROMPT_S + LONGER_S * (start + end) / 65_536)


def falling(first: float, last: float) -> Acceptance:
    """Acceptance that falls from `first` at 512 tokens to `last` at 32,768, linear in the logarithm of the context."""

    def shares(context: float) -> list[float]:
        p = first + (last - first) * min(max(math.log2(context / 512) / 6, 0.0), 1.0)
        return [p, 0.95 * p, 0.9 * p]

    return shares


class Draws:
    """What requests accept: it follows from numbers that are evenly distributed, not random, so that few steps have the
    mean."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._drawn = 0

    def accepted(self, context: int, drafts: int) -> int:
        self._drawn += 1
        number = self._drawn * 0.6180339887498949 % 1.0
        reached = itertools.accumulate(self._acceptance(context)[:drafts], lambda one, other: one * other)
        return sum(number < share for share in reached)


def auto(most_requests: int, clock: float = 0.95) -> DraftLength:
    """As at start: times at a faster clock than later, for powers of two."""
    buckets = batch_buckets(most_requests)
    found = DraftLength(LENGTHS, buckets)
    sizes = [size for size in buckets if size & (size - 1) == 0]
    found.model = StepModel(
        buckets,
        {size: {n: clock * step_s(size, n, 0) for n in LENGTHS} for size in sizes},
        {size: {n: 1e-9 * CACHED_NS[n] for n in LENGTHS} for size in sizes},
    )
    found.catch_up_s, found.prompt_s, found.idle_tokens, found.can_split = PROMPT_S, HEAD * PROMPT_S, 5, True
    return found
