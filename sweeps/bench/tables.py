"""The table of `specbatch bench`, made only from the records in its folder.

A number is the median over repeats; the primary number of a section also has its smallest and largest. A ratio is over
the section's base configuration in the same repeat; break-even is over the fastest baseline of the same section and
size. Figures of other engines are shown where the folder holds a `peers.csv` with rows for the same model, dtype,
device and speculation.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from specbatch.atomic_file import write_atomic
from specbatch.config import Graphs
from specbatch.errors import refuse
from specbatch.records.markdown import draft_length_lines
from specbatch.records.run_record import CAPS, RunRecord
from specbatch.records.store import find_records
from specbatch.records.summarize import break_even
from specbatch.sweeps.bench.columns import (
    BASELINE,
    COLUMNS,
    DERIVED,
    MEASURED,
    METHODS,
    PRIMARY,
    SECTIONS,
    Bounds,
    Row,
    Section,
    shown,
    unmeasured,
)
from specbatch.sweeps.bench.peers import Peer, Point, comparable, drafting_of
from specbatch.sweeps.machine.limits import data_sheet_bandwidth
from specbatch.sweeps.report.gain import BREAK_EVEN, Gain, gain_of, losses
from specbatch.sweeps.report.notes import Note, replay_notes
from specbatch.sweeps.report.summaries import (
    caps_text,
    heading,
    number,
    run_on,
    with_spread,
)

Groups = dict[tuple[Any, ...], list[RunRecord]]
POINT = ("section", "configuration", "size")  # the folders of a point, those that it has


def load_records(folder: Path) -> list[RunRecord]:
    """The records of a bench, ordered by section, size, configuration and repeat."""
    records = [record for _, record in find_records("folder", folder, "**/r*/record.json")]
    if not records:
        raise refuse("folder", str(folder), "holds no records of a bench (SECTION/CONFIGURATION/SIZE/rN/record.json)")

    def place(record: RunRecord) -> tuple[int, ...]:
        work = record.workload
        return (SECTIONS.index(work["section"]), work["size"], work["place"], work["repeat"])

    return sorted(records, key=place)


def table(records: list[RunRecord]) -> list[Row]:
    """One row per section, size and configuration; None where nothing was measured."""
    groups = _groups(records)
    bounds, sections = bounds_of(records), shown(records)
    return [_row(key, groups, bounds, sections.get(key[0])) for key in groups]


def _groups(records: list[RunRecord]) -> Groups:
    """The repeats of each (section, size, configuration)."""
    groups: Groups = {}
    for record in records:
        work = record.workload
        groups.setdefault((work["section"], work["size"], work.get("configuration")), []).append(record)
    return groups


def bounds_of(records: list[RunRecord]) -> Bounds:
    speeds = [speed for record in records if (speed := record.metrics.get("read_bytes_s")) is not None]
    return Bounds(data_sheet_bandwidth(records[0].gpu), median(speeds) if speeds else None)


def _row(key: tuple[Any, ...], groups: Groups, bounds: Bounds, shown_as: Section | None) -> Row:
    section, size, name = key
    records = groups[key]
    values = {column: _values(how.value, records) for column, how in MEASURED.items()}
    row: Row = {"section": section, "size": size or None, "configuration": name}
    row["drafting"] = drafting_of(records[0]) if name else ""
    row["repeats"] = sum("error" not in record.workload for record in records)
    for column, found in values.items():
        row[column] = median(found.values()) if found else None
        if column in PRIMARY:
            row |= _spread(column, list(found.values()))
    for column, derived in DERIVED.items():
        row[column] = _number_or_none(derived.value, row, bounds)
    ratios: list[float] = []
    if shown_as is not None:
        row["repeats"] = len(values[shown_as.primary])
        compared = shown_as.ratio or MEASURED[shown_as.primary].value
        base = _values(compared, groups.get((section, size, shown_as.base), []))
        ratios = [ours / base[repeat] for repeat, ours in _values(compared, records).items() if repeat in base]
    row["ratio"] = median(ratios) if ratios else None
    row |= _spread("ratio", ratios)
    needed = [even for even in _break_evens(key, groups) if even is not None]
    row["break_even"] = median(needed) if needed else None
    gain = _gain(key, groups)
    row["speculation"] = None if gain is None else str(gain)
    row["not_measured"] = next((why for record in records if (why := unmeasured(record))), None)
    row["failed"] = next((work["error"] for record in records if "error" in (work := record.workload)), None)
    return row


def _gain(key: tuple[Any, ...], groups: Groups) -> Gain | None:
    """What speculation gains by its steps at a point; None where that is unknown."""
    accepted = (_number_or_none(MEASURED["accept_length"].value, record) for record in groups[key])
    pairs = zip(accepted, _break_evens(key, groups), strict=True)
    return gain_of(pairs, groups[key][0].simulated_accept_length)


def _break_evens(key: tuple[Any, ...], groups: Groups) -> list[float | None]:
    """The break-even of each repeat; None of first tokens, which take hardly any steps."""
    section, size, _ = key
    point = [record for (*place, _), others in groups.items() if place == [section, size] for record in others]
    return [None if section == "ttft" else _break_even(record, point) for record in groups[key]]


def _break_even(record: RunRecord, point: list[RunRecord]) -> float | None:
    """Over the baselines of the same repeat."""
    repeat = record.workload["repeat"]
    plain = [other for other in point if not other.drafts and other.workload["repeat"] == repeat]
    if not record.drafts:
        return None
    if "full_batch_steps" not in record.workload:
        return break_even(record, plain)
    time, baselines = record.metrics.get("step_s"), [s for one in plain if (s := one.metrics.get("step_s"))]
    return time / min(baselines) if time and baselines else None


def losses_of(records: list[RunRecord]) -> Note | None:
    """A warning about the points at which speculation loses; None without any."""
    groups = _groups(records)
    return losses([(_where(repeats[-1].workload), _gain(key, groups), repeats[-1]) for key, repeats in groups.items()])


def _values(value: Callable[..., Any], records: list[RunRecord]) -> dict[int, float]:
    """By repeat, where it was measured."""
    found = {record.workload["repeat"]: _number_or_none(value, record) for record in records}
    return {repeat: value for repeat, value in found.items() if value is not None}


def _number_or_none(value: Callable[..., Any], *of: Any) -> float | None:
    try:
        return float(value(*of))
    except (KeyError, TypeError, ZeroDivisionError):  # it lacks what this is made from
        return None


def _spread(name: str, values: list[float]) -> Row:
    return {f"{name}_min": min(values, default=None), f"{name}_max": max(values, default=None)}


def write_table(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown."""
    records = load_records(folder)
    rows = table(records)
    text = markdown(records, rows, peers_of(folder, records))
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(folder / "summary.csv", out.getvalue())
    write_atomic(folder / "summary.md", text)
    return text


