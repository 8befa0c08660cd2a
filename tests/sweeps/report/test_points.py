"""Points of a sweep. The gain by steps: its interval over repeats is that of `specbatch compare`."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from specbatch.sweeps.report.points import gain_of

NEEDED = [1.50, 1.52, 1.48]


@pytest.mark.parametrize(
    ("accepted", "text"),
    [
        ([1.79, 1.83, 1.78], "1.20 (1.19-1.21) pays"),
        ([1.20, 1.21, 1.19], "0.80 (0.79-0.81) loses"),
        ([1.30, 2.10, 1.60], "1.09 (0.61-1.95) undecided"),
        ([1.80], "1.20 (one repeat) one repeat"),
    ],
)
def test_gain_is_shown_where_its_interval_excludes_one(accepted: list[float], text: str) -> None:
    gain = gain_of(zip(accepted, NEEDED, strict=False))
    assert gain is not None
    assert f"{gain.speedup} {gain.speedup.verdict}" == text
    if len(accepted) > 1:
        logs = [math.log(ours / needed) for ours, needed in zip(accepted, NEEDED, strict=True)]
        ends = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
        found = [gain.speedup.low, gain.speedup.high]
        assert found == pytest.approx([math.exp(ends.low), math.exp(ends.high)])
    assert gain.loses() == text.endswith("loses")


def test_gain_needs_both_numbers() -> None:
    for pair in ((1.0, math.nan), (math.nan, 1.0), (None, 1.0), (1.0, None)):
        assert gain_of([pair]) is None
    gain = gain_of([(1.5, 1.2), (None, 1.2)])
    assert str(gain and gain.speedup) == "1.25 (one repeat)"


def test_simulated_without_acceptance_only_the_break_even_counts() -> None:
    gain = gain_of([(1.0, 1.5)], simulated=1.0)
    assert gain is not None
    assert gain.needed == 1.5
    assert not gain.loses()
