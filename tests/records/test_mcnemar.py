"""The exact McNemar test and its power match enumeration."""

from __future__ import annotations

import math
from itertools import product
from math import comb

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_report

from specbatch.records.mcnemar import Changes, changes, detectable_drop, found_with, questions_for


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
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-9)
    assert -1 <= low < high <= 1
    assert found.right_after - found.right_before == gained - lost


@pytest.mark.parametrize("n", [1, 3, 40, 400])
def test_interval_of_unchanged_answers_has_the_width_that_their_number_allows(n):
    """Wilson's upper limit of a share of which none was seen; the exact one of 40 is 8.8%."""
    low, high = some(0, 0, n).interval()
    assert (-low, high) == pytest.approx((1.959964**2 / (n + 1.959964**2),) * 2)
    assert n != 40 or high == pytest.approx(1 - 0.025 ** (1 / 40), abs=0.001)


def test_interval_is_that_of_the_score_test():
    """Tango's statistic at both ends is that of 95%, the shares maximizing the likelihood found by a search."""
    found = some(12, 3, 50)
    for end in found.interval():
        shares = np.linspace(max(0, -end), (1 - end) / 2, 200_001)[1:-1]  # of lost answers
        likelihood = 12 * np.log(shares) + 3 * np.log(shares + end) + 35 * np.log(1 - 2 * shares - end)
        lost = shares[np.nanargmax(likelihood)]
        assert abs(3 - 12 - 50 * end) / math.sqrt(50 * (2 * lost + end * (1 - end))) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize(("lose", "gain"), [(0.0, 0.0), (0.02, 0.02), (0.06, 0.0), (0.1, 0.02), (0.15, 0.15)])
@pytest.mark.parametrize("n", [20, 40, 100])
def test_interval_contains_the_true_difference(n, lose, gain):
    draw, known = np.random.default_rng(5), {}
    for lost, gained, _ in draw.multinomial(n, [lose, gain, 1 - lose - gain], 2000).tolist():
        if (lost, gained) not in known:
            known[lost, gained] = [some(lost, gained, n).interval(), 0]
        known[lost, gained][1] += 1
    outside = sum(many for (low, high), many in known.values() if not low - 1e-9 <= gain - lose <= high + 1e-9)
    assert outside / 2000 < 0.065


@pytest.mark.parametrize(("drop", "churn"), [(0.05, 0.05), (0.05, 0.0), (0.3, 0.1), (0.01, 0.02)])
def test_questions_for_a_drop_are_the_fewest(drop, churn):
    n = questions_for(drop, churn, alpha=0.05, power=0.8)
    assert found_with(n, churn, drop, alpha=0.05) >= 0.8 > found_with(n - 1, churn, drop, alpha=0.05)


def test_no_number_of_questions_finds_a_tiny_drop():
    assert questions_for(0.0001, 0.2, alpha=0.05, power=0.8) is None


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


@examples(25)
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
