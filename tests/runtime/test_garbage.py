"""Thresholds of the garbage collector while requests run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from specbatch import Engine, SamplingParams
from specbatch.runtime.garbage import RareCollections


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    """Thresholds that nothing else uses, until the end of the test."""
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_full_collections_are_rare_until_the_last_one_leaves(usual: tuple[int, int, int]) -> None:
    rare = RareCollections()
    with rare:
        with rare:
            within = gc.get_threshold()
        assert gc.get_threshold() == within
        assert within[2] > 50 * usual[2]
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("own", [(900, 5, 5), (0, 5, 5)])
def test_thresholds_that_someone_sets_meanwhile_stay(own: tuple[int, int, int]) -> None:
    with RareCollections():
        gc.set_threshold(*own)
    assert gc.get_threshold() == own


def test_an_application_without_collections_is_left_alone() -> None:
    gc.set_threshold(0, 10, 10)
    with RareCollections():
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)


def test_a_stream_uses_them_until_it_is_closed(
    toy: Any, toy_engine: Callable[..., Engine], usual: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has thresholds of its own: streams of other tests may still be open."""
    monkeypatch.setattr("specbatch.engine.engine.rare_collections", RareCollections())
    engine = toy_engine()
    with closing(engine.stream([list(toy.prompts()[3])], SamplingParams(max_new_tokens=9))) as events:
        next(events)
        assert gc.get_threshold() != usual
    assert gc.get_threshold() == usual
