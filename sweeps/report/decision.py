"""The decision table of a sweep: for each point its speedup with interval and verdict, and a few numbers beside it.

    requests in flight (the concurrency), configuration, speedup, output tok/s, accept length, TTFT, TPOT, verdict

It is what `sweep` and `bench` print and what `summary.md` begins with. The table of all columns is `tables.shown`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbatch.records.estimates import CONFIDENCE
from specbatch.records.metrics import METRICS, RELATIVE
from specbatch.records.verdicts import ONE_REPEAT, Speedup

if TYPE_CHECKING:
    import pandas as pd

    from specbatch.sweeps.report.tables import View

INTERVAL = f"({CONFIDENCE:.0%} interval)"
VERDICT = "verdict"
FAILED = "failed"
_SHORT = {"concurrency": "requests in flight", "configuration": "config"}  # so that the table fits 80 columns


def decision(rows: pd.DataFrame, view: View, size: str, over: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, from the rows of `tables.table`; columns in which nothing was measured are left out.

    size: the column of `rows` that comes first. over: the base of each configuration.
    """
    measured = [METRICS[key] for key in view.brief if rows[key].notna().any()]
    compared = bool(rows.ratio_verdict.notna().any())
    headings = [_SHORT.get(size, size.replace("_", " ")), _SHORT["configuration"]]
    headings += [ratio_heading(view, over)] if compared else []
    headings += [metric.heading for metric in measured]
    headings += [VERDICT] if compared and view.judges else []
    body: list[list[str]] = []
    each: list[Any] = list(rows.itertuples())
    for row in each:
        cells = [str(getattr(row, size)), row.configuration]
        cells += [speedup_text(row, "ratio", bare=view.judges)] if compared else []
        cells += [metric.text(getattr(row, metric.key)) for metric in measured]
        cells += [verdict_text(row, "ratio")] if compared and view.judges else []
        body.append(cells)
    return headings, body


def ratio_heading(view: View, over: Mapping[str, str]) -> str:
    """The speedup of output tok/s, or the ratio of what the view compares; over which base, if there is only one."""
    compared, [base, *others] = METRICS[view.ratio], {*over.values()}
    what, to = ("speedup", "over") if compared is METRICS["output_throughput"] else (f"ratio of {compared.title}", "to")
    return f"{what} {INTERVAL}" if others else f"{what} {to} {base} {INTERVAL}"


def speedup_text(row: Any, column: str, *, bare: bool = False) -> str:
    """The cell of a ratio that `tables.table` has in `column`, with its interval: "1.83 (1.77-1.89)", "1.83 (one
    repeat)", or "1.83" if such a ratio is to be bare."""
    ratio, low, high = (getattr(row, column + end) for end in ("", "_low", "_high"))
    verdict = getattr(row, f"{column}_verdict")
    if math.isnan(ratio) or not isinstance(verdict, str):  # that of the baseline itself
        return RELATIVE[column].text(ratio)
    ends = [None if math.isnan(end) else end for end in (low, high)]
    found = Speedup(ratio, ends[0], ends[1], verdict, row.repeats)
    return RELATIVE[column].text(ratio) if bare and verdict == ONE_REPEAT else str(found)


def break_even_text(row: Any) -> str:
    """The break-even accept length, with its interval over several repeats."""
    middle, *ends = (RELATIVE["break_even"].text(getattr(row, f"break_even{end}")) for end in ("", "_low", "_high"))
    return middle if "-" in ends else f"{middle} ({'-'.join(ends)})"


def verdict_text(row: Any, column: str) -> str:
    """The verdict on a ratio, or that the point failed; "-" where there is none, as for the baseline."""
    verdict = getattr(row, f"{column}_verdict")
    if isinstance(row.failed, str) and not row.repeats:
        return FAILED
    return verdict if isinstance(verdict, str) else "-"
