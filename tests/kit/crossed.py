"""Parameter combinations: full products for slow tests, small covering subsets for quick ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
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


def _param(values: list[Any], *, is_quick: bool) -> Any:
    spread = itertools.chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
    return pytest.param(*spread, marks=() if is_quick else pytest.mark.slow)