def peers_of(folder: Path, records: list[RunRecord]) -> dict[Point, Peer]:
    """The figures of other engines for these points."""
    sections = shown(records)
    asked = {
        (name, record.workload["size"], column, drafting_of(record))
        for record in records
        if (name := record.workload["section"]) in sections
        for column in sections[name].peer_columns
    }
    return comparable(folder, records, asked)


def markdown(records: list[RunRecord], rows: list[Row], peers: dict[Point, Peer]) -> str:
    """Heading, a table per section, and notes and warnings."""
    parts = [_heading(records, rows)]
    for name, section in shown(records).items():
        own = [row for row in rows if row["section"] == name]
        if own:
            measured = " and ".join(dict.fromkeys(row["configuration"] for row in own))
            why = f"Configurations: {measured} ({section.configurations})."
            parts.append(f"## {section.title}\n\n{why}\n\n{_section(section, own, peers)}\n")
    parts.append("".join(f"* {note}\n" for note in dict.fromkeys(_notes(records, rows))))
    return "\n".join(parts)


def _section(section: Section, rows: list[Row], peers: dict[Point, Peer]) -> str:
    from tabulate import tabulate

    columns = [column for column in section.columns if any(row[column] is not None for row in rows)]
    compared = _has_base(section, rows)
    drafting = any(row["break_even"] is not None for row in rows)
    peer_cells = [
        {
            (peer, column): value
            for column in section.peer_columns
            for peer, value in peers.get((row["section"], row["size"], column, row["drafting"]), {}).items()
        }
        for row in rows
    ]
    named = list(dict.fromkeys(name for figures in peer_cells for name in figures))
    named.sort(key=lambda name: section.peer_columns.index(name[1]))
    body = [
        [
            row["size"],
            row["configuration"],
            _with_spread(row, section.primary, COLUMNS[section.primary].decimals),
            *((_with_spread(row, "ratio", 2),) if compared else ()),
            *(number(row[column], COLUMNS[column].decimals) for column in columns),
            *((number(row["break_even"], 3), row["speculation"] or "-") if drafting else ()),
            *(figures.get(name, "-") for name in named),
        ]
        for row, figures in zip(rows, peer_cells, strict=True)
    ]
    titles = [COLUMNS[column].title for column in (section.primary, *columns)]
    ratio = [f"ratio to {section.base}"] if compared else []
    headers = [section.size, "configuration", titles[0], *ratio, *titles[1:]]
    headers += ["break-even accept length", "speculation"] if drafting else []
    several = len(section.peer_columns) > 1
    headers += [f"{peer}: {COLUMNS[column].title}" if several else peer for peer, column in named]
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def _has_base(section: Section, rows: list[Row]) -> bool:
    """Whether the configuration was run that the section's ratio is over."""
    return any(row["configuration"] == section.base for row in rows)


