"""t intervals at a fixed number of runs, confidence sequences, and Holm's correction."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from crossed import crossed
from scipy import stats
from scipy.integrate import quad

from specbatch.records.estimates import Estimate, holm


def of(values: np.ndarray, *, anytime: bool = False) -> Estimate:
    error = values.std(ddof=1) / math.sqrt(len(values))
    return Estimate(values.mean(), error, len(values) - 1, anytime)


def test_fixed_interval_and_p_value_are_those_of_the_t_test() -> None:
    values = np.array([0.3, 0.5, 0.1, 0.4])
    test = stats.ttest_1samp(values, 0.2)
    assert of(values).p_value(0.2) == pytest.approx(test.pvalue)
    assert of(values).ends() == pytest.approx(tuple(stats.ttest_1samp(values, 0).confidence_interval(0.95)))


@pytest.mark.parametrize("runs", [3, 4, 10, 50])
def test_sequence_excludes_what_its_p_value_rejects(runs: int) -> None:
    found = Estimate(1.0, 0.1, runs - 1, anytime=True)
    low, high = found.ends() or (0, 0)
    assert (found.p_value(low), found.p_value(high)) == pytest.approx((0.05, 0.05))
    plain = Estimate(1.0, 0.1, runs - 1).ends()
    assert plain is not None
    assert low < plain[0]


def test_two_runs_have_no_sequence() -> None:
    found = Estimate(1.0, 0.1, 1, anytime=True)
    assert found.ends() is None
    assert found.p_value(0.0) > 0.05


@pytest.mark.parametrize("runs", [2, 3, 8, 30])
def test_evidence_against_the_truth_is_1_on_average(runs: int) -> None:
    """So by Ville's inequality it exceeds 20 at any number of runs with a probability of at most 5%."""
    share = 0.1 / (runs + 0.1)

    def evidence(t: float) -> float:
        q = t * t / (runs - 1)
        return math.sqrt(share) * ((1 + q) / (1 + share * q)) ** (runs / 2)

    for t in (0.5, 3.0, 9.0):
        assert Estimate(t, 1.0, runs - 1, anytime=True).p_value(0.0) == pytest.approx(min(1.0, 1 / evidence(t)))
    weighted = lambda t: evidence(t) * stats.t.pdf(t, runs - 1)  # noqa: E731
    average = 2 * sum(quad(weighted, start, end)[0] for start, end in pairwise((0, 1, 10, 100, 1e4, np.inf)))
    assert average == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("noise", "least"), crossed([0.005, 0.01, 0.02, 0.03], [2, 3, 5]))
def test_intervals_hold_where_runs_are_added_until_they_are_narrow(noise: float, least: int) -> None:
    """Of 1000 sweeps that add rounds until ±2% is known, or 10 have run. The t interval misses up to 12%."""
    draw, outside = np.random.default_rng(2), 0
    for values in draw.normal(0, noise * math.sqrt(2), (1000, 10)):
        for runs in range(least, 11):
            ends = of(values[:runs], anytime=True).ends()
            if ends is not None and ends[1] - ends[0] <= 0.04:
                break
        outside += ends is not None and not ends[0] <= 0 <= ends[1]
    assert outside <= 50


def test_runs_that_would_decide() -> None:
    found = Estimate(-0.2, 0.1, 2)
    needed = found.units_for(-0.1, 0.05, 3)
    assert needed is not None
    assert Estimate(-0.2, 0.1 * math.sqrt(3 / needed), needed - 1).p_value(-0.1) < 0.05
    assert Estimate(-0.2, 0.1 * math.sqrt(3 / (needed - 1)), needed - 2).p_value(-0.1) >= 0.05
    assert found.units_for(-0.2, 0.05, 3) is None
    assert found.units_for(-0.2 + 1e-6, 0.05, 3) is None  # more than a million


def test_without_variance_the_difference_decides() -> None:
    found = Estimate(1.0, 0.0, 2)
    assert (found.ends(), found.p_value(1.0), found.p_value(0.9)) == ((1.0, 1.0), 1.0, 0.0)


def test_holm_corrects_step_by_step() -> None:
    assert holm([0.0004, 0.2, 0.0001]) == pytest.approx([0.0008, 0.2, 0.0003])
    assert holm([0.02, 0.03, 0.01]) == pytest.approx([0.04, 0.04, 0.03])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("runs", [3, 5, 20])
def test_detectable_effect_is_found_with_its_power(runs: int) -> None:
    """The definition takes the t distribution for the noncentral one, which is near even for three runs."""
    least = Estimate(0.0, 1 / math.sqrt(runs), runs - 1).detectable()
    values = np.random.default_rng(0).normal(least, 1, (4000, runs))
    found = np.mean(stats.ttest_1samp(values, 0, axis=1).pvalue < 0.05)
    assert 0.75 < found < 0.86
    assert Estimate(0.3, 0.0, 4).detectable() == 0
    assert Estimate(0.0, 0.1, 2, anytime=True).detectable() > Estimate(0.0, 0.1, 2).detectable()
