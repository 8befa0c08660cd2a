"""Parameter combinations: full products for slow tests, small covering subsets for quick ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values, for `parametrize`; a plain tuple holds several arguments. All but a
    diagonal are slow: it has as many combinations as the longest axis has values, and each value of every axis."""
    values = [list(axis) for axis in axes]
    diagonal = {tuple(place % len(axis) for axis in values) for place in range(max(map(len, values)))}
    return [
        _param([axis[place] for axis, place in zip(values, places, strict=True)], is_quick=places in diagonal)
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but the `quick` ones are slow."""
    return [_param([value], is_quick=value in quick) for value in values]


def first_quick(count: int, values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but the first `count` are slow; a plain tuple holds several arguments."""
    return [_param([value], is_quick=place < count) for place, value in enumerate(values)]


def pairwise(
    *axes: Sequence[Any], apart: Collection[tuple[int, int]] = (), possible: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """A small subset of the product that covers every pair of values of two axes (pairwise testing).

    apart: pairs of axes that need no coverage; they still vary. possible: whether a combination is valid.
    Greedy and deterministic: takes the first missing pair and the combination that covers most, then the rarest values.
    """
    every = [item for item in itertools.product(*axes) if possible(*item)]
    places = [both for both in itertools.combinations(range(len(axes)), 2) if both not in apart]
    missing = dict.fromkeys((both, tuple(item[at] for at in both)) for item in every for both in places)
    met: dict[tuple[tuple[int, int], Any], int] = {}
    chosen: list[tuple[Any, ...]] = []
    while missing:
        both, pair = next(iter(missing))
        fitting = [item for item in every if tuple(item[at] for at in both) == pair]

        def worth(item: tuple[Any, ...]) -> tuple[int, int]:
            new = sum((both, tuple(item[at] for at in both)) in missing for both in places)
            old = sum(met.get((both, tuple(item[at] for at in both)), 0) for both in apart)
            return new, -old

        best = max(fitting, key=worth)
        chosen.append(best)
        for both in (*places, *apart):
            pair = tuple(best[at] for at in both)
            missing.pop((both, pair), None)
            met[both, pair] = met.get((both, pair), 0) + 1
    return chosen


def _param(values: list[Any], *, is_quick: bool) -> Any:
    spread = itertools.chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
    return pytest.param(*spread, marks=() if is_quick else pytest.mark.slow)
