"""The table of `specbatch bench`, made from nothing but the records in its folder.

A number is the median over repeats; what a section is about also has its smallest and largest. A ratio is over the
section's base configuration in the same repeat. Figures of other engines stand beside ours where the folder holds a
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

from specbatch.config import Speculation
from specbatch.errors import refuse
from specbatch.metrics import RunRecord, write_atomic
from specbatch.sweeps.machine import data_sheet_bandwidth

SECTIONS = ("machine", "decode", "closed", "ttft", "verify")
POINT = ("section", "configuration", "size")  # the folders of a point, those that it has
PEERS = "peers.csv"
_PEER_COLUMNS = ("model", "dtype", "gpu", "section", "size", "column", "peer", "value")
Row = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """Bytes per second: what the data sheet promises, and what was read in this run. None: not known."""

    sheet: float | None
    read: float | None


Value = Callable[[Any, Any], Any]  # (RunRecord, Bounds) -> number


@dataclass(frozen=True)
class Column:
    """A column of the CSV. Where `value` lacks what it needs, nothing was measured."""

    title: str
    decimals: int
    value: Value


@dataclass(frozen=True)
class Section:
    """How Markdown shows a section: the number it is about, its columns, whom the ratio is over, what a size is."""

    title: str
    size: str
    primary: str
    base: str
    columns: tuple[str, ...] = ()


def _metric(name: str, factor: float = 1.0) -> Value:
    return lambda record, bounds: factor * record.metrics[name]


def _counter(name: str) -> Value:
    return lambda record, bounds: record.counters[name]


def _per(name: str, count: str, factor: float = 1.0) -> Value:
    return lambda record, bounds: factor * record.counters[name] / record.counters[count]


def _speed(record: Any, bounds: Any = None) -> Any:
    """Bytes per second of a step."""
    return record.workload["step_bytes"] / record.metrics["step_s"]


def _time(record: Any) -> Any:
    """What the matrix products are a part of: a step, or the time to the first token."""
    return record.metrics["step_s"] if "step_s" in record.metrics else record.metrics["median_ttft_s"]


def _fallbacks(record: Any, bounds: Any) -> Any:
    """Passes that ran eagerly although graphs had been asked for."""
    reasons = [graph["fallbacks"] for graph in record.counters["graphs"].values()]
    return sum(count for counts in reasons for reason, count in counts.items() if reason != "off")


def _idle(record: Any, bounds: Any) -> Any:
    """Share of a gap in step and gap, in percent."""
    counters = record.counters
    gap, step = counters["device_idle_s"] / counters["device_gaps"], counters["device_s"] / counters["device_steps"]
    return 100 * gap / (gap + step)


COLUMNS = {
    "read_tb_s": Column("read TB/s", 2, _metric("read_bytes_s", 1e-12)),
    "gemm_tflop_s": Column("bf16 GEMM TFLOP/s", 0, _metric("gemm_flop_s", 1e-12)),
    "step_ms": Column("ms per step", 2, _metric("step_s", 1e3)),
    "decode_tok_s": Column("tok/s", 0, lambda r, _: r.workload["concurrency"] / r.metrics["step_s"]),
    "step_gb": Column("GB per step", 2, lambda r, _: r.workload["step_bytes"] / 1e9),
    "step_gb_s": Column("GB/s", 0, lambda r, _: _speed(r) / 1e9),
    "sheet_percent": Column("% of data sheet", 0, lambda r, bounds: 100 * _speed(r) / bounds.sheet),
    "read_percent": Column("% of read", 0, lambda r, bounds: 100 * _speed(r) / bounds.read),
    "floor_ms": Column("floor ms", 2, lambda r, bounds: 1e3 * r.workload["step_bytes"] / bounds.read),
    "products_ms": Column("products alone (ms)", 2, _metric("products_s", 1e3)),
    "over_products": Column("times products", 2, lambda r, _: _time(r) / r.metrics["products_s"]),
    "output_tok_s": Column("output tok/s", 0, _metric("output_throughput")),
    "mean_tpot_ms": Column("mean TPOT (ms)", 2, _metric("mean_tpot_s", 1e3)),
    "mean_ttft_ms": Column("mean TTFT (ms)", 1, _metric("mean_ttft_s", 1e3)),
    "median_ttft_ms": Column("median TTFT (ms)", 2, _metric("median_ttft_s", 1e3)),
    "decode_replays": Column("decode replays", 0, lambda r, _: r.counters["graphs"]["decode"]["replays"]),
    "prefill_replays": Column("prefill replays", 0, lambda r, _: r.counters["graphs"]["target_prefill"]["replays"]),
    "fallbacks": Column("fallbacks", 0, _fallbacks),
    "padded": Column("padded", 0, lambda r, _: sum(graph["padded"] for graph in r.counters["graphs"].values())),
    "launch_lead_ms": Column("launch lead (ms)", 2, _per("launch_lead_s", "overlapped", 1e3)),
    "late_launches": Column("late launches", 0, _counter("late_launches")),
    "host_waits_per_step": Column("host waits per step", 2, _per("host_waits", "iterations")),
    "host_ms_per_step": Column("host ms per step", 2, _per("iteration_s", "iterations", 1e3)),
    "device_idle_percent": Column("device idle %", 1, _idle),
}
_COUNTERS = tuple(COLUMNS)[list(COLUMNS).index("decode_replays") :]
_STEP = (
    "decode_tok_s",
    "step_gb",
    "step_gb_s",
    "sheet_percent",
    "read_percent",
    "floor_ms",
    "products_ms",
    "over_products",
    *_COUNTERS,
)
SHOWN = {
    "decode": Section("Decode step", "batch", "step_ms", "v1", _STEP),
    "closed": Section("Closed loop", "concurrency", "output_tok_s", "v1", ("mean_tpot_ms", "mean_ttft_ms", *_COUNTERS)),
    "ttft": Section(
        "First token of one request",
        "prompt tokens",
        "median_ttft_ms",
        "v2",
        ("products_ms", "over_products", *_COUNTERS),
    ),
    "verify": Section("Verify step", "batch", "step_ms", "v2", _STEP),
}
# What the notes say of a section that was run.
_METHODS = {
    "steps": "Steps: {input_len} prompt tokens, {tokens} new ones, the difference of the two runs. Bytes: the weights "
    "that a step uses (an embedding table that is not the head is not read) and KV at {mean_context:.0f} tokens; the "
    "floor is these bytes at the read bandwidth measured here. Counters are those of the longer run.",
    "products": "Products: the matrix products alone by torch's linear on weights of their shapes, measured once.",
    "closed": "Closed loop: {input_len} prompt tokens, {output_len} new ones, two prompts per request kept unfinished "
    "(3 in all at 1); output tokens over wall time, prefill included.",
    "ttft": "First token: each request alone on the engine, from its submission to its first token on the host.",
    "verify": "A simulated accept length of 1 makes each verify give one token, so that the batch stays together.",
}
_CAPS = (
    *("max_running", "max_model_len", "kv_pages", "page_size", "prefill_chunk"),
    *("kv_dtype", "attention_backend", "capture_s"),
)
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


def _row(key: tuple[Any, ...], groups: dict[tuple[Any, ...], list[RunRecord]], bounds: Bounds) -> Row:
    section, size, name = key
    values = {column: _values(column, groups[key], bounds) for column in COLUMNS}
    row: Row = {"section": section, "size": size or None, "configuration": name}
    row["repeats"] = sum("error" not in record.workload for record in groups[key])
    for column, found in values.items():
        row[column] = median(found.values()) if found else None
        if column in PRIMARY:
            row |= _spread(column, list(found.values()))
    ratios: list[float] = []
    if section in SHOWN:
        primary = SHOWN[section].primary
        base = _values(primary, groups.get((section, size, SHOWN[section].base), []), bounds)
        ratios = [ours / base[repeat] for repeat, ours in values[primary].items() if repeat in base]
    row["ratio"] = median(ratios) if ratios else None
    row |= _spread("ratio", ratios)
    row["failed"] = next((work["error"] for record in groups[key] if "error" in (work := record.workload)), None)
    return row


def _values(column: str, records: list[RunRecord], bounds: Bounds) -> dict[int, float]:
    """By repeat, where it was measured."""
    found = {}
    for record in records:
        try:
            found[record.workload["repeat"]] = float(COLUMNS[column].value(record, bounds))
        except (KeyError, TypeError, ZeroDivisionError):  # the record has no such number
            continue
    return found


def _spread(name: str, values: list[float]) -> Row:
    return {f"{name}_min": min(values, default=None), f"{name}_max": max(values, default=None)}


def write_table(folder: Path) -> str:
    """Write `summary.csv` and `summary.md` into `folder`; return the Markdown."""
    records = load_records(folder)
    rows = table(records)
    kept = folder / PEERS
    peers = csv.DictReader(kept.read_text(encoding="utf-8").splitlines()) if kept.exists() else ()
    text = markdown(records, rows, [peer for peer in peers if _comparable(peer, records)])
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(folder / "summary.csv", out.getvalue())
    write_atomic(folder / "summary.md", text)
    return text


def read_peers(source: Path) -> str:
    """The text of a CSV of other engines' figures, checked. A bench keeps it as `peers.csv` beside its records."""
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse("peers", str(source), f"cannot be read ({error.strerror})") from None
    if not set(_PEER_COLUMNS) <= set(next(csv.reader(text.splitlines()), ())):
        raise refuse("peers", str(source), f"needs the columns {', '.join(_PEER_COLUMNS)}")
    return text


