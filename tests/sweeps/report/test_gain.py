"""The gain by steps: its interval over repeats is that of `specbatch compare`."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from specbatch.sweeps.report.gain import gain_of

NEEDED = [1.50, 1.52, 1.48]


@pytest.mark.parametrize(
    ("accepted", "text"),
    [
        ([1.79, 1.83, 1.78], "pays, +19.3%"),
        ([1.20, 1.21, 1.19], "loses by 20.0%"),
        ([1.30, 2.10, 1.60], "+6.7% (no difference shown)"),
        ([1.80], "+20.0% (one repeat)"),
    ],
)
def test_gain_is_shown_where_its_interval_excludes_zero(accepted: list[float], text: str) -> None:
    gain = gain_of(zip(accepted, NEEDED, strict=False))
    assert gain is not None
    assert str(gain) == text
    if len(accepted) > 1:
        ends = stats.ttest_rel(accepted, NEEDED).confidence_interval(0.95)
        assert gain.interval is not None
        assert (gain.interval.low, gain.interval.high) == pytest.approx((ends.low, ends.high))
    assert gain.loses() == text.startswith("loses")


def test_gain_needs_both_numbers() -> None:
    for pair in ((1.0, math.nan), (math.nan, 1.0), (None, 1.0), (1.0, None)):
        assert gain_of([pair]) is None
    gain = gain_of([(1.5, 1.2), (None, 1.2)])
    assert str(gain) == "+25.0% (one repeat)"


def test_simulated_without_acceptance_only_the_break_even_counts() -> None:
    gain = gain_of([(1.0, 1.5)], simulated=1.0)
    assert gain is not None
    assert str(gain) == "break-even 1.50"
    assert not gain.loses()
