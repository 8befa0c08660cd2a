"""Summarizes a sweep in sentences: how much faster than the baseline, or the first one, each configuration is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specbatch.records.intervals import Interval

if TYPE_CHECKING:
    import pandas as pd


def conclusion(rows: pd.DataFrame, base: str | None, differences: Mapping[tuple[Any, ...], Interval]) -> list[str]:
    """One sentence for each concurrency, from the rows of `tables.table`; none for a single configuration.

    base: the configuration that the ratios are over. differences: the interval of output tok/s less that of `base`, by
    (concurrency, configuration), as `compare` has it. A difference is shown if its interval excludes zero.
    """
    every: list[Any] = list(rows.itertuples())
    compared = [row for row in every if row.configuration != base and not math.isnan(row.ratio)]
    other = "the baseline" if base == "baseline" else str(base)
    sentences = []
    for concurrency in dict.fromkeys(row.concurrency for row in compared):
        parts = ", ".join(
            _part(row, other, differences.get((concurrency, row.configuration)))
            for row in compared
            if row.concurrency == concurrency
        )
        sentences.append(f"Concurrency {concurrency}, output tok/s: {parts}.")
    return [*sentences, *_caveat(compared)]


def _part(row: Any, base: str, difference: Interval | None) -> str:
    if row.repeats < 2:
        return f"{row.configuration} is {row.ratio:.2f} times {base}"
    spread = f"{row.ratio_min:.2f}-{row.ratio_max:.2f}"
    if difference is None or not difference.excludes_zero:
        return f"no difference is shown between {row.configuration} and {base} (ratio {spread})"
    return f"{row.configuration} is {row.ratio:.2f} times {base} ({spread})"


def _caveat(compared: list[Any]) -> Iterator[str]:
    if any(row.repeats < 2 for row in compared):
        yield "One repeat does not show how much a ratio varies; use --repeats 3."
