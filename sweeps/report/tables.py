"""The table of a sweep, made from the records on disk alone.

A number is the median over repeats. `ratio` is the output throughput over the baseline's in the same repeat: its median
over repeats, with minimum and maximum where there are several. `break_even` is over the baseline of the same repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic
from specbatch.config import Graphs
from specbatch.errors import refuse
from specbatch.records.intervals import Interval, over_runs
from specbatch.records.markdown import acceptance_table
from specbatch.records.metrics import METRICS, RELATIVE
from specbatch.records.run_record import RunRecord
from specbatch.records.store import find_records
from specbatch.records.summarize import break_even
from specbatch.records.sweep_plan import Point, unfinished
from specbatch.sweeps.report.conclusion import conclusion
from specbatch.sweeps.report.gain import BREAK_EVEN, Gain, gain_of, losses
from specbatch.sweeps.report.notes import Note
from specbatch.sweeps.report.summaries import caps_text, heading, number, run_on, with_spread
from specbatch.sweeps.report.sweep_notes import disagreement, sweep_notes
from specbatch.sweeps.run.workloads import lines_of

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = (
    *("output_throughput", "input_throughput", "mean_ttft_s", "median_ttft_s", "p99_ttft_s"),
    *("mean_tpot_s", "median_tpot_s", "p99_tpot_s", "accept_length", "accept_rate", "per_user_throughput"),
    *("launch_lead_s", "host_waits_per_step", "device_idle_share", "graph_coverage"),
)
COLUMNS = {METRICS[key].column: METRICS[key] for key in _SHOWN}
_BREAK_EVEN, _RATIO = RELATIVE["break_even"], RELATIVE["ratio"]
_POINT = ["concurrency", "configuration"]

Points = dict[tuple[Any, ...], list[RunRecord]]  # repeats by (concurrency, configuration)


def load_records(folder: Path) -> list[RunRecord]:
    """The records of a sweep, ordered by concurrency, repeat and position in the round."""
    records = [record for _, record in find_records("folder", folder, "*/c*/r*/record.json")]
    if not records:
        several = sorted({path.parents[3].name for path in folder.glob("*/*/c*/r*/record.json")})
        works = f"holds a sweep of each of several models; name the folder of one: {', '.join(several)}"
        none = "holds no records of a sweep (CONFIGURATION/cN/rN/record.json)" if folder.exists() else "no such folder"
        raise refuse("folder", str(folder), works if several else none)
    return sorted(records, key=lambda record: [record.workload[key] for key in ("concurrency", "repeat", "place")])


def points_of(records: list[RunRecord]) -> Points:
    """All repeats of each (concurrency, configuration)."""
    points: Points = {}
    for record in records:
        points.setdefault(tuple(record.workload[key] for key in _POINT), []).append(record)
    return points


def point_name(concurrency: int, configuration: str) -> str:
    return f"{configuration} at concurrency {concurrency}"


def gains_of(records: list[RunRecord]) -> dict[tuple[Any, ...], Gain | None]:
    """What speculation gains by its steps at each (concurrency, configuration); None where that is unknown."""
    return {
        point: gain_of(
            ((record.metrics.get("accept_length"), _break_even(record, records)) for record in repeats),
            repeats[0].simulated_accept_length,
        )
        for point, repeats in points_of(records).items()
    }


def differences_of(records: list[RunRecord]) -> dict[tuple[Any, ...], Interval]:
    """The interval of output tok/s less the baseline's at each (concurrency, configuration) with several repeats."""
    speeds = {
        point: {
            record.workload["repeat"]: speed for record in repeats if (speed := record.metrics["output_throughput"])
        }
        for point, repeats in points_of(records).items()
    }
    found = {}
    for (concurrency, name), own in speeds.items():
        base = speeds.get((concurrency, "baseline"), {})
        both = [repeat for repeat in own if repeat in base]
        if name != "baseline" and len(both) > 1:
            before, after = ([side[repeat] for repeat in both] for side in (base, own))
            found[concurrency, name] = over_runs(before, after, paired=True)
    return found


def table(records: list[RunRecord]) -> pd.DataFrame:
    """One row per concurrency and configuration, with the numbers of the CSV."""
    import pandas as pd

    runs = pd.DataFrame(
        {
            **{key: record.workload[key] for key in (*_POINT, "repeat")},
            "simulated_accept_length": record.simulated_accept_length,
            **{column: _or_nan(metric.read(record)) for column, metric in COLUMNS.items()},
            "break_even": _or_nan(_break_even(record, records)),
        }
        for record in records
    )
    baseline = runs[runs.configuration == "baseline"].set_index(["concurrency", "repeat"]).output_tok_s
    places = pd.MultiIndex.from_frame(runs[["concurrency", "repeat"]])
    runs["ratio"] = runs.output_tok_s / baseline.reindex(places).to_numpy()
    groups = runs.groupby(_POINT, sort=False)
    rows = groups[[*COLUMNS, "break_even"]].median()
    rows.insert(0, "repeats", groups.size())
    rows.insert(0, "simulated_accept_length", groups.simulated_accept_length.first())
    gains = gains_of(records)
    rows["speculation"] = [None if (gain := gains[point]) is None else str(gain) for point in rows.index]
    rows["ratio"], rows["ratio_min"], rows["ratio_max"] = (
        groups.ratio.median(),
        groups.ratio.min(),
        groups.ratio.max(),
    )
    return rows.reset_index()


