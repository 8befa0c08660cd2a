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


def precision_sentences(known: Mapping[tuple[Any, ...], float], wanted: float) -> list[str]:
    """One sentence for each concurrency: how exactly its ratios are known, and whether that is `wanted` (0.02: 2%).

    known: by (concurrency, configuration), as `tables.precision_of` has it.
    """
    sentences = []
    for concurrency in dict.fromkeys(number for number, _ in known):
        ours = {name: share for (number, name), share in known.items() if number == concurrency}
        reached = all(share <= wanted for share in ours.values())
        verdict = "within" if reached else "STILL NOT WITHIN"
        parts = ", ".join(f"{name} ±{100 * share:.2g}%" for name, share in ours.items())
        text = f"Concurrency {concurrency}: the 95% intervals of the ratios are {verdict} ±{100 * wanted:g}%: {parts}"
        sentences.append(f"{text}." if reached else f"{text}; a larger --most-repeats adds rounds.")
    return sentences
