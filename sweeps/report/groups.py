"""Tables of a sweep by category of the prompts, and by turn of conversations, over the requests of all repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.acceptance import accept_change
from specbatch.sweeps.report.across import LEAST, across_table
from specbatch.sweeps.report.points import POINT, points_of
from specbatch.sweeps.report.sentences import DETECTABLE

NOTE = (
    f"Intervals are over prompts (jackknife), those of changes conversation by conversation. {DETECTABLE}: the "
    "smallest change that such an interval would have excluded with this probability."
)
_LATENCY = ("mean_ttft_s", "mean_tpot_s")
_INTERVAL = f"({CONFIDENCE:.0%} interval)"
_ACCEPT = f"accept length {_INTERVAL}"
_OF_GROUPS = (
    *("requests", "input tokens", "output tokens", _ACCEPT, "accept rate"),
    *(METRICS[key].heading for key in _LATENCY),
)


def categories(records: list[RunRecord]) -> str:
    """The tables in Markdown; empty where there are none."""
    found = []
    for headings, body in grouped_tables(records):
        found += [*_short(headings, body), f"{markdown_table(body, headings)}\n"]
    return "\n".join([*found, *([f"{NOTE}\n"] if found else [])])


def _short(headings: list[str], body: list[list[str]]) -> Iterator[str]:
    """Accept lengths and times per token with a column for each turn, where there are several turns."""
    turns = list(dict.fromkeys(row[2] for row in body))
    if headings[2] != "turn" or len(turns) < LEAST:
        return
    for what in (_ACCEPT, METRICS["mean_tpot_s"].heading):
        rows: dict[tuple[Any, ...], dict[str, str]] = {}
        for row in body:
            rows.setdefault(tuple(row[:2]), {})[row[2]] = row[headings.index(what)]
        yield f"By turn, {what}:\n\n{across_table(rows, turns)}\n"


def grouped_tables(records: list[RunRecord]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Headings and cells of these tables. The third column names the group. Tokens are the mean input and all output;
    of turns, the change of the accept length is that from the first turn of the same conversations."""
    for name in ("category", "turn"):
        body = []
        for point, repeats in points_of(records).items():
            groups = dict.fromkeys(row[name] for record in repeats for row in record.requests if name in row)
            first: list[RunRecord] = []
            for group in groups:
                own = [_of_group(record, name, group) for record in repeats]
                body.append([*map(str, point), str(group), *_cells(first, own, has_change=name == "turn")])
                first = first or own
        if body:
            change = (f"change from turn 1 {_INTERVAL}", DETECTABLE) if name == "turn" else ()
            yield [*POINT, name, *_OF_GROUPS, *change], body


def _of_group(record: RunRecord, name: str, group: Any) -> RunRecord:
    """The requests of a group, by their place among the prompts of the point."""
    count = record.workload["prompts"]
    rows = [row | {"index": row["index"] % count} for row in record.requests if row.get(name) == group]
    return replace(record, requests=rows)


def _cells(first: list[RunRecord], own: list[RunRecord], *, has_change: bool) -> list[str]:
    rows = [row for record in own for row in record.requests]
    places = {row["index"] for row in rows}
    first = [replace(one, requests=[row for row in one.requests if row["index"] in places]) for one in first]
    accepted, drafted, output, inputs = (
        sum(row.get(field) or 0 for row in rows) for field in ("accepted", "drafted", "output_tokens", "prompt_tokens")
    )
    change = accept_change(first if any(record.drafts for record in own) else [], own)
    return [
        str(len(rows)),
        f"{inputs / len(rows):.0f}",
        str(output),
        change.length_text,
        f"{accepted / drafted:.3f}" if drafted else "-",
        *(METRICS[key].text(_mean(rows, key.removeprefix("mean_"))) for key in _LATENCY),
        *([change.change_text, change.detectable_text] if has_change else []),
    ]


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [value for row in rows if (value := row.get(name)) is not None]
    return fmean(values) if values else None
