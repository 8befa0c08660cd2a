"""Parameter combinations: full products for slow tests, small covering subsets for quick ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest

only_quick = False  # whether slow cases are deselected, so that they need not be made


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values, for `parametrize`; a plain tuple holds several arguments. All but a
    diagonal are slow: it has as many combinations as the longest axis has values, and each value of every axis."""
    values = [list(axis) for axis in axes]
    diagonal = {tuple(place % len(axis) for axis in values) for place in range(max(map(len, values)))}
    return _params(
        ([axis[place] for axis, place in zip(values, places, strict=True)], places in diagonal)
        for places in itertools.product(*(range(len(axis)) for axis in values))
    )


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but the `quick` ones are slow."""
    return _params(([value], value in quick) for value in values)


def first_quick(count: int, values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but the first `count` are slow; a plain tuple holds several arguments."""
    return _params(([value], place < count) for place, value in enumerate(values))


def _params(cases: Iterable[tuple[list[Any], bool]]) -> list[Any]:
    """cases: values, and whether they are quick. Slow ones that are not run are left out, where others are left."""
    made = [(_spread(values), is_quick) for values, is_quick in cases]
    leaves_out = only_quick and any(is_quick for _, is_quick in made)
    return [
        pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
        for values, is_quick in made
        if is_quick or not leaves_out
    ]


def _spread(values: list[Any]) -> list[Any]:
    return [*itertools.chain.from_iterable(value if type(value) is tuple else (value,) for value in values)]