def markdown(records: list[RunRecord], rows: list[Row], peers: list[Row]) -> str:
    """What was run on what, a table per section, and what a reader must know before believing it."""
    parts = [_heading(records, rows)]
    for name, section in SHOWN.items():
        own = [row for row in rows if row["section"] == name]
        if own:
            parts.append(
                f"## {section.title}\n\n{_section(section, own, [p for p in peers if p['section'] == name])}\n"
            )
    parts.append("".join(f"* {note}\n" for note in _notes(records, rows)))
    return "\n".join(parts)


def _section(section: Section, rows: list[Row], peers: list[Row]) -> str:
    from tabulate import tabulate

    columns = [column for column in section.columns if any(row[column] is not None for row in rows)]
    named = list(dict.fromkeys(peer["peer"] for peer in peers))
    figures = {(peer["peer"], peer["size"]): peer["value"] for peer in peers if peer["column"] == section.primary}
    body = [
        [
            row["size"],
            row["configuration"],
            _with_spread(row, section.primary, COLUMNS[section.primary].decimals),
            _with_spread(row, "ratio", 2),
            *(_number(row[column], COLUMNS[column].decimals) for column in columns),
            *(figures.get((name, str(row["size"])), "-") for name in named),
        ]
        for row in rows
    ]
    titles = [COLUMNS[column].title for column in (section.primary, *columns)]
    headers = [section.size, "configuration", titles[0], f"ratio to {section.base}", *titles[1:], *named]
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def _comparable(peer: Row, records: list[RunRecord]) -> bool:
    """Is the figure of another engine for the same model, type and device?"""
    first = records[0]
    same = (peer["model"], peer["dtype"]) == (first.config["model"], _dtype(records))
    return same and peer["gpu"] in (first.hardware.get("gpu") or "")


