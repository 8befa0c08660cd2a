"""Chi-square tests of token counts against exact distributions, with the smallest distance that they detect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

LEAST_EXPECTED = 5.0  # counts per cell, below which the statistic does not follow the chi-square distribution


class ChiSquare(NamedTuple):
    """A statistic with its degrees of freedom."""

    statistic: float = 0.0
    freedom: int = 0

    @property
    def p_value(self) -> float:
        """The chance of a statistic at least as large."""
        return _chance_above(self.statistic, self.freedom) if self.freedom else 1.0


def of_counts(counts: torch.Tensor, chances: torch.Tensor) -> ChiSquare:
    """Of counts [V] of tokens that have the probabilities `chances` [V]. The rarest tokens are merged into cells of at
    least `LEAST_EXPECTED`; what should not occur at all counts among them."""
    observed, expected = counts.double(), chances.double() * counts.sum() / chances.double().sum()
    order = expected.argsort(descending=True)
    observed, expected = observed[order], expected[order]
    own = int((expected >= LEAST_EXPECTED).sum())
    rest = float(expected[own:].sum())
    if own and rest < LEAST_EXPECTED:  # too rare for a cell of their own: they join the rarest of the others
        own -= 1
    if own == 0 or own == len(expected):
        cells = (observed[:own], expected[:own])
    else:
        cells = (
            torch.cat([observed[:own], observed[own:].sum()[None]]),
            torch.cat([expected[:own], expected[own:].sum()[None]]),
        )
    seen, wanted = cells
    if len(wanted) < 2:
        return ChiSquare()
    return ChiSquare(float(((seen - wanted).square() / wanted).sum()), len(wanted) - 1)


def smallest_distance(freedom: int, count: int, alpha: float, power: float) -> float:
    """The total variation distance, averaged over `count` samples, from which on the test with this significance level
    finds any deviation with probability `power`.

    A distance d makes the noncentrality at least 4 d^2 count (Cauchy-Schwarz). The noncentral distribution is Patnaik's
    approximation (Biometrika 36, 1949). NaN without degrees of freedom.
    """
    if not freedom:
        return math.nan
    critical = _bisect(lambda value: _chance_above(value, freedom) > alpha, 10.0 * freedom + 100)

    def detects(noncentrality: float) -> float:
        whole, spread = freedom + noncentrality, freedom + 2 * noncentrality
        return _chance_above(critical * whole / spread, whole * whole / spread)

    return math.sqrt(_bisect(lambda value: detects(value) < power, 10.0 * critical) / count) / 2


def total(parts: Iterable[ChiSquare]) -> ChiSquare:
    """The sum of statistics of independent samples."""
    tests = list(parts)
    return ChiSquare(math.fsum(test.statistic for test in tests), sum(test.freedom for test in tests))


def _chance_above(value: float, freedom: float) -> float:
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(value / 2).double()))


def _bisect(is_low: Callable[[float], bool], high: float) -> float:
    """The value up to which `is_low`."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return high
