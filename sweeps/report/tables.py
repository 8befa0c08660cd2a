"""The tables of a sweep, made from the records on disk alone: the decision table, that of all columns, summary.csv and
summary.md.

A number is the mean over repeats, and a latency that of the requests of all repeats; the first one also has its minimum
and maximum. `ratio` and `step_ratio` have an interval and a verdict. A `View` chooses the numbers; columns in which
nothing was measured are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.files.atomic_file import write_atomic
from specbatch.records.bases import bases_sentence
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.intervals import of_ratios
from specbatch.records.markdown import markdown_table
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS, RELATIVE
from specbatch.records.reasoning import PARTS, parts_of, parts_table, reasons
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import Point, unfinished
from specbatch.records.verdicts import ONE_REPEAT, Speedup
from specbatch.sweeps.report.acceptance import acceptance, server_acceptance
from specbatch.sweeps.report.groups import categories
from specbatch.sweeps.report.heading import about, heading
from specbatch.sweeps.report.notes import GENERAL, notes
from specbatch.sweeps.report.points import (
    POINT,
    SWEEP,
    View,
    bases,
    break_evens,
    gains_of,
    load_records,
    points_of,
    precision_of,
    run_of,
    speedups_of,
    wanted_precision,
)
from specbatch.sweeps.report.sentences import conclusion, precision_sentences

if TYPE_CHECKING:
    import pandas as pd


Column = tuple[str, Callable[[Any], str]]  # heading, and the cell of a row
Cells = tuple[list[str], list[list[str]]]  # headings, rows
INTERVAL = f"({CONFIDENCE:.0%} interval)"
VERDICT = "verdict"
FAILED = "failed"
_SHORT = {"concurrency": "requests in flight", "configuration": "config"}  # so that the table fits 80 columns
_OF_ARRIVALS = "mean_queue_s"  # in a closed loop it is part of the load that was chosen
_BRIEF = ["model", "device", "replicas", "dtype", "workload", "arrivals", "objectives"]  # of the heading


def write_summary(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown."""
    records = load_records(folder)
    rows = table(records)
    text = markdown(records, rows, unfinished(folder))
    write_atomic(folder / "summary.csv", rows.to_csv(index=False))
    write_atomic(folder / "summary.md", text)
    return text


def markdown(
    records: list[RunRecord], rows: pd.DataFrame, missing: Sequence[Point] = (), *, brief: bool = False
) -> str:
    """Heading, decision table and a conclusion; the table of all columns, acceptance and categories; and notes.

    missing: points of the sweep without a record. brief: for the console, without the tables after the conclusion, the
    notes that explain them, and most of the heading.
    """
    over = bases(records)
    headings, body = decision(rows, SWEEP, "concurrency", over)
    lines, every = about(records), notes(records, rows, missing, keys=SWEEP.brief if brief else SWEEP.keys)
    parts = [
        heading({name: lines[name] for name in _BRIEF if name in lines} if brief else lines),
        f"{markdown_table(body, headings)}\n",
        "".join(f"{sentence}\n" for sentence in _sentences(records, over)),
    ]
    if not brief:
        headings, body = shown(rows, over)
        parts.append(f"## All columns\n\n{markdown_table(body, headings)}\n")
        parts += [acceptance(records), server_acceptance(points_of(records)), reasoning(records), categories(records)]
    parts.append("".join(f"* {note}\n" for note in every if not brief or note.text not in GENERAL))
    return "\n".join(filter(None, parts))


def _sentences(records: list[RunRecord], over: Mapping[str, str]) -> list[str]:
    """What is compared with what, if that is not the same for all; the conclusion; and how exactly the ratios are known
    if that was asked for."""
    sentences = [*filter(None, [bases_sentence(over)]), *conclusion(speedups_of(records), over)]
    wanted = wanted_precision(records)
    return sentences + (precision_sentences(precision_of(records), wanted) if wanted else [])


def table(records: list[RunRecord], view: View = SWEEP) -> pd.DataFrame:
    """One row per concurrency and configuration, with the numbers of the CSV.

    repeats: those that were measured; failed: why another one was not; base: the configuration that the row is compared
    with, where not all rows have the same.
    """
    import pandas as pd

    first, *_ = columns = view.columns
    points, over, needed = points_of(records), bases(records), break_evens(records, view)
    runs = pd.DataFrame(
        {
            **{key: record.workload[key] for key in (*POINT, "repeat")},
            "simulated_accept_length": record.simulated_accept_length,
            "simulated_acceptance": record.simulated_acceptance,
            "failed": record.error,
            **{column: _or_nan(metric.read(record)) for column, metric in view.columns.items()},
            "break_even": _or_nan(needed.get(run_of(record))),
        }
        for record in chain(*points.values())
    )
    groups = runs.groupby([*POINT], sort=False)
    rows = groups[[*columns]].mean()
    for column, metric in columns.items():
        if metric.part:
            rows[column] = [_or_nan(metric.over_repeats(points[point])) for point in rows.index]
    if _OF_ARRIVALS in columns and not any(record.workload.get("request_rate") for record in records):
        rows[_OF_ARRIVALS] = math.nan
    rows.insert(0, "repeats", groups.failed.agg(lambda reasons: int(reasons.isna().sum())))
    rows.insert(0, "simulated_acceptance", groups.simulated_acceptance.first())
    rows.insert(0, "simulated_accept_length", groups.simulated_accept_length.first())
    rows[f"{first}_min"], rows[f"{first}_max"] = groups[first].min(), groups[first].max()
    added = wanted_precision(records) is not None
    middles = [of_ratios(list(values.dropna()), anytime=added) for _, values in groups.break_even]
    for place, end in enumerate(("", "_low", "_high")):
        rows[f"break_even{end}"] = [_or_nan(numbers[place]) for numbers in middles]
    gains, speedups = gains_of(records, view), speedups_of(records, view)
    by_steps = {point: gain.speedup for point, gain in gains.items() if gain and not gain.measures_step}
    for column, found in (("step_ratio", by_steps), ("ratio", speedups)):
        each = [found.get(point) for point in rows.index]
        rows[column] = [_or_nan(one.ratio if one else None) for one in each]
        rows[f"{column}_low"] = [_or_nan(one.low if one else None) for one in each]
        rows[f"{column}_high"] = [_or_nan(one.high if one else None) for one in each]
        rows[f"{column}_verdict"] = [one.verdict if one else None for one in each]
    compared = METRICS[view.ratio]
    of_base = [
        over[name] == name and compared.over_repeats(points[concurrency, name]) is not None
        for concurrency, name in rows.index
    ]
    if len(over) > 1:
        rows.loc[of_base, "ratio"] = 1.0
    if len({*over.values()}) > 1:
        rows["base"] = [over[name] for _, name in rows.index]
    if reasons(records):
        parts = [parts_of(points[point]) for point in rows.index]
        for key in PARTS:
            rows[key] = [_or_nan(found[key]) for found in parts]
    failures = {tuple(record.workload[key] for key in POINT): record.error for record in records if record.error}
    rows["failed"] = [failures.get(point) for point in rows.index]
    return rows.reset_index()


