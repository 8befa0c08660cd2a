"""Units in the last place, the sign-flip test with its tolerance, and the bound of a single token."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specbatch.sweeps.check.verdict import ALPHA, POWER, Places, bound_of, excess, noise_of, sign_flip_test


@pytest.mark.parametrize(
    ("scale", "dtype", "unit"),
    [
        (16.0, "bfloat16", 0.125),
        (31.9, "bfloat16", 0.125),
        (32.0, "bfloat16", 0.25),
        (20.0, "float16", 2.0**-6),
        (0.75, "float32", 2.0**-24),
    ],
)
def test_units_in_the_last_place(scale: float, dtype: str, unit: float) -> None:
    assert Places([], [scale, scale], []).units([3 * unit, 0.0], dtype) == [3.0, 0.0]


@pytest.mark.parametrize("count", [2, 5, 14, 30])
def test_sign_flip_test_is_the_permutation_test(count: int) -> None:
    drawn = np.random.default_rng(count).normal(0.4, 1, count)
    expected = stats.permutation_test(
        (drawn,), np.mean, permutation_type="samples", alternative="greater", n_resamples=20_000, rng=1
    ).pvalue
    assert sign_flip_test(np.array([*drawn, 0.0, 0.0])) == pytest.approx(expected, abs=0.01 if count > 14 else 1e-9)


def test_more_than_the_tolerance_is_found_and_less_is_not() -> None:
    random = np.random.default_rng(3)
    baseline = random.gamma(20, 0.001, 32)
    for factor, found in ((1.0, False), (1.1, False), (1.5, True)):
        test = excess(baseline.tolist(), (factor * random.permutation(baseline)).tolist(), "bfloat16")
        assert test is not None
        assert test.is_found == found
    assert excess([0.1], [0.2], "bfloat16") is None


def test_rounding_in_float32_is_no_excess() -> None:
    means = [1e-6 * number for number in range(1, 33)]
    far = excess(means, [mean + 5e-5 for mean in means], "float32")
    assert far is not None
    assert not far.is_found
    assert excess(means, [mean + 5e-5 for mean in means], "bfloat16").is_found  # type: ignore[union-attr]


def test_smallest_detectable_difference_is_found_as_often_as_promised() -> None:
    random, found, runs = np.random.default_rng(5), 0, 60
    baseline = np.full(40, 0.02)
    known = excess(baseline.tolist(), (baseline + random.normal(0, 0.004, 40)).tolist(), "bfloat16")
    assert known is not None
    assert known.smallest is not None
    for _ in range(runs):
        noisy = baseline + known.smallest + random.normal(0, 0.004, 40)
        test = excess(baseline.tolist(), noisy.tolist(), "bfloat16")
        assert test is not None
        found += test.is_found
    assert abs(found / runs - POWER) < 0.25
    assert ALPHA == 0.001


def test_bound_follows_the_second_noisiest_prompt() -> None:
    assert bound_of(noise_of([0.5, 1.5, 0.0]), "bfloat16") == 8
    assert bound_of(noise_of([50.0, 3.0, 0.0, 90.0]), "bfloat16") == 200
    assert [noise_of([7.0, 0.5]), noise_of([7.0]), noise_of([])] == [0.5, 7.0, 0.0]
    assert bound_of(0.0, "float32") == 512