def losses_of(records: list[RunRecord]) -> Note | None:
    """A warning about the points at which speculation loses; None without any."""
    gains, points = gains_of(records), points_of(records)
    return losses([(point_name(*point), gains[point], repeats[-1]) for point, repeats in points.items()])


def write_summary(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown."""
    records = load_records(folder)
    rows = table(records)
    text = markdown(records, rows, unfinished(folder))
    write_atomic(folder / "summary.csv", rows.to_csv(index=False))
    write_atomic(folder / "summary.md", text)
    return text


def markdown(records: list[RunRecord], rows: pd.DataFrame, missing: Sequence[Point] = ()) -> str:
    """Heading, table, acceptance, notes and a conclusion. missing: points of the sweep without a record."""
    from tabulate import tabulate

    headers, body = shown(rows)
    text = tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)
    counters = {point: [record.counters for record in found] for point, found in points_of(records).items()}
    accepted = acceptance_table(counters, tuple(_POINT))
    lines = "".join(f"* {note}\n" for note in notes(records, rows, missing))
    parts = [heading(about(records)), f"{text}\n", f"{accepted}\n" if accepted else "", lines]
    parts.append("".join(f"{sentence}\n" for sentence in conclusion(rows, differences_of(records))))
    return "\n".join(filter(None, parts))


def shown(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table."""
    known = bool(rows.break_even.notna().any())
    headings = [metric.heading for metric in COLUMNS.values()]
    headings += [_BREAK_EVEN.heading, "speculation"] if known else []
    return [*_POINT, *headings, _RATIO.heading], [_cells(row, known) for row in rows.itertuples()]


def notes(records: list[RunRecord], rows: pd.DataFrame, missing: Sequence[Point] = ()) -> list[Note]:
    """What a reader must know before believing the table."""
    found = sweep_notes(records, points_of(records), missing)
    if rows.break_even.notna().any():
        found.append(Note(BREAK_EVEN))
    gains = gains_of(records)
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
            "configurations": "; ".join(f"{name}: {_described(record)}" for name, record in configurations.items()),
            "effective caps": _by_name({name: caps_text(record) for name, record in configurations.items()}),
            "prefix cache": _by_name({name: _prefix_cache(record) for name, record in configurations.items()}),
        }
        | _fp8(configurations)
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _break_even(record: RunRecord, records: list[RunRecord]) -> float | None:
    """None for a run without speculation, and where no baseline ran in the same repeat."""
    place = ("concurrency", "repeat")
    baselines = [
        other
        for other in records
        if not other.drafts and all(other.workload[key] == record.workload[key] for key in place)
    ]
    return break_even(record, baselines) if record.drafts else None


def _cells(row: Any, break_even_known: bool) -> list[str]:
    numbers = [metric.text(getattr(row, column)) for column, metric in COLUMNS.items()]
    if break_even_known:
        gain = row.speculation if isinstance(row.speculation, str) else "-"  # pandas may turn None into NaN
        numbers += [number(row.break_even, _BREAK_EVEN.decimals), gain]
    ratio = with_spread((row.ratio, row.ratio_min, row.ratio_max), _RATIO.decimals, row.repeats)
    return [str(row.concurrency), row.configuration, *numbers, ratio]


def _by_name(texts: dict[str, str]) -> str:
    """The text of each configuration; once, without a name, if all are the same."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _described(record: RunRecord) -> str:
    return str(record.config.get("server") or f"{record.speculation}, {Graphs(**record.config['graphs'])}")


def _prefix_cache(record: RunRecord) -> str:
    requested = record.config["prefix_cache"]
    return requested if isinstance(requested, str) else "on" if requested else "off"


def _fp8(configurations: dict[str, RunRecord]) -> dict[str, str]:
    """Whether activations were quantized to FP8; no line where they never were and all configurations agree."""
    found = {name: record.caps.get("float8_activations", "off") for name, record in configurations.items()}
    requested = {record.config.get("float8_activations") for record in configurations.values()}
    return {"FP8 activations": _by_name(found)} if "on" in found.values() or len(requested) > 1 else {}
