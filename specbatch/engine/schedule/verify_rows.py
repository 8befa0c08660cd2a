"""Chooses how many rows a verify has, for `verify_budget="auto"`. Host code only: no device, no clock.

All requests draft all of their tokens, or with `draft_tokens="auto"`, too, all or none in a step. With a budget b, a
verify of B requests has B b rows, and the drafts with the largest values are verified (`engine.device.verify_budget`).
The value of a draft is the probability that it is reached and accepted, by what the run has shown for its confidence
and place. The sum of the values of what is verified is therefore the number of drafts that are expected to be accepted.
A step returns the values of all its drafts, verified or not, so that each step shows what every budget would have
gained. The budget is chosen that has the most expected tokens per second:

    (B + sum of the ceil(B b) - B largest values) / t(B, b)

Times t, margins and probes are those of `DraftLength`: a budget takes the place of a number of drafts. A probe of the
largest budget also shows which drafts are accepted of those that no other budget verifies.

The values that count are those of steps whose results the host has handled, smoothed. In v2 these are all but the one
in flight. So the host waits for nothing, and the number of rows does not depend on drafts of the step, which would make
verification lossy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specbatch.config.draft_shape import AUTO, QUARTERS
from specbatch.engine.schedule.acceptance_by_context import GUESS
from specbatch.engine.schedule.draft_length import NONE, Choice, DraftLength, Option, Requests

NEWEST = 1 / 64  # least weight of a step in the drafts that are expected for its batch size
GUESSES = 8  # first steps, whose confidence is not yet known to be right or wrong


class VerifyRows(DraftLength):
    """Chooses one of `budgets` for each decode step, or no drafts. What `DraftLength` calls a number of drafts is that
    of verified drafts per request, in quarters."""

    chooses_rows = True

    def __init__(
        self, num_drafts: int, budgets: Sequence[float], buckets: list[int], *, pads: bool, may_idle: bool = False
    ) -> None:
        """num_drafts: of each request; budgets: rows per request, ascending, whole quarters; buckets: see
        `DraftLength`; pads: whether steps have as many requests as their bucket, some of them padding; may_idle:
        whether a step may draft nothing, with `draft_tokens="auto"`."""
        lengths = [round((budget - 1) * QUARTERS) for budget in budgets]
        super().__init__((*([0] * may_idle), *lengths), buckets)
        self._num_drafts = num_drafts
        self._pads = pads
        self._steps = Counter[int]()  # whose values are known, by bucket
        # By bucket: drafts of a request that are expected to be accepted with each budget.
        self._expected: dict[int, list[float]] = {}
        # Before the first result: as if each draft were accepted with this probability, given those before it.
        self._guessed = [GUESS / (1 - GUESS) * (1 - GUESS ** (length / QUARTERS)) for length in self.draft_lengths]

    def form(self, length: int) -> tuple[int, float | None]:
        if not length and self.draft_lengths[0] == 0:
            return 0, None
        return self._num_drafts, 1 + length / QUARTERS

    def _emitted(self, rows: int, place: int, drafts: int) -> float:
        bucket = self.bucket(rows)
        nearest = min(self._expected, key=lambda other: abs(other - bucket), default=None)
        expected = self._guessed if nearest is None else self._expected[nearest]
        return 1 + expected[self.draft_lengths.index(drafts)]

    @property
    def _is_known(self) -> bool:
        return self._steps.total() >= GUESSES

    def _may_draft(self, rows: int, contexts: Sequence[int], left: Sequence[int]) -> bool:
        return not self._is_known or super()._may_draft(rows, contexts, left)

    def _options(
        self, requests: Requests, rows: int, cached: int, *, splits: bool = True
    ) -> dict[tuple[int, int | None], Option]:
        found = super()._options(requests, rows, cached, splits=splits)
        if not self._is_known:
            found.pop(NONE, None)  # steps without drafts would show nothing of acceptance
        return found

    def _learn_accepted(
        self, choice: Choice, accepted: Iterable[tuple[int, int]], values: Sequence[Sequence[float]]
    ) -> None:
        """values: of the drafts of each request, see `Proposal`."""
        if not values:
            return
        bucket, count = choice.kind[0], len(values)
        found = np.maximum(np.array(values).ravel(), 0.0)
        found.sort()
        sums = np.append(0.0, np.cumsum(found[::-1]))
        size = bucket if self._pads else count
        places = [min(math.ceil(size * length / QUARTERS), len(found)) for length in self.draft_lengths]
        new = [float(sums[place]) / count for place in places]
        known, weight = self._expected.get(bucket, new), max(NEWEST, 2 / (self._steps[bucket] + 2))
        self._expected[bucket] = [old + weight * (one - old) for old, one in zip(known, new, strict=True)]
        self._steps[bucket] += 1


def announced(budgets: tuple[float, ...]) -> str:
    return f"verify budget: {AUTO}, one of {', '.join(f'{budget:g}' for budget in budgets)} rows per request"
