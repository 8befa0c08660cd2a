"""Figures of other engines from a CSV: checked before a bench, kept in its folder, shown in its tables.

Columns: model, dtype, gpu (a part of the device's name, empty for any), section, size, column (a number that the
section is about), peer (what is shown above the figure), value. For engines that draft also algorithm, draft_steps,
draft_topk, draft_tokens (the root not counted) and accept_length, the one that was simulated; empty or absent columns
mean no speculation. A figure is shown only for a configuration that drafts in the same way.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION
from specbatch.config.draft_shape import shape_of
from specbatch.errors import SpecbatchError, refuse
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.bench.sections import KINDS, kind_of
from specbatch.sweeps.report.heading import run_on

PEERS = "peers.csv"
_COLUMNS = ("model", "dtype", "gpu", "section", "size", "column", "peer", "value")
# By section, size and configuration: values by column and peer.
Figures = dict[tuple[str, int, str], dict[tuple[str, str], str]]
_SHAPE = ("draft_steps", "draft_topk", "draft_tokens")
_DRAFTING = ("algorithm", *_SHAPE, "accept_length")


def read_peers(source: Path) -> str:
    """The text of the file, checked. A bench keeps it as `peers.csv` next to its records."""
    try:
        text = source.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(reader, [])
        if not set(_COLUMNS) <= set(header):
            raise refuse("peers", str(source), f"needs the columns {', '.join(_COLUMNS)}")
        for cells in reader:
            if cells and (wrong := _wrong(header, cells)):
                raise refuse("peers", str(source), f"line {reader.line_num}: {wrong}")
    except OSError as error:
        raise refuse("peers", str(source), f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise refuse("peers", str(source), "is not UTF-8 text; use a CSV file") from None
    except csv.Error as error:
        raise refuse("peers", str(source), f"is not a CSV file ({error})") from None
    return text


def _wrong(header: list[str], cells: list[str]) -> str | None:
    if len(cells) != len(header):
        return f"{len(cells)} cells under {len(header)} columns"
    row = dict(zip(header, cells, strict=True))
    if row["section"] not in KINDS:
        return f"section {row['section']!r}: use one of {', '.join(KINDS)}"
    if row["column"] not in (columns := KINDS[row["section"]].peers):
        return f"column {row['column']!r}: section {row['section']} has {', '.join(columns)}"
    kinds: dict[str, type[int] | type[float]] = {"size": int, "value": float}
    if any(row.get(column) for column in _DRAFTING):
        if not all(row.get(column) for column in _DRAFTING):
            return f"give all of {', '.join(_DRAFTING)}, or none of them for no speculation"
        if row["algorithm"] not in ALGORITHMS or row["algorithm"] == NO_SPECULATION:
            return f"algorithm {row['algorithm']!r} drafts nothing here; use one of {', '.join(ALGORITHMS)}"
        kinds |= dict.fromkeys(_SHAPE, int) | {"accept_length": float}
    for column, kind in kinds.items():
        try:
            if not math.isfinite(kind(row[column])):
                raise ValueError
        except ValueError:
            return f"{column} {row[column]!r} is not a {'whole ' if kind is int else ''}number"
    try:
        _drafting(row)
    except SpecbatchError as error:
        return str(error)
    return None


def figures_of(folder: Path, records: Mapping[str, list[RunRecord]]) -> Figures:
    """The figures that `peers.csv` in `folder` has for points of these sections: same model, dtype, device and
    speculation."""
    kept = folder / PEERS
    text = kept.read_text(encoding="utf-8") if kept.exists() else ""
    found: Figures = {}
    for peer in csv.DictReader(io.StringIO(text, newline="")):
        named = (own for section, own in records.items() if kind_of(section) == peer["section"])
        for record in chain.from_iterable(named):
            kind, work = KINDS[peer["section"]], record.workload
            size = _size(peer["section"], record)
            settings = (record.config["model"], run_on([record])["dtype"], str(size), drafting_of(record))
            same = settings == (peer["model"], peer["dtype"], peer["size"], _drafting(peer))
            if same and peer["gpu"] in (record.gpu or "") and peer["column"] in kind.peers:
                point = found.setdefault((peer["section"], size, work["configuration"]), {})
                point[peer["column"], peer["peer"]] = peer["value"]
    return found


def differences_from(folder: Path, records: Mapping[str, list[RunRecord]]) -> str:
    """In what all rows of `peers.csv` differ from the points of these sections, or else what a row has to match."""
    rows = list(csv.DictReader(io.StringIO((folder / PEERS).read_text(encoding="utf-8"), newline="")))
    points = [(kind_of(section), record) for section, own in records.items() for record in own if not record.error]
    kinds = {
        "model": ({record.config["model"] for _, record in points}, {row["model"] for row in rows}),
        "dtype": ({run_on([record])["dtype"] for _, record in points}, {row["dtype"] for row in rows}),
        "device": (
            {record.gpu or "cpu" for _, record in points},
            {
                next((gpu for _, one in points if row["gpu"] in (gpu := one.gpu or "")), row["gpu"]) or "cpu"
                for row in rows
            },
        ),
        "drafts": (
            {drafting_of(record) or "none" for _, record in points},
            {_drafting(row) or "none" for row in rows},
        ),
        "point": (
            {f"{kind} {_size(kind, record)}" for kind, record in points},
            {f"{row['section']} {row['size']}" for row in rows},
        ),
    }
    found = [
        f"{name} ({', '.join(sorted(theirs))} there, {', '.join(sorted(ours))} here)"
        for name, (ours, theirs) in kinds.items()
        if not ours & theirs
    ]
    return f"its rows differ in {'; '.join(found)}" if found else f"a row must match in all of {', '.join(kinds)}"


def _size(kind: str, record: RunRecord) -> int:
    """The number by which the table of a section is ordered."""
    size: int = record.workload["concurrency" if KINDS[kind].size == "concurrency" else "input_len"]
    return size


def drafting_of(record: RunRecord) -> str:
    """Algorithm, shape and simulated mean accept length of a record of a bench; "" without speculation."""
    if not record.drafts:
        return ""
    asked, mean = record.speculation, record.simulated_accept_length
    return f"{asked.algorithm}, {asked.shape}, accept length {'real' if mean is None else f'{mean:g}'}"


def _drafting(peer: dict[str, str]) -> str:
    """The same of a row of the CSV. Raises SpecbatchError for a shape that is impossible."""
    if not peer.get("algorithm"):
        return ""
    shape = shape_of(peer["algorithm"], *(int(peer[column]) for column in _SHAPE))
    return f"{peer['algorithm']}, {shape}, accept length {float(peer['accept_length']):g}"
