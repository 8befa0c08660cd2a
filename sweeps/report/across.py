"""Short tables of sweeps that differ in one thing: a column for each of them, accept lengths and speedups as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import markdown_table
from specbatch.records.verdicts import Speedup

LEAST = 3  # columns; with fewer the long tables are as short


def across_markdown(title: str, lengths: Mapping[tuple[Any, ...], Mapping[str, str]],
                    speedups: Mapping[str, Mapping[tuple[Any, ...], Speedup]]) -> str:  # fmt: skip
    """Both tables; empty with fewer than `LEAST` parts, and a table without rows is left out.

    title     what the parts differ in
    lengths   texts of accept lengths by (concurrency, configuration), and by the label of the part
    speedups  by the label of the part, and by (concurrency, configuration)
    """
    if len(speedups) < LEAST:
        return ""
    labels = [*speedups]
    ratios: dict[tuple[Any, ...], dict[str, str]] = {}
    for label, found in speedups.items():
        for place, one in found.items():
            ratios.setdefault(place, {})[label] = str(one)
    both = (("Accept length", lengths), ("Speedup over the baseline of the same column", ratios))
    return "\n".join(
        f"{what} by {title} ({CONFIDENCE:.0%} interval):\n\n{across_table(rows, labels)}\n"
        for what, rows in both
        if rows
    )


def across_table(rows: Mapping[tuple[Any, ...], Mapping[str, str]], labels: Iterable[str]) -> str:
    """A row for each (concurrency, configuration), and a column for each label."""
    body = [[*map(str, place), *(cells.get(label, "-") for label in labels)] for place, cells in rows.items()]
    return markdown_table(body, ["requests", "config", *labels])