def _dtype(records: list[RunRecord]) -> str:
    """As resolved by an engine, where there is one."""
    asked: str = records[0].config["dtype"]
    return next((record.caps["dtype"] for record in records if "dtype" in record.caps), asked)


def _heading(records: list[RunRecord], rows: list[Row]) -> str:
    from specbatch.config import Graphs

    first = records[0]
    engines = {record.workload["configuration"]: record for record in records if record.workload.get("configuration")}
    device = first.hardware.get("gpu") or f"{first.hardware['cpu']}, {first.hardware['cores']} cores"
    lines = {
        "model": f"{first.config['model']} ({first.config['load_format']})",
        "device": f"{first.caps.get('device', first.config['device'])} ({device})",
        "dtype": _dtype(records),
        "versions": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
    }
    bounds = bounds_of(records)
    machine = [row for row in rows if row["section"] == "machine" and row["gemm_tflop_s"] is not None]
    if bounds.sheet:
        lines["data sheet"] = f"{bounds.sheet / 1e12:.1f} TB/s"
    if machine:
        lines["measured"] = (
            f"read {machine[0]['read_tb_s']:.2f} TB/s, bf16 GEMM {machine[0]['gemm_tflop_s']:.0f} TFLOP/s"
        )
    for name, record in engines.items():
        graphs = Graphs(**record.config["graphs"])
        caps = ", ".join(f"{cap} {_cap(record.caps[cap])}" for cap in _CAPS if cap in record.caps)
        lines[name] = (
            f"{Speculation(**record.config['speculation'])}; graphs: decode {graphs.decode}, prefill {graphs.prefill}"
            f"{'; ' if caps else ''}{caps}{_started(record)}"
        )
    return "".join(f"* {name}: {value}\n" for name, value in lines.items())


def _cap(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _started(record: RunRecord) -> str:
    seconds = record.workload.get("start_s")
    return "" if seconds is None else f"; ready after {seconds:.1f} s"


def _notes(records: list[RunRecord], rows: list[Row]) -> Iterator[str]:
    yield "Medians over repeats (smallest-largest); ratios within a repeat. Random prompts, greedy, end tokens ignored."
    sound = [record.workload for record in records if "error" not in record.workload]
    first = {work["section"]: work for work in reversed(sound)}
    if steps := first.get("decode") or first.get("verify"):
        first["steps"] = steps
    if products := steps or first.get("ttft"):
        first["products"] = products
    for name, text in _METHODS.items():
        if name in first:
            yield text.format(**first[name], tokens=" and ".join(map(str, first[name]["new_tokens"])))
    for row in rows:
        if row["failed"]:
            yield f"FAILED: {_where(row)}: {row['failed']}"
    for record in records:
        work = record.workload
        if work.get("iterations", 0) != work.get("steps", 0):
            yield f"NOT IN STEP: {_where(work)}: {work['iterations']} iterations for {work['steps']} tokens."
        if record.metrics.get("retractions"):
            yield f"RETRACTED: {_where(work)}: {record.metrics['retractions']} requests waited for pages."


def _where(row: Row) -> str:
    return " ".join(str(row[key]) for key in POINT if row.get(key) is not None)


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _with_spread(row: Row, column: str, decimals: int) -> str:
    text = _number(row[column], decimals)
    if row[column] is None or row["repeats"] < 2:
        return text
    return f"{text} ({row[f'{column}_min']:.{decimals}f}-{row[f'{column}_max']:.{decimals}f})"
