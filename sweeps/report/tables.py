"""The table of a sweep, made from nothing but the records on disk.

A number is the median over repeats. `ratio` is output tok/s over the baseline's in the same repeat: the
median over the repeats, with the smallest and the largest where there are several. `break_even` is over the baseline
in the same repeat, too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic
from specbatch.config import Graphs
from specbatch.errors import refuse
from specbatch.records.markdown import acceptance_table, draft_length_lines
from specbatch.records.run_record import RunRecord
from specbatch.records.store import find_records
from specbatch.records.summarize import break_even
from specbatch.records.sweep_plan import Point, unfinished
from specbatch.sweeps.report.conclusion import conclusion
from specbatch.sweeps.report.summaries import (
    BREAK_EVEN,
    caps_text,
    failures,
    heading,
    losses,
    number,
    replay_notes,
    run_on,
    verdict,
    with_spread,
)
from specbatch.sweeps.run.workloads import lines_of

if TYPE_CHECKING:
    import pandas as pd

# CSV column: (metric of the record, factor, decimals in Markdown, title in Markdown)
COLUMNS = {
    "output_tok_s": ("output_throughput", 1, 1, "output tok/s"),
    "input_tok_s": ("input_throughput", 1, 1, "input tok/s"),
    "mean_ttft_ms": ("mean_ttft_s", 1000, 1, "mean TTFT (ms)"),
    "median_ttft_ms": ("median_ttft_s", 1000, 1, "median TTFT (ms)"),
    "p99_ttft_ms": ("p99_ttft_s", 1000, 1, "p99 TTFT (ms)"),
    "mean_tpot_ms": ("mean_tpot_s", 1000, 2, "mean TPOT (ms)"),
    "median_tpot_ms": ("median_tpot_s", 1000, 2, "median TPOT (ms)"),
    "p99_tpot_ms": ("p99_tpot_s", 1000, 2, "p99 TPOT (ms)"),
    "accept_length": ("accept_length", 1, 3, "accept length"),
    "accept_rate": ("accept_rate", 1, 3, "accept rate"),
    "per_user_tok_s": ("per_user_throughput", 1, 1, "per-user tok/s"),
    "launch_lead_ms": ("launch_lead_s", 1000, 2, "launch lead (ms)"),
    "host_waits_per_step": ("host_waits_per_step", 1, 2, "host waits per step"),
    "device_idle_percent": ("device_idle_share", 100, 1, "device idle (%)"),
    "graph_coverage_percent": ("graph_coverage", 100, 0, "graph coverage (%)"),
}
_POINT = ["concurrency", "configuration"]
_WARNING = re.compile(r"(?!CACHED)([A-Z]+(?: [A-Z]+)*)(?:: (?=\S)| (?=between ))")  # as notes that warn begin


def load_records(folder: Path) -> list[RunRecord]:
    """The records of a sweep, ordered by concurrency, repeat and position in the round."""
    records = [record for _, record in find_records("folder", folder, "*/c*/r*/record.json")]
    if not records:
        several = sorted({path.parents[3].name for path in folder.glob("*/*/c*/r*/record.json")})
        works = f"holds a sweep of each of several models; name the folder of one: {', '.join(several)}"
        none = "holds no records of a sweep (CONFIGURATION/cN/rN/record.json)"
        raise refuse("folder", str(folder), works if several else none)
    return sorted(records, key=lambda record: [record.workload[key] for key in ("concurrency", "repeat", "place")])


def table(records: list[RunRecord]) -> pd.DataFrame:
    """One row per concurrency and configuration, numbers as in the CSV."""
    import pandas as pd

    runs = pd.DataFrame(
        {
            **{key: record.workload[key] for key in (*_POINT, "repeat")},
            "simulated_accept_length": record.simulated_accept_length,
            **{
                column: factor * (math.nan if (value := record.metrics.get(metric)) is None else value)
                for column, (metric, factor, _, _) in COLUMNS.items()
            },
        }
        for record in records
    )
    runs["break_even"] = [_break_even(record, records) for record in records]
    baseline = runs[runs.configuration == "baseline"].set_index(["concurrency", "repeat"]).output_tok_s
    places = pd.MultiIndex.from_frame(runs[["concurrency", "repeat"]])
    runs["ratio"] = runs.output_tok_s / baseline.reindex(places).to_numpy()
    groups = runs.groupby(_POINT, sort=False)
    rows = groups[[*COLUMNS, "break_even"]].median()
    rows.insert(0, "repeats", groups.size())
    rows.insert(0, "simulated_accept_length", groups.simulated_accept_length.first())
    rows["speculation"] = [_said(row) for row in rows.itertuples()]
    rows["ratio"], rows["ratio_min"], rows["ratio_max"] = (
        groups.ratio.median(),
        groups.ratio.min(),
        groups.ratio.max(),
    )
    return rows.reset_index()


def _break_even(record: RunRecord, records: list[RunRecord]) -> float:
    """NaN for plain decoding, or where there is none beside it."""
    place = ("concurrency", "repeat")
    plain = [
        other
        for other in records
        if not other.drafts and all(other.workload[key] == record.workload[key] for key in place)
    ]
    needed = break_even(record, plain) if record.drafts else None
    return math.nan if needed is None else needed


def losses_of(records: list[RunRecord]) -> str | None:
    """What to say of the points at which drafting did not pay; None if it did."""
    points = {tuple(record.workload[key] for key in _POINT): record for record in records}
    rows: list[Any] = list(table(records).itertuples())
    return losses(
        (
            f"{row.configuration} at concurrency {row.concurrency}",
            row.accept_length,
            row.break_even,
            points[row.concurrency, row.configuration],
        )
        for row in rows
    )


def write_summary(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown."""
    records = load_records(folder)
    rows = table(records)
    text = markdown(records, rows, unfinished(folder))
    write_atomic(folder / "summary.csv", rows.to_csv(index=False))
    write_atomic(folder / "summary.md", text)
    return text


