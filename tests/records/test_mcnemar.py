"""The exact McNemar test and its power match enumeration."""

from __future__ import annotations

from itertools import product
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import make_report

from specbatch.records.mcnemar import Changes, changes, detectable_drop, found_with


def some(lost: int, gained: int, n: int = 100) -> Changes:
    return Changes(n, n // 2, tuple(range(lost)), tuple(range(lost, lost + gained)))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 4), (5, 0), (4, 1), (3, 3), (7, 2), (2, 9)])
def test_p_values_match_enumeration(lost, gained):
    """Over all outcomes of the changed questions, each equally likely."""
    ways = [sum(way) for way in product((0, 1), repeat=lost + gained)]
    found = some(lost, gained)
    assert found.p_fallen() == pytest.approx(sum(way >= lost for way in ways) / len(ways))
    far = abs(lost - (lost + gained) / 2)
    two = sum(abs(way - (lost + gained) / 2) >= far for way in ways) / len(ways)
    assert found.p_changed() == pytest.approx(two)


@given(st.integers(0, 40), st.integers(0, 40))
def test_interval_contains_zero_unless_the_test_is_significant(lost, gained):
    found = some(lost, gained)
    low, high = found.interval()
    assert low <= found.delta <= high
    assert (low <= 0 <= high) == (found.p_changed() >= 0.05)
    mirrored = some(gained, lost).interval()
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-12)
    assert -found.changed / found.n - 1e-12 <= low
    assert found.right_after - found.right_before == gained - lost


def chance(n: int, lose: float, gain: float, alpha: float) -> float:
    """The power, from the trinomial distribution and the test itself."""
    total = 0.0
    for lost in range(n + 1):
        for gained in range(n + 1 - lost):
            p = sum(comb(lost + gained, k) for k in range(lost, lost + gained + 1)) / 2 ** (lost + gained)
            if p <= alpha:
                ways = comb(n, lost) * comb(n - lost, gained)
                total += ways * lose**lost * gain**gained * (1 - lose - gain) ** (n - lost - gained)
    return total


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 16), st.floats(0, 0.3), st.floats(0, 0.4), st.sampled_from([0.01, 0.05, 0.2]))
def test_power_matches_enumeration(n, churn, drop, alpha):
    assert found_with(n, churn, drop, alpha=alpha) == pytest.approx(chance(n, churn + drop, churn, alpha), abs=1e-9)


@pytest.mark.parametrize(("n", "churn"), [(12, 0.0), (15, 1 / 30), (20, 0.1), (16, 0.25)])
def test_detectable_drop_is_the_smallest(n, churn):
    powers = [chance(n, churn + drop / n, churn, 0.05) for drop in range(int(n * (1 - 2 * churn)) + 1)]
    first = next((drop for drop, power in enumerate(powers) if power >= 0.8), None)
    assert detectable_drop(n, churn, alpha=0.05, power=0.8) == (None if first is None else first / n)


def test_no_power_without_questions():
    assert detectable_drop(4, 0.0, alpha=0.05, power=0.8) is None  # all four lost is p = 1/16
    assert detectable_drop(5, 0.0, alpha=0.05, power=0.8) == 1.0
    assert detectable_drop(3, 0.5, alpha=0.05, power=0.8) is None
    big = detectable_drop(1319, 9 / 1319, alpha=0.05, power=0.8)
    assert big is not None
    assert 0.005 < big < 0.02


def test_repeats_of_a_question_count_once():
    report = make_report("1100")
    report.questions.extend([row | {"repeat": 1} for row in report.questions])
    assert changes(report, report, "loose", "match").n == 4


def test_p_value_of_alpha_passes_and_is_no_detection():
    five = Changes(40, 20, lost=tuple(range(5)))
    assert five.p_fallen() == 1 / 32  # the gate passes at equality
    found = detectable_drop(40, 0, alpha=1 / 32, power=0.8)
    assert found == detectable_drop(40, 0, alpha=1 / 33, power=0.8) > detectable_drop(40, 0, alpha=1 / 31, power=0.8)
