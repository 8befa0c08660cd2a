"""Expected times of points: as measured, like the others, or by the fit over concurrencies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.progress.point_times import PointTimes, PointWork


def test_expected_times_are_measured_ones_where_there_are() -> None:
    times = PointTimes()
    assert times.expected("a", 8) is None
    times.add(PointWork(4, 8, "a"), 2.0)
    times.add(PointWork(12, 8, "a"), 2.0)
    assert times.expected("a", 8) == 0.25
    assert times.having(PointWork(16, 8, "a"), 8.0).expected("a", 8) == 0.375
    assert times.expected("a", 8) == 0.25


def test_configurations_differ_by_the_nearest_concurrency_that_both_have() -> None:
    times = PointTimes()
    for name, size, seconds in (("a", 1, 4.0), ("b", 1, 8.0), ("a", 8, 2.0), ("b", 8, 1.0), ("a", 32, 0.5)):
        times.add(PointWork(1, size, name), seconds)
    assert times.expected("b", 32) == 0.25
    assert times.expected("c", 32) == 0.5  # nothing is known of it


@given(st.floats(0, 10), st.floats(0.01, 10), st.lists(st.integers(1, 256), min_size=2, max_size=5, unique=True))
def test_the_fit_finds_shared_and_own_time(own: float, shared: float, sizes: list[int]) -> None:
    times = PointTimes()
    for size in sizes:
        times.add(PointWork(1, size, "a"), own + shared / size)
    for size in (1, 3, 64, 512):
        assert times.expected("a", size) == pytest.approx(own + shared / size, rel=1e-3)


def test_one_concurrency_leaves_the_share_open() -> None:
    for marginal, expected in ((0.0, 1.0), (1.0, 8.0), (0.25, 8 * (0.25 + 0.75 / 8))):
        times = PointTimes(marginal)
        times.add(PointWork(2, 1, "a"), 16.0)
        assert times.expected("a", 8) == pytest.approx(expected)


def test_times_that_fall_faster_than_the_concurrency_rises() -> None:
    times = PointTimes()
    for size, seconds in ((1, 4.0), (2, 1.0)):
        times.add(PointWork(1, size, "a"), seconds)
    assert 0 < (times.expected("a", 64) or 0) < 0.1
