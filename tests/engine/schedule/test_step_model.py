"""Predicted times of decode steps: between the measured batch sizes, with cached tokens, and corrected by a run."""

from __future__ import annotations

import pytest

from specbatch.engine.schedule.step_model import StepModel

TIMES = {1: {0: 4.0, 2: 5.0}, 8: {0: 4.7, 2: 6.4}, 32: {0: 7.1, 2: 16.0}}
PER_TOKEN = {size: {0: 1e-3, 2: 2e-3} for size in TIMES}


def model() -> StepModel:
    return StepModel([1, 8, 16, 32], TIMES, PER_TOKEN)


def test_times_are_linear_between_batches_and_in_cached_tokens() -> None:
    found = model()
    assert found.kind(5, 2) == (8, 2, 8)
    assert found.kind(9, 0) == (16, 0, 0)
    assert found.expected((1, 0, 0), 0) == 4.0
    assert found.expected((8, 2, 8), 500) == pytest.approx(6.4 + 1.0)
    assert found.expected((16, 0, 0), 100) == pytest.approx(4.7 + 2.4 * 8 / 24 + 0.1)


def test_a_step_in_which_some_draft_is_between_none_and_all() -> None:
    """With few it takes what drafting takes at all; with all what a step of all takes."""
    found = model()
    kinds = [found.kind(32, 2, drafting) for drafting in (1, 8, 16, 31)]
    times = [found.expected(kind, 1000) for kind in kinds]
    plain, whole = found.expected((32, 0, 0), 1000), found.expected((32, 2, 32), 1000)
    assert times[0] == pytest.approx(plain + 1.0 + (whole - plain - 1.0) / 32)
    assert plain < times[0] < times[1] < times[2] < times[3] < whole
    assert found.kind(32, 2, 32) == found.kind(32, 2)


def test_steps_correct_all_times_of_their_batch_and_probes_their_own() -> None:
    found = model()
    plain, drafting = found.kind(8, 0), found.kind(8, 2)
    for _ in range(50):
        found.observe(plain, found.expected(plain, 0), 4.7 * 1.1)
    for kind in (plain, drafting):  # a slower clock
        assert found.seconds(kind, 0) == pytest.approx(1.1 * found.expected(kind, 0), rel=0.01)
    assert found.seconds((32, 0, 0), 0) == pytest.approx(1.1 * 7.1, rel=0.01)  # that of the nearest batch
    for _ in range(6):
        found.observe(drafting, found.expected(drafting, 0), 6.4 * 1.1 * 1.2, probing=True)
    assert found.seconds(drafting, 0) == pytest.approx(6.4 * 1.1 * 1.2, rel=0.02)
    assert found.seconds(plain, 0) == pytest.approx(4.7 * 1.1, rel=0.01)


def test_the_first_steps_of_another_kind_correct_its_own_time() -> None:
    """After a change of what is drafted; after that it shows what changes all times."""
    found = model()
    plain, drafting = found.kind(8, 0), found.kind(8, 2)
    found.observe(plain, 4.7, 4.7)
    for _ in range(8):
        found.observe(drafting, 6.4, 6.4 * 1.3)
    assert found.seconds(drafting, 0) == pytest.approx(6.4 * 1.3, rel=0.01)
    assert found.seconds(plain, 0) == pytest.approx(4.7)
    for _ in range(60):
        found.observe(drafting, 6.4, 6.4 * 1.3 * 0.9)
    assert found.seconds(plain, 0) == pytest.approx(4.7 * 0.9, rel=0.01)


def test_an_outlier_counts_as_twice_the_time_at_most() -> None:
    found = model()
    found.observe((8, 0, 0), 4.7, 4.7)
    found.observe((8, 0, 0), 4.7, 1e6)
    assert found.seconds((8, 0, 0), 0) == pytest.approx(4.7 * 2 ** (1 / 8))