def _heading(records: list[RunRecord], rows: list[Row]) -> str:
    lines = run_on(records)
    if sheet := bounds_of(records).sheet:
        lines["data sheet"] = f"{sheet / 1e12:.1f} TB/s"
    for row in rows:
        if row["section"] == "machine" and row["not_measured"]:
            lines["measured"] = f"nothing of the device itself: the section machine {row['not_measured']}"
        elif row["section"] == "machine" and not row["failed"]:
            lines["measured"] = f"read {row['read_tb_s']:.2f} TB/s, bf16 GEMM {row['gemm_tflop_s']:.0f} TFLOP/s"
    engines = [record for record in records if "configuration" in record.workload]
    engines.sort(key=lambda record: bool(record.caps))  # of one that could not be measured there are none
    for name, record in {record.workload["configuration"]: record for record in engines}.items():
        graphs = Graphs(**record.config["graphs"])
        caps = caps_text(record, (*CAPS, "prefix_cache", "kv_dtype", "attention_backend", "capture_s"))
        lines[name] = (
            f"{record.speculation}; graphs: decode {graphs.decode}, prefill {graphs.prefill}"
            f"{'; ' if caps else ''}{caps}{_started(record)}"
        )
    return heading(lines)


def _started(record: RunRecord) -> str:
    seconds = record.workload.get("start_s")
    return "" if seconds is None else f"; ready after {seconds:.1f} s"


def _notes(records: list[RunRecord], rows: list[Row]) -> Iterator[str]:
    yield "Medians over repeats (smallest-largest); ratios within a repeat. Random prompts, greedy, end tokens ignored."
    finished = [record.workload for record in records if "error" not in record.workload]
    first = {work["section"]: work for work in reversed(finished)}
    steps = first.get("decode") or first.get("verify")
    if steps and "full_batch_steps" in steps:
        first["full batch"], steps = steps, None
    if steps:
        first["steps"] = steps
        first |= {name: steps for name, key in (("experts", "experts"), ("states", "state_bytes")) if key in steps}
        if bounds_of(records).read:
            first["floor"] = steps
    if gemms := steps or first.get("ttft"):
        first["no products" if "no_products" in gemms else "products"] = gemms
    for name, text in METHODS.items():
        if name in first:
            yield text.format(**first[name], tokens=" and ".join(map(str, first[name].get("new_tokens", ()))))
    if any(row["break_even"] is not None for row in rows):
        yield BREAK_EVEN
    for name, section in shown(records).items():
        own = [row for row in rows if row["section"] == name]
        if own and not _has_base(section, own):
            both = section.base == BASELINE and name != "ttft"
            needs = "ratio and break-even need" if both else "the ratio needs"
            yield f"NOT COMPARED: {section.title}: {needs} {section.base}, which --configs leaves out; add it."
    for row in rows:
        if row["failed"]:
            yield f"FAILED: {_where(row)}: {row['failed']}"
    for record in records:
        work = record.workload
        where = _where(work)
        if work["section"] == "machine" or "error" in work:
            continue
        if why := unmeasured(record):
            label, _, rest = why.partition(": ")
            yield f"{label}: {where}, repeat {work['repeat']}: {rest}."
        if "products_error" in work:
            yield f"GEMMS FAILED: {where}: {work['products_error']}"
        yield from map(str, replay_notes(record, where))
        yield from (
            f"{where}, repeat {work['repeat']}, {line}." for line in draft_length_lines([record.counters], record.caps)
        )
        if record.metrics.get("retractions"):
            yield f"RETRACTED: {where}: {record.metrics['retractions']} requests waited for pages."


def _where(row: Row) -> str:
    return " ".join(str(row[key]) for key in POINT if row.get(key) is not None)


def _with_spread(row: Row, column: str, decimals: int) -> str:
    values = (row[column], row[f"{column}_min"], row[f"{column}_max"])
    return with_spread(values, decimals, row["repeats"])
