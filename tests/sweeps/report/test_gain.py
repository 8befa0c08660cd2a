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
        ([1.79, 1.83, 1.78], "1.20 (1.18-1.22) pays"),
        ([1.20, 1.21, 1.19], "0.80 (0.78-0.82) loses"),
        ([1.30, 2.10, 1.60], "1.11 (0.46-1.76) undecided"),
        ([1.80], "1.20 (one repeat) one repeat"),
    ],
)
def test_gain_is_shown_where_its_interval_excludes_zero(accepted: list[float], text: str) -> None:
    gain = gain_of(zip(accepted, NEEDED, strict=False))
    assert gain is not None
    assert f"{gain.speedup} {gain.speedup.verdict}" == text
    if len(accepted) > 1:
        ends = stats.ttest_rel(accepted, NEEDED).confidence_interval(0.95)
        found = [(end - 1) * gain.needed for end in (gain.speedup.low, gain.speedup.high) if end is not None]
        assert found == pytest.approx([ends.low, ends.high])
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
