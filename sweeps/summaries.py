"""What the tables of a sweep and of a bench share: lines of the heading, numbers, what is said of graphs."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

from specbatch.metrics import RunRecord

CAPS = ("max_running", "max_model_len", "kv_pages", "page_size", "prefill_chunk")


def run_on(records: list[RunRecord]) -> dict[str, str]:
    """Model, device, type and versions, by the name of their line."""
    first = records[0]
    config, hardware = first.config, first.hardware
    device = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores"
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    return {
        "model": f"{config['model']}{origin}",
        "device": f"{_resolved('device', records)} ({device})",
        "dtype": _resolved("dtype", records),
        "versions": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
    }


def _resolved(name: str, records: list[RunRecord]) -> str:
    """A setting as an engine has it, or as it was asked for where no engine could be made."""
    found: str = ChainMap(*(record.caps for record in records)).get(name, records[0].config[name])
    return found


def heading(lines: dict[str, str]) -> str:
    return "".join(f"* {name}: {value}\n" for name, value in lines.items())


def caps_text(record: RunRecord, names: tuple[str, ...] = CAPS) -> str:
    """Those that the record has."""
    found = {name: record.caps[name] for name in names if name in record.caps}
    return ", ".join(f"{name} {f'{cap:.1f}' if isinstance(cap, float) else cap}" for name, cap in found.items())


def number(value: float | None, decimals: int) -> str:
    """A dash where nothing was measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def with_spread(values: tuple[float | None, float | None, float | None], decimals: int, repeats: int) -> str:
    """Middle, smallest and largest of several repeats."""
    middle, low, high = (number(value, decimals) for value in values)
    return middle if middle == "-" or repeats < 2 else f"{middle} ({low}-{high})"


def graphs_of(record: RunRecord, kind: str) -> list[dict[str, Any]]:
    """The counters of graphs of a kind, decode or prefill (of target and draft); none where eager was asked for."""
    if record.config["graphs"][kind] == "off":
        return []
    return [graph for name, graph in record.counters.get("graphs", {}).items() if name.endswith(kind)]


def replay_notes(record: RunRecord, where: str) -> Iterator[str]:
    for kind, mode in record.config["graphs"].items():
        if mode != "off" and not any(graph["replays"] for graph in graphs_of(record, kind)):
            yield f"NO REPLAYS: {where}: {kind} graphs were asked for and none was replayed."
