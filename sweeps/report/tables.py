"""The tables of a sweep, made from the records on disk alone.

A number is the mean over repeats, and a latency that of the requests of all repeats; the first one also has its minimum
and maximum. `ratio` is over the configuration's base (`specbatch.records.bases`), and has an interval and a
verdict (`speedups_of`). `break_even` is over the base in the same repeat, if that one has no speculation. A `View`
chooses the numbers; columns in which nothing was measured are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from specbatch.config.engine_config import Graphs
from specbatch.core.sampling_params import sampling_text
from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic
from specbatch.records.bases import bases_of, bases_sentence
from specbatch.records.intervals import of_ratios, were_interleaved
from specbatch.records.markdown import acceptance_table, markdown_table
from specbatch.records.metrics import METRICS, RELATIVE, Metric
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates, measured
from specbatch.records.schema import PointRecord
from specbatch.records.store import RECORD, WORKS, find_records
from specbatch.records.summarize import break_even
from specbatch.records.sweep_plan import Point, point_of, unfinished
from specbatch.records.verdicts import Speedup, speedup_of
from specbatch.sweeps.report.conclusion import conclusion, precision_sentences
from specbatch.sweeps.report.decision import (
    INTERVAL,
    VERDICT,
    break_even_text,
    decision,
    ratio_heading,
    speedup_text,
    verdict_text,
)
from specbatch.sweeps.report.gain import BREAK_EVEN, Gain, gain_of, losses
from specbatch.sweeps.report.notes import Note
from specbatch.sweeps.report.server_acceptance import server_acceptance
from specbatch.sweeps.report.summaries import caps_text, heading, run_on, with_spread
from specbatch.sweeps.report.sweep_notes import MEANS, disagreement, sweep_notes
from specbatch.sweeps.workload.workloads import lines_of

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = (
    *("output_throughput", "input_throughput", "goodput", "slo_share"),
    *("mean_ttft_s", "median_ttft_s", "p99_ttft_s", "mean_queue_s"),
    *("mean_tpot_s", "median_tpot_s", "p99_tpot_s", "accept_length", "accept_rate", "per_user_throughput"),
    *("untrimmed_accept_length", "untrimmed_accept_rate", "rows_per_verify", "corpus_share"),
    "corpus_accept_length",
    *("launch_lead_s", "host_waits_per_step", "device_idle_share", "graph_coverage"),
)
_OF_ARRIVALS = "mean_queue_s"  # in a closed loop it is part of the load that was chosen
_POINT = ["concurrency", "configuration"]
_VERIFIED = ("emitted", "verify_steps", "accepted", "drafted")  # counts of a request
_LATENCY = ("mean_ttft_s", "mean_tpot_s")
_OF_LATENCY = tuple(METRICS[key].heading for key in _LATENCY)
_GROUPED_BY = ("category", "turn")  # of a request
_OF_GROUPS = ("requests", "output tokens", "accept length", "accept rate", *_OF_LATENCY)
GENERAL = (MEANS, BREAK_EVEN)  # notes that explain columns
_BRIEF = ["model", "device", "replicas", "dtype", "workload", "arrivals", "objectives"]  # of the heading


@dataclass(frozen=True)
class View:
    """What a table shows.

    keys        metrics of the registry; the first one is shown with its spread
    ratio       the metric that the ratio compares
    break_even  the steps that break-even compares: those of all batch sizes, or of a full batch only; None: none
    brief       of the keys, those of the decision table
    judges      whether the ratio has a verdict: whether more (or less) of it is what one decides by
    """

    keys: tuple[str, ...] = _SHOWN
    ratio: str = "output_throughput"
    break_even: Literal["all", "full"] | None = "all"
    brief: tuple[str, ...] = (
        *("output_throughput", "goodput", "accept_length", "untrimmed_accept_length", "median_ttft_s", "median_tpot_s"),
    )
    judges: bool = True

    @property
    def columns(self) -> dict[str, Metric]:
        return {key: METRICS[key] for key in self.keys}


SWEEP = View()
COLUMNS = SWEEP.columns

Points = dict[tuple[Any, ...], list[RunRecord]]  # repeats by (concurrency, configuration)


def load_records(folder: Path, schema: type[PointRecord] = PointRecord) -> list[RunRecord]:
    """The records of a sweep, ordered by concurrency, repeat and position in the round."""
    records = []
    for place, record in find_records("folder", folder, "*/c*/r*/record.json", schema):
        if point_of(record).folder(folder) != place:
            works = f"is the record of {point_of(record).folder(folder)}; {WORKS}"
            raise refuse("folder", str(place / RECORD), works)
        records.append(record)
    if not records:
        several = sorted({path.parents[3].name for path in folder.glob("*/*/c*/r*/record.json")})
        works = f"holds several sweeps; name the folder of one: {', '.join(several)}"
        none = "holds no records of a sweep (CONFIGURATION/cN/rN/record.json)" if folder.exists() else "no such folder"
        raise refuse("folder", str(folder), works if several else none)
    return sorted(records, key=lambda record: [record.workload[key] for key in ("concurrency", "repeat", "place")])


def points_of(records: list[RunRecord]) -> Points:
    """The repeats of each (concurrency, configuration) that were `measured`."""
    points: Points = {}
    for record in records:
        points.setdefault(tuple(record.workload[key] for key in _POINT), []).append(record)
    return {point: measured(repeats) for point, repeats in points.items()}


def point_name(concurrency: int, configuration: str) -> str:
    return f"{configuration} at concurrency {concurrency}"


def bases(records: list[RunRecord]) -> dict[str, str]:
    """The configuration that each one is compared with."""
    return bases_of({record.workload["configuration"]: record for record in records})


def gains_of(records: list[RunRecord], view: View = SWEEP) -> dict[tuple[Any, ...], Gain | None]:
    """What speculation gains by its steps at each (concurrency, configuration); None where that is unknown."""
    points, over, needed = points_of(records), bases(records), _break_evens(records, view)
    return {
        (concurrency, name): gain_of(
            ((record.metrics.get("accept_length"), needed.get(_run(record))) for record in repeats),
            repeats[0].simulated_accept_length,
            interleaved=were_interleaved(points.get((concurrency, over[name]), repeats), repeats),
            anytime=wanted_precision(records) is not None,
        )
        for (concurrency, name), repeats in points.items()
    }


def speedups_of(records: list[RunRecord], view: View = SWEEP) -> dict[tuple[Any, ...], Speedup]:
    """What `view.ratio` is relative to its base at each (concurrency, configuration) where both were measured, with the
    interval and the verdict that `compare` has for these two."""
    points: dict[tuple[Any, ...], Replicates] = {}
    metric, found = METRICS[view.ratio], {}
    for point, repeats in points_of(records).items():
        if known := [record for record in repeats if metric.read(record) is not None]:
            points[point] = Replicates([point_of(record).folder(Path()) for record in known], known)
    over = bases(records)
    for (concurrency, name), own in points.items():
        other = points.get((concurrency, over[name]))
        if name != over[name] and other is not None and (speedup := speedup_of(metric, other, own)):
            found[concurrency, name] = speedup
    return found


def precision_of(records: list[RunRecord]) -> dict[tuple[Any, ...], float]:
    """How exactly the ratios of output tok/s of `speedups_of` are known: half the length of their intervals."""
    found = {point: speedup.precision for point, speedup in speedups_of(records).items()}
    return {point: math.inf if precision is None else precision for point, precision in found.items()}


def wanted_precision(records: list[RunRecord]) -> float | None:
    """Of --until-precise; None where no rounds were to be added. Of a continued sweep with several, the largest."""
    return max((wanted for record in records if (wanted := record.workload.get("until_precise"))), default=None)


def table(records: list[RunRecord], view: View = SWEEP) -> pd.DataFrame:
    """One row per concurrency and configuration, with the numbers of the CSV.

    repeats: those that were measured; failed: why another one was not; base: the configuration that the row is compared
    with, where not all rows have the same.
    """
    import pandas as pd

    first, *_ = columns = view.columns
    points, over, needed = points_of(records), bases(records), _break_evens(records, view)
    runs = pd.DataFrame(
        {
            **{key: record.workload[key] for key in (*_POINT, "repeat")},
            "simulated_accept_length": record.simulated_accept_length,
            "simulated_acceptance": record.simulated_acceptance,
            "failed": record.error,
            **{column: _or_nan(metric.read(record)) for column, metric in view.columns.items()},
            "break_even": _or_nan(needed.get(_run(record))),
        }
        for record in chain(*points.values())
    )
    groups = runs.groupby(_POINT, sort=False)
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
    failures = {tuple(record.workload[key] for key in _POINT): record.error for record in records if record.error}
    rows["failed"] = [failures.get(point) for point in rows.index]
    return rows.reset_index()


def losses_of(records: list[RunRecord], view: View = SWEEP) -> Note | None:
    """A warning about the points at which speculation loses; None without any."""
    gains, points = gains_of(records, view), points_of(records)
    return losses([(point_name(*point), gains[point], repeats[-1]) for point, repeats in points.items()])


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
        servers = server_acceptance(points_of(records), _POINT)
        parts += [f"## All columns\n\n{markdown_table(body, headings)}\n", acceptance(records), servers]
        parts.append(categories(records))
    parts.append("".join(f"* {note}\n" for note in every if not brief or note.text not in GENERAL))
    return "\n".join(filter(None, parts))


def _sentences(records: list[RunRecord], over: Mapping[str, str]) -> list[str]:
    """What is compared with what, if that is not the same for all; the conclusion; and how exactly the ratios are known
    if that was asked for."""
    sentences = [*filter(None, [bases_sentence(over)]), *conclusion(speedups_of(records), over)]
    wanted = wanted_precision(records)
    return sentences + (precision_sentences(precision_of(records), wanted) if wanted else [])


def categories(records: list[RunRecord]) -> str:
    """The tables of categories of prompts and of turns of conversations; empty where there are none."""
    return "\n".join(f"{markdown_table(body, headings)}\n" for headings, body in grouped_tables(records))


def grouped_tables(records: list[RunRecord]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Headings and cells of these tables, over the requests of all repeats. The third column names the group."""
    for name in _GROUPED_BY:
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for point, repeats in points_of(records).items():
            for row in (row for record in repeats for row in record.requests if name in row):
                found.setdefault((*point, row[name]), []).append(row)
        body = []
        for key, rows in found.items():
            output, *verified = (sum(row.get(field) or 0 for row in rows) for field in ("output_tokens", *_VERIFIED))
            body.append([*map(str, key), str(len(rows)), str(output), *_accepted(*verified), *_latency(rows)])
        if body:
            yield [*_POINT, name, *_OF_GROUPS], body