def as_json(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON values; None where nothing was measured."""
    clean = rows.astype(object).where(rows.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in clean.to_dict("records")]


def decision(rows: pd.DataFrame, view: View, size: str, over: Mapping[str, str]) -> Cells:
    """The decision table: for each point its speedup with interval and verdict, and a few numbers beside it. Columns in
    which nothing was measured are left out.

    rows: of `table`. size: the column of `rows` that comes first. over: the base of each configuration.
    """
    compared = bool(rows.ratio_verdict.notna().any())
    columns = _point_columns(_SHORT.get(size, size), size, _SHORT["configuration"])
    if compared:
        columns.append((ratio_heading(view, over), partial(speedup_text, column="ratio", bare=view.judges)))
    columns += [_column(METRICS[key]) for key in view.brief if rows[key].notna().any()]
    if compared and view.judges:
        columns.append((VERDICT, partial(verdict_text, column="ratio")))
    return _cells(rows, columns)


def shown(rows: pd.DataFrame, over: Mapping[str, str], view: View = SWEEP, size: str = "concurrency") -> Cells:
    """The table of all columns; arguments as for `decision`."""
    columns = _point_columns(size, size, "configuration")
    for place, (key, metric) in enumerate(view.columns.items()):
        if rows[key].notna().any():
            columns.append(_column(metric, has_spread=not place))
    if rows.break_even.notna().any():
        columns += [
            (f"{RELATIVE['break_even'].heading} {INTERVAL}", break_even_text),
            (f"{RELATIVE['step_ratio'].heading} {INTERVAL}", partial(speedup_text, column="step_ratio")),
            ("by steps", partial(verdict_text, column="step_ratio")),
        ]
    if rows.ratio.notna().any():
        columns.append((ratio_heading(view, over), partial(speedup_text, column="ratio")))
        if view.judges:
            columns.append((VERDICT, partial(verdict_text, column="ratio")))
    return _cells(rows, columns)


def _cells(rows: pd.DataFrame, columns: list[Column]) -> Cells:
    each: list[Any] = list(rows.itertuples())
    return [heading for heading, _ in columns], [[cell(row) for _, cell in columns] for row in each]


def _point_columns(heading: str, size: str, configuration: str) -> list[Column]:
    """The columns that name a point, with their headings."""
    return [
        (heading.replace("_", " "), lambda row: str(getattr(row, size))),
        (configuration, lambda row: str(row.configuration)),
    ]


def _column(metric: Metric, *, has_spread: bool = False) -> Column:
    """has_spread: whether a mean of several repeats also has its minimum and maximum, "1.50 (1.10-2.00)"."""

    def cell(row: Any) -> str:
        middle, *ends = (
            metric.text(getattr(row, metric.key + end)) for end in ("", *(("_min", "_max") if has_spread else ()))
        )
        return f"{middle} ({'-'.join(ends)})" if ends and middle != "-" and row.repeats > 1 else middle

    return metric.heading, cell


def ratio_heading(view: View, over: Mapping[str, str]) -> str:
    """The speedup of output tok/s, or the ratio of what the view compares; over which base, if there is only one."""
    compared, [base, *others] = METRICS[view.ratio], {*over.values()}
    what, to = ("speedup", "over") if compared is METRICS["output_throughput"] else (f"ratio of {compared.title}", "to")
    return f"{what} {INTERVAL}" if others else f"{what} {to} {base} {INTERVAL}"


def speedup_text(row: Any, *, column: str, bare: bool = False) -> str:
    """The cell of a ratio that `table` has in `column`, with its interval: "1.83 (1.77-1.89)", "1.83 (one
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


def verdict_text(row: Any, *, column: str) -> str:
    """The verdict on a ratio, or that the point failed; "-" where there is none, as for the baseline."""
    verdict = getattr(row, f"{column}_verdict")
    if isinstance(row.failed, str) and not row.repeats:
        return FAILED
    return verdict if isinstance(verdict, str) else "-"


def reasoning(records: list[RunRecord]) -> str:
    """The table of reasoning and answer; empty where no answer reasons."""
    found = parts_table(points_of(records), POINT)
    return f"{found}\n" if found else ""


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
