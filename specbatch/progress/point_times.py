"""Expected times of the points of a sweep or an evaluation, from those that were measured, for the remaining time.

At concurrency c a request takes the time a + b / c: b is shared (a step reads the weights once for all), and a is not
(what each request computes). Both are fitted to the concurrencies that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

# a / (a + b), as long as one concurrency is known: a GPU computes a small batch in about the time of one request.
MARGINAL, MARGINAL_ON_CPU = 0.005, 0.25


class PointWork(NamedTuple):
    """A point: its requests, how many are concurrent, and the name of its configuration."""

    requests: int
    concurrency: int
    name: str = ""


class PointTimes:
    """Seconds per request, measured and expected, by configuration and concurrency.

    marginal   the part of the time of a request alone that it takes among any number of others, until two concurrencies
               are known
    """

    def __init__(self, marginal: float = MARGINAL) -> None:
        self._marginal = marginal
        self._seen: dict[str, dict[int, tuple[int, float]]] = {}  # requests and seconds

    def add(self, point: PointWork, seconds: float) -> None:
        """Note that the requests of a point took so many seconds together."""
        own = self._seen.setdefault(point.name, {})
        requests, before = own.get(point.concurrency, (0, 0.0))
        own[point.concurrency] = requests + point.requests, before + seconds

    def having(self, point: PointWork, seconds: float) -> PointTimes:
        """The same times and another one."""
        found = PointTimes(self._marginal)
        found._seen = {name: dict(own) for name, own in self._seen.items()}
        found.add(point, seconds)
        return found

    def expected(self, name: str, concurrency: int) -> float | None:
        """Seconds per request: as measured; else that of the others at this concurrency, by how much the configuration
        differs from them; else by the fit. None before anything was measured."""
        if (known := self._measured(name, concurrency)) is not None:
            return known
        others = [found for other in self._seen if (found := self._as(name, other, concurrency)) is not None]
        if others:
            return fmean(others)
        if not self._seen:
            return None
        sizes = {size for own in self._seen.values() for size in own}
        own, shared = _fitted([(size, self.expected(name, size) or 0.0) for size in sizes], self._marginal)
        return own + shared / concurrency

    def _measured(self, name: str, concurrency: int) -> float | None:
        requests, seconds = self._seen.get(name, {}).get(concurrency, (0, 0.0))
        return seconds / requests if requests else None

    def _as(self, name: str, other: str, concurrency: int) -> float | None:
        """The time of another configuration, times the ratio of both at the nearest concurrency that both have."""
        theirs = self._measured(other, concurrency)
        if theirs is None:
            return None
        common = self._seen.get(name, {}).keys() & self._seen[other].keys()
        if not common:
            return theirs
        nearest = min(common, key=lambda size: abs(math.log(size / concurrency)))
        own, compared = self._measured(name, nearest), self._measured(other, nearest)
        return theirs * own / compared if own and compared else theirs


def _fitted(measured: Iterable[tuple[int, float]], marginal: float) -> tuple[float, float]:
    """a and b of a + b / c through (c, seconds), with the smallest squares of relative errors; none is negative."""
    points = [(1 / size, seconds) for size, seconds in measured if seconds > 0]
    if not points:
        return 0.0, 0.0
    if len(points) == 1:
        [(share, seconds)] = points
        alone = seconds / (marginal + (1 - marginal) * share)
        return marginal * alone, (1 - marginal) * alone
    # Of each point 1 = a / seconds + b x share / seconds.
    pairs = [(1 / seconds, share / seconds) for share, seconds in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    left, right = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    determinant = aa * bb - ab * ab
    own, shared = (left * bb - right * ab) / determinant, (right * aa - left * ab) / determinant
    if own < 0:
        return 0.0, right / bb
    return (left / aa, 0.0) if shared < 0 else (own, shared)