def markdown(records: list[RunRecord], rows: pd.DataFrame, missing: Sequence[Point] = ()) -> str:
    """What was run on what, the table, and what a reader must know before believing it. missing: points of the sweep
    that have no record."""
    from tabulate import tabulate

    headers, body = shown(rows)
    text = tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)
    remarks = "".join(f"* {note}\n" for note in notes(records, rows, missing))
    read = "".join(f"{sentence}\n" for sentence in conclusion(rows))
    return f"{heading(about(records))}\n{text}\n\n{_acceptance(records)}{remarks}" + (f"\n{read}" if read else "")


def shown(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the table as people read it."""
    known = bool(rows.break_even.notna().any())
    titles = [title for _, _, _, title in COLUMNS.values()]
    titles += ["break-even accept length", "speculation"] if known else []
    return [*_POINT, *titles, "ratio to baseline"], [_cells(row, known) for row in rows.itertuples()]


def notes(records: list[RunRecord], rows: pd.DataFrame, missing: Sequence[Point] = ()) -> list[str]:
    """What a reader must know; what `warning` finds in them before believing anything."""
    remarks = [f"UNFINISHED: {_counted(missing)} have no record: the sweep was cut short."] if missing else []
    remarks += [BREAK_EVEN] if rows.break_even.notna().any() else []
    remarks += filter(None, map(_disagreement, rows.itertuples()))
    return [*_notes(records), *_lengths(records), *remarks]


def _counted(missing: Sequence[Point]) -> str:
    places = Counter(f"{point.configuration} at concurrency {point.concurrency}" for point in missing)
    return f"{len(missing)} points ({', '.join(f'{count} of {place}' for place, count in places.items())})"


def warning(note: str) -> tuple[str, str] | None:
    """The capitals that a note begins with which warns, and what it says; None of one that only tells."""
    found = _WARNING.match(note)
    return (found[1], note[found.end() :]) if found else None


def as_json(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON values; None where nothing was measured."""
    clean = rows.astype(object).where(rows.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in clean.to_dict("records")]


def _disagreement(row: Any) -> str | None:
    """Where steps pay and the run does not, or the other way round."""
    said = _said(row)
    pays = row.accept_length >= row.break_even
    if not said or "above" in said or math.isnan(row.ratio) or pays == (row.ratio >= 1):
        return None
    return (
        f"NOT BY STEPS ALONE: {row.configuration} at concurrency {row.concurrency}: by its steps drafting {said}, and "
        f"the ratio is {row.ratio:.2f}: prompts count there too, and the ends at which fewer requests run."
    )


def points_of(records: list[RunRecord]) -> dict[tuple[Any, ...], list[RunRecord]]:
    """All repeats of each (concurrency, configuration) together."""
    points: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in records:
        points.setdefault(tuple(record.workload[key] for key in _POINT), []).append(record)
    return points


def _acceptance(records: list[RunRecord]) -> str:
    """The table of where drafts were accepted; nothing where none were made."""
    counters = {point: [record.counters for record in found] for point, found in points_of(records).items()}
    found = acceptance_table(counters, tuple(_POINT))
    return f"{found}\n\n" if found else ""


def _lengths(records: list[RunRecord]) -> Iterator[str]:
    """What was drafted where that was chosen."""
    for (concurrency, name), found in points_of(records).items():
        for line in draft_length_lines((record.counters for record in found), found[0].caps):
            yield f"{name} at concurrency {concurrency}, {line}."


def _cells(row: Any, break_even_known: bool) -> list[str]:
    numbers = [number(getattr(row, name), COLUMNS[name][2]) for name in COLUMNS]
    numbers += [number(row.break_even, 3), _said(row) or "-"] if break_even_known else []
    ratio = with_spread((row.ratio, row.ratio_min, row.ratio_max), 2, row.repeats)
    return [str(row.concurrency), row.configuration, *numbers, ratio]


def _said(row: Any) -> str | None:
    return verdict(row.accept_length, row.break_even, row.simulated_accept_length)


def about(records: list[RunRecord]) -> dict[str, str]:
    """What was run on what, by the name of its line."""
    work = records[0].workload
    names = {record.workload["configuration"]: record for record in records}
    return (
        run_on(records)
        | lines_of(work)
        | {
            "configurations": "; ".join(f"{name}: {_made_of(record)}" for name, record in names.items()),
            "effective caps": _by_name({name: caps_text(record) for name, record in names.items()}),
            "prefix cache": _by_name({name: _prefix_cache(record) for name, record in names.items()}),
        }
        | _float8(names)
    )


def _by_name(texts: dict[str, str]) -> str:
    """What is said of each configuration; once, without a name, where it is the same of all."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _made_of(record: RunRecord) -> str:
    return str(record.config.get("server") or f"{record.speculation}, {Graphs(**record.config['graphs'])}")


def _prefix_cache(record: RunRecord) -> str:
    asked = record.config["prefix_cache"]
    return asked if isinstance(asked, str) else "on" if asked else "off"


def _float8(names: dict[str, RunRecord]) -> dict[str, str]:
    """Whose activations were rounded to float8; nothing where none were and nobody asked for a difference."""
    found = {name: record.caps.get("float8_activations", "off") for name, record in names.items()}
    asked = {record.config.get("float8_activations") for record in names.values()}
    return {"float8 activations": _by_name(found)} if "on" in found.values() or len(asked) > 1 else {}


def _remarks(record: RunRecord) -> Iterator[str]:
    """What is often the same of all points."""
    if (different := record.workload.get("distinct_prompts")) and different < record.workload["prompts"]:
        yield f"REPEATED: only {different} prompts are different; a prefix cache answers the others faster"
    for doubt in record.workload.get("doubts", ()):
        yield f"DOUBTFUL: {doubt}"
    if why := record.counters.get("no_accept_length"):
        yield f"No accept length: {why}"


def _notes(records: list[RunRecord]) -> list[str]:
    notes = ["Medians over repeats; accept length counts the bonus token; per-user is output tok/s / concurrency."]
    tokens: dict[tuple[int, int], dict[str, str]] = {}
    remarks: dict[str, list[str]] = {}
    for record in records:
        work = record.workload
        where = f"{work['configuration']} at concurrency {work['concurrency']}, repeat {work['repeat']}"
        if record.simulated_accept_length is None:  # a simulated text is no model's: nothing to compare
            tokens.setdefault((work["concurrency"], work["repeat"]), {})[work["configuration"]] = work["output_sha256"]
        if record.metrics["requests"] != work["prompts"]:
            notes.append(f"INCOMPLETE: {where}: {record.metrics['requests']} of {work['prompts']} prompts finished.")
        if record.drafts and not record.metrics.get("drafted_tokens"):
            notes.append(f"NO DRAFTS: {where}: nothing was drafted, so this row does not show speculation.")
        notes += replay_notes(record, where)
        for remark in _remarks(record):
            remarks.setdefault(remark, []).append(where)
        notes += [f"FAILED: {where}: {count} requests: {error}." for error, count in failures(record)]
        cached, inputs = (record.metrics.get(name) for name in ("cached_tokens", "input_tokens"))
        if cached and inputs:
            kept = "; states of prefixes {kept} kept, {loaded} begun with, {evicted} gone"
            states = kept.format(**found) if (found := record.counters.get("states")) else ""
            notes.append(
                f"CACHED: {where}: {cached} input tokens ({100 * cached / inputs:.1f}%) came from the prefix "
                f"cache{states}."
            )
    for remark, (first, *others) in remarks.items():
        notes.append(f"{remark} ({first}{f', and {len(others)} other points' if others else ''}).")
    means = {record.workload["configuration"]: mean for record in records if (mean := record.simulated_accept_length)}
    for name, mean in means.items():
        notes.append(
            f"SIMULATED: {name}: an accept length of {mean:g} was drawn by a coin; the text is no model's. "
            "Rows without a draft (ngram without a match) accept none, so the mean reached may be lower."
        )
    compared = [row for row in tokens.values() if len(row) > 1]
    differing = [place for place, row in tokens.items() if len(set(row.values())) > 1]
    if differing:
        places = ", ".join(f"{concurrency}" for concurrency in dict.fromkeys(place[0] for place in differing))
        notes.append(f"TOKENS DIFFER between configurations at concurrency {places} (expected only below float32).")
    elif compared:
        notes.append("All configurations produced the same output tokens at every point.")
    return notes