def _latency(rows: list[dict[str, Any]]) -> Iterator[str]:
    for key in _LATENCY:
        values = [value for row in rows if (value := row.get(key.removeprefix("mean_"))) is not None]
        yield METRICS[key].text(fmean(values) if values else None)


def _accepted(emitted: int, verifies: int, accepted: int, drafted: int) -> tuple[str, str]:
    return f"{emitted / verifies:.3f}" if verifies else "-", f"{accepted / drafted:.3f}" if drafted else "-"


def acceptance(records: list[RunRecord]) -> str:
    """The table of acceptance; empty where nothing was drafted."""
    sampling = sampling_text(records[0].workload.get("sampling"))
    accepted = acceptance_table(counters_of(records), tuple(_POINT), sampling)
    return f"{accepted}\n" if accepted else ""


def counters_of(records: list[RunRecord]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The counters of each (concurrency, configuration), one per repeat."""
    return {point: [record.counters for record in found] for point, found in points_of(records).items()}


def shown(
    rows: pd.DataFrame, over: Mapping[str, str], view: View = SWEEP, size: str = "concurrency"
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table. over: the base of each configuration; size: the column of `rows` that comes
    first."""
    seen = {column: metric for column, metric in view.columns.items() if rows[column].notna().any()}
    headings = [size.replace("_", " "), "configuration", *(metric.heading for metric in seen.values())]
    if known := bool(rows.break_even.notna().any()):
        headings += [f"{RELATIVE[key].heading} {INTERVAL}" for key in ("break_even", "step_ratio")]
        headings.append("by steps")
    first = next(iter(view.columns))
    if compared := bool(rows.ratio.notna().any()):
        headings += [ratio_heading(view, over), *([VERDICT] if view.judges else [])]
    body: list[list[str]] = []
    each: list[Any] = list(rows.itertuples())
    for row in each:
        cells = {column: metric.text(getattr(row, column)) for column, metric in seen.items()}
        if first in cells:
            low, high = (seen[first].text(getattr(row, first + end)) for end in ("_min", "_max"))
            cells[first] = with_spread(cells[first], low, high, row.repeats)
        tail = [break_even_text(row), speedup_text(row, "step_ratio"), verdict_text(row, "step_ratio")] if known else []
        if compared:
            tail += [speedup_text(row, "ratio"), *([verdict_text(row, "ratio")] if view.judges else [])]
        body.append([str(getattr(row, size)), row.configuration, *cells.values(), *tail])
    return headings, body


def notes(
    records: list[RunRecord],
    rows: pd.DataFrame,
    missing: Sequence[Point] = (),
    view: View = SWEEP,
    keys: Sequence[str] | None = None,
) -> list[Note]:
    """What a reader must know before believing the table. keys: the metrics of the table; None: those of the view."""
    found = sweep_notes(records, points_of(records), missing, view.keys if keys is None else keys)
    if rows.break_even.notna().any():
        found.append(Note(BREAK_EVEN))
    if view.break_even == "all":
        gains = gains_of(records, view)
        each: list[Any] = list(rows.itertuples())
        for row in each:
            point = row.concurrency, row.configuration
            found += disagreement(point, gains[point], row.ratio)
    return found


def as_json(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON values; None where nothing was measured."""
    clean = rows.astype(object).where(rows.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in clean.to_dict("records")]


def about(records: list[RunRecord]) -> dict[str, str]:
    """The lines of the heading: what was run on what, by name."""
    work = records[0].workload
    configurations = {record.workload["configuration"]: record for record in records}
    return (
        run_on(records)
        | lines_of(work)
        | {
            "configurations": "; ".join(f"{name}: {described(record)}" for name, record in configurations.items()),
            "effective caps": _by_name({name: caps_text(record) for name, record in configurations.items()}),
            "prefix cache": _by_name({name: _prefix_cache(record) for name, record in configurations.items()}),
        }
        | _fp8(configurations)
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _run(record: RunRecord) -> tuple[Any, ...]:
    """Concurrency, configuration and repeat."""
    return tuple(record.workload[key] for key in (*_POINT, "repeat"))


def _break_evens(records: list[RunRecord], view: View) -> dict[tuple[Any, ...], float | None]:
    """The break-even of each run with speculation whose base has none and was measured in the same repeat."""
    over = bases(records)
    runs = {_run(record): record for record in chain(*points_of(records).values())}
    found = {}
    for (concurrency, name, repeat), record in runs.items():
        base = runs.get((concurrency, over[name], repeat))
        if view.break_even is not None and record.drafts and base is not None and not base.drafts:
            full = [one.metrics.get("step_s") for one in (record, base)]
            of_full = full[0] / full[1] if full[0] and full[1] else None
            found[concurrency, name, repeat] = break_even(record, base) if view.break_even == "all" else of_full
    return found


def _by_name(texts: dict[str, str]) -> str:
    """The text of each configuration; once, without a name, if all are the same."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def described(record: RunRecord) -> str:
    """Speculation and graphs of a configuration, or the server and the speculation that it is said to have."""
    if server := record.config.get("server"):
        asked = str(record.speculation).replace(f", schedule {record.speculation.schedule}", "")
        return f"{server}; {asked}" if record.config.get("speculation_known") else str(server)
    return f"{record.speculation}, {Graphs(**record.config['graphs'])}"


def _prefix_cache(record: RunRecord) -> str:
    requested = record.config["prefix_cache"]
    return requested if isinstance(requested, str) else "on" if requested else "off"


def _fp8(configurations: dict[str, RunRecord]) -> dict[str, str]:
    """Whether activations were quantized to FP8; no line where they never were and all configurations agree."""
    own = {name: record for name, record in configurations.items() if "server" not in record.config}
    found = {name: record.caps.get("fp8_activations", "off") for name, record in own.items()}
    requested = {record.config.get("fp8_activations") for record in own.values()}
    return {"FP8 activations": _by_name(found)} if "on" in found.values() or len(requested) > 1 else {}
