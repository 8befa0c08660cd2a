"""The table of `specbatch bench`, made from nothing but the records in its folder.

A number is the median over repeats; what a section is about also has its smallest and largest. A ratio is over the
section's base configuration in the same repeat; break-even is over the fastest plain decoding of the same section and
size. Figures of other engines stand beside ours where the folder holds a
`peers.csv` with rows for the same model, type and device.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specbatch.config import Graphs, Speculation
from specbatch.draft_length import steps_text
from specbatch.errors import refuse
from specbatch.metrics import RunRecord, break_even, write_atomic
from specbatch.sweeps.machine import data_sheet_bandwidth
from specbatch.sweeps.peers import Peer, Point, comparable
from specbatch.sweeps.summaries import (
    BREAK_EVEN,
    CAPS,
    caps_text,
    drafts,
    graphs_of,
    heading,
    losses,
    number,
    replay_notes,
    run_on,
    simulated,
    verdict,
    with_spread,
)

SECTIONS = ("machine", "decode", "closed", "ttft", "verify")
POINT = ("section", "configuration", "size")  # the folders of a point, those that it has
MACHINE_NEEDS = "needs a CUDA device"
Row = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """Bytes per second: what the data sheet promises, and what was read in this run. None: not known."""

    sheet: float | None
    read: float | None


@dataclass(frozen=True)
class Column:
    """A column of the CSV. Where `value` lacks what it needs, nothing was measured."""

    title: str
    decimals: int
    value: Callable[..., Any]


@dataclass(frozen=True)
class Section:
    """How Markdown shows a section: the number it is about, its columns, whom the ratio is over, what a size is, and
    which configurations it has."""

    title: str
    size: str
    primary: str
    base: str
    columns: tuple[str, ...]
    configurations: str


def _metric(name: str, factor: float = 1.0) -> Callable[[RunRecord], Any]:
    return lambda record: factor * record.metrics[name]  # type: ignore[operator]  # None: see Column


def _graphs(name: str, *kinds: str) -> Callable[[RunRecord], Any]:
    """A counter of graphs, summed over those of the kinds that were asked for."""

    def value(record: RunRecord) -> int | None:
        found = [graph[name] for kind in kinds for graph in graphs_of(record, kind)]
        return sum(sum(one.values()) if isinstance(one, dict) else one for one in found) if found else None

    return value


def _coverage(record: RunRecord) -> Any:
    return 100 * record.metrics["graph_coverage"] if Graphs(**record.config["graphs"]).any else None  # type: ignore[operator]


# Of one record; the table has the median over repeats.
MEASURED = {
    "read_tb_s": Column("read TB/s", 2, _metric("read_bytes_s", 1e-12)),
    "gemm_tflop_s": Column("bf16 GEMM TFLOP/s", 0, _metric("gemm_flop_s", 1e-12)),
    "step_ms": Column("ms per step", 2, lambda r: None if unmeasured(r) else 1e3 * r.metrics["step_s"]),
    "step_gb": Column("GB per step", 2, lambda r: r.workload["step_bytes"] / 1e9),
    "products_ms": Column("products alone (ms)", 2, _metric("products_s", 1e3)),
    "output_tok_s": Column("output tok/s", 0, _metric("output_throughput")),
    "mean_tpot_ms": Column("mean TPOT (ms)", 2, _metric("mean_tpot_s", 1e3)),
    "mean_ttft_ms": Column("mean TTFT (ms)", 1, _metric("mean_ttft_s", 1e3)),
    "median_ttft_ms": Column("median TTFT (ms)", 2, _metric("median_ttft_s", 1e3)),
    "accept_length": Column("accept length", 3, lambda r: r.metrics["accept_length"] if drafts(r) else None),
    "decode_replays": Column("decode replays", 0, _graphs("replays", "decode")),
    "prefill_replays": Column("prefill replays", 0, _graphs("replays", "prefill")),
    "fallbacks": Column("fallbacks", 0, _graphs("fallbacks", "decode", "prefill")),
    "padded": Column("padded", 0, _graphs("padded", "decode", "prefill")),
    "graph_coverage_percent": Column("graph coverage %", 0, _coverage),
    "launch_lead_ms": Column("launch lead (ms)", 2, _metric("launch_lead_s", 1e3)),
    "late_launch_percent": Column("late launches %", 1, _metric("late_launch_share", 100)),
    "host_waits_per_step": Column("host waits per step", 2, _metric("host_waits_per_step")),
    "host_ms_per_step": Column(
        "host ms per step", 2, lambda r: 1e3 * r.counters["iteration_s"] / r.counters["iterations"]
    ),
    "device_idle_percent": Column("device idle %", 1, _metric("device_idle_share", 100)),
}
# Of a row with the above and the bounds of the run, so that the numbers of a row agree.
DERIVED = {
    "decode_tok_s": Column("tok/s", 0, lambda row, _: 1e3 * row["size"] / row["step_ms"]),
    "step_gb_s": Column("GB/s", 0, lambda row, _: 1e3 * row["step_gb"] / row["step_ms"]),
    "sheet_percent": Column("% of data sheet", 0, lambda row, bounds: 1e11 * row["step_gb_s"] / bounds.sheet),
    "read_percent": Column("% of read", 0, lambda row, bounds: 1e11 * row["step_gb_s"] / bounds.read),
    "floor_ms": Column("floor ms", 2, lambda row, bounds: 1e12 * row["step_gb"] / bounds.read),
    "over_products": Column(
        "times products", 2, lambda row, _: row[SHOWN[row["section"]].primary] / row["products_ms"]
    ),
}
COLUMNS = MEASURED | DERIVED
_COUNTERS = tuple(MEASURED)[list(MEASURED).index("accept_length") :]
_PRODUCTS = ("products_ms", "over_products")
_STEP = (
    *("decode_tok_s", "step_gb", "step_gb_s", "sheet_percent", "read_percent", "floor_ms"),
    *_PRODUCTS,
    *_COUNTERS,
)
_ASKED = "those of --configs, by default what the device can"
SHOWN: dict[str, Section] = {
    "decode": Section(
        "Decode step", "batch", "step_ms", "v1", _STEP,
        f"{_ASKED}; v2+piecewise, which decodes like v2, only where it is alone",
    ),
    "closed": Section(
        "Closed loop", "concurrency", "output_tok_s", "v1", ("mean_tpot_ms", "mean_ttft_ms", *_COUNTERS), _ASKED
    ),
    "ttft": Section(
        "First token of one request", "prompt tokens", "median_ttft_ms", "v2", (*_PRODUCTS, *_COUNTERS), _ASKED
    ),
    "verify": Section("Verify step", "batch", "step_ms", "v2", _STEP, "always v2, with 1 and with 16 rows"),
}  # fmt: skip
# What the notes say of a section that was run.
_METHODS = {
    "steps": "Steps: {input_len} prompt tokens, {tokens} new ones, the difference of the two runs. Bytes: the weights "
    "that a step uses (an embedding table that is not the head is not read) and KV at {mean_context:.0f} tokens. "
    "Counters are those of the longer run.",
    "floor": "Floor: the bytes of a step at the read bandwidth measured here.",
    "products": "Products: the matrix products alone by torch's linear on weights of their shapes, measured once.",
    "closed": "Closed loop: {input_len} prompt tokens, {output_len} new ones, two prompts per request kept unfinished "
    "(3 in all at 1); output tokens over wall time, prefill included.",
    "ttft": "First token: each request alone on the engine, from its submission to its first token on the host.",
    "verify": "A simulated accept length of 1 makes each verify give one token, so that the batch stays together.",
}
PRIMARY = tuple(dict.fromkeys(section.primary for section in SHOWN.values()))


def load_records(folder: Path) -> list[RunRecord]:
    """The records of a bench, ordered by section, size, configuration and repeat."""
    records = [RunRecord.load(path.parent) for path in folder.rglob("r*/record.json")]
    if not records:
        raise refuse("folder", str(folder), "holds no records of a bench (SECTION/CONFIGURATION/SIZE/rN/record.json)")

    def place(record: RunRecord) -> tuple[int, ...]:
        work = record.workload
        return (SECTIONS.index(work["section"]), work["size"], work["place"], work["repeat"])

    return sorted(records, key=place)


def table(records: list[RunRecord]) -> list[Row]:
    """One row per section, size and configuration; None where nothing was measured."""
    groups: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in records:
        work = record.workload
        groups.setdefault((work["section"], work["size"], work.get("configuration")), []).append(record)
    bounds = bounds_of(records)
    return [_row(key, groups, bounds) for key in groups]


def bounds_of(records: list[RunRecord]) -> Bounds:
    speeds = [speed for record in records if (speed := record.metrics.get("read_bytes_s")) is not None]
    return Bounds(data_sheet_bandwidth(records[0].hardware.get("gpu")), median(speeds) if speeds else None)


def unmeasured(record: RunRecord) -> str | None:
    """Why a point that did not fail has no number of its own."""
    work, metrics = record.workload, record.metrics
    if "error" in work:
        return None
    if work["section"] == "machine":
        return MACHINE_NEEDS if metrics["read_bytes_s"] is None else None
    if work.get("iterations") != work.get("steps"):
        return f"NOT IN STEP: {work['iterations']} iterations for {work['steps']} tokens"
    if "step_s" in metrics and (metrics["step_s"] or 0.0) <= 0:
        short, long = work["new_tokens"]
        return f"NOT MEASURED: {long} new tokens took no longer than {short}; give numbers further apart"
    return None


def _row(key: tuple[Any, ...], groups: dict[tuple[Any, ...], list[RunRecord]], bounds: Bounds) -> Row:
    section, size, name = key
    records = groups[key]
    values = {column: _values(column, records) for column in MEASURED}
    row: Row = {"section": section, "size": size or None, "configuration": name}
    row["repeats"] = sum("error" not in record.workload for record in records)
    for column, found in values.items():
        row[column] = median(found.values()) if found else None
        if column in PRIMARY:
            row |= _spread(column, list(found.values()))
    for column, derived in DERIVED.items():
        row[column] = _number_or_none(derived.value, row, bounds)
    ratios: list[float] = []
    if section in SHOWN:
        primary = SHOWN[section].primary
        row["repeats"] = len(values[primary])
        base = _values(primary, groups.get((section, size, SHOWN[section].base), []))
        ratios = [ours / base[repeat] for repeat, ours in values[primary].items() if repeat in base]
    row["ratio"] = median(ratios) if ratios else None
    row |= _spread("ratio", ratios)
    plain = [record for (*point, _), others in groups.items() if point == [section, size] for record in others]
    needed = [even for record in records if (even := _break_even(record, plain)) is not None]
    row["break_even"] = median(needed) if needed else None
    row["speculation"] = verdict(row["accept_length"], row["break_even"], simulated(records[0]))
    row["not_measured"] = next((why for record in records if (why := unmeasured(record))), None)
    row["failed"] = next((work["error"] for record in records if "error" in (work := record.workload)), None)
    return row


def _break_even(record: RunRecord, beside: list[RunRecord]) -> float | None:
    """Over the plain decoding of the same repeat."""
    repeat = record.workload["repeat"]
    plain = [other for other in beside if not drafts(other) and other.workload["repeat"] == repeat]
    return break_even(record, plain) if drafts(record) else None


def losses_of(records: list[RunRecord]) -> str | None:
    """What to say of the points at which drafting did not pay; None if it did."""
    points = {tuple(record.workload.get(key) for key in POINT): record for record in records}
    rows = (row for row in table(records) if row["speculation"])
    return losses(
        (_where(r), r["accept_length"], r["break_even"], points[tuple(r[key] for key in POINT)]) for r in rows
    )


def _values(column: str, records: list[RunRecord]) -> dict[int, float]:
    """By repeat, where it was measured."""
    found = {record.workload["repeat"]: _number_or_none(MEASURED[column].value, record) for record in records}
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
    """The figures of other engines that stand beside ours."""
    points = [record.workload for record in records if record.workload["section"] in SHOWN]
    asked = {(work["section"], work["size"], SHOWN[work["section"]].primary) for work in points}
    return comparable(folder, records, asked)


def markdown(records: list[RunRecord], rows: list[Row], peers: dict[Point, Peer]) -> str:
    """What was run on what, a table per section, and what a reader must know before believing it."""
    parts = [_heading(records, rows)]
    for name, section in SHOWN.items():
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
    drafting = any(row["break_even"] is not None for row in rows)
    beside = [peers.get((row["section"], row["size"], section.primary), {}) for row in rows]
    named = list(dict.fromkeys(name for figures in beside for name in figures))
    body = [
        [
            row["size"],
            row["configuration"],
            _with_spread(row, section.primary, COLUMNS[section.primary].decimals),
            _with_spread(row, "ratio", 2),
            *(number(row[column], COLUMNS[column].decimals) for column in columns),
            *((number(row["break_even"], 3), row["speculation"] or "-") if drafting else ()),
            *(figures.get(name, "-") for name in named),
        ]
        for row, figures in zip(rows, beside, strict=True)
    ]
    titles = [COLUMNS[column].title for column in (section.primary, *columns)]
    headers = [section.size, "configuration", titles[0], f"ratio to {section.base}", *titles[1:]]
    headers += [*(("break-even accept length", "speculation") if drafting else ()), *named]
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


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
        caps = caps_text(record, (*CAPS, "kv_dtype", "attention_backend", "capture_s"))
        lines[name] = (
            f"{Speculation(**record.config['speculation'])}; graphs: decode {graphs.decode}, prefill {graphs.prefill}"
            f"{'; ' if caps else ''}{caps}{_started(record)}"
        )
    return heading(lines)


def _started(record: RunRecord) -> str:
    seconds = record.workload.get("start_s")
    return "" if seconds is None else f"; ready after {seconds:.1f} s"


def _notes(records: list[RunRecord], rows: list[Row]) -> Iterator[str]:
    yield "Medians over repeats (smallest-largest); ratios within a repeat. Random prompts, greedy, end tokens ignored."
    sound = [record.workload for record in records if "error" not in record.workload]
    first = {work["section"]: work for work in reversed(sound)}
    if steps := first.get("decode") or first.get("verify"):
        first["steps"] = steps
        if bounds_of(records).read:
            first["floor"] = steps
    if products := steps or first.get("ttft"):
        first["products"] = products
    for name, text in _METHODS.items():
        if name in first:
            yield text.format(**first[name], tokens=" and ".join(map(str, first[name]["new_tokens"])))
    if any(row["break_even"] is not None for row in rows):
        yield BREAK_EVEN
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
            yield f"PRODUCTS FAILED: {where}: {work['products_error']}"
        yield from replay_notes(record, where)
        yield from (f"{where}, repeat {work['repeat']}, {line}." for line in steps_text([record.counters], record.caps))
        if record.metrics.get("retractions"):
            yield f"RETRACTED: {where}: {record.metrics['retractions']} requests waited for pages."


def _where(row: Row) -> str:
    return " ".join(str(row[key]) for key in POINT if row.get(key) is not None)


def _with_spread(row: Row, column: str, decimals: int) -> str:
    values = (row[column], row[f"{column}_min"], row[f"{column}_max"])
    return with_spread(values, decimals, row["repeats"])
