"""Headings and cells that the tables of `sweep`, `bench` and `check` share."""

from __future__ import annotations

from collections import ChainMap

from specbatch.records.run_record import CAPS, RunRecord
from specbatch.weights.known_models import KNOWN_MODELS


def run_on(records: list[RunRecord]) -> dict[str, str]:
    """Model, device, number of replicas if there are several, dtype and versions, by the name of their line; of this
    engine, if some of the records are of servers."""
    own = [record for record in records if "server" not in record.config]
    records = own or records
    first = records[0]
    config, device = first.config, first.processor
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    if "server" in config:
        device = f"unknown; client on {device}"
        known = first.caps.get("server_version")
        versions = f"{f'server {known}' if known else 'unknown'}; client with {versions}"
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    if not origin and "server" not in config and (known := KNOWN_MODELS.get(config["model"])):
        origin = f" ({known.format})"  # Q4_1 says that its scores are not those of the original weights
    return {
        "model": f"{config['model']}{origin}",
        "device": f"{_resolved('device', records)} ({device})",
        **_replicas(records),
        "dtype": _resolved("dtype", records),
        **({"deterministic": _deterministic(records)} if any(one.is_deterministic for one in records) else {}),
        "versions": versions,
    }


def _replicas(records: list[RunRecord]) -> dict[str, str]:
    """A line on the number of replicas, by configuration where it differs; none where all have one."""
    counts = {str(record.workload.get("configuration", "")): record.replicas for record in records}
    if max(counts.values()) == 1:
        return {}
    if len({*counts.values()}) == 1:
        return {"replicas": str(records[0].replicas)}
    return {"replicas": "; ".join(f"{name}: {count}" for name, count in counts.items())}


def _deterministic(records: list[RunRecord]) -> str:
    if all(record.is_deterministic for record in records):
        return "yes"
    names = dict.fromkeys(record.workload.get("configuration") for record in records if record.is_deterministic)
    return f"{', '.join(map(str, names))} only"


def _resolved(name: str, records: list[RunRecord]) -> str:
    """A setting as the engine resolved it, or as requested if no engine could be built."""
    found: str = ChainMap(*(record.caps for record in records)).get(name, records[0].config[name])
    return found


def heading(lines: dict[str, str]) -> str:
    """Markdown: a list of "name: value"."""
    return "".join(f"* {name}: {value}\n" for name, value in lines.items())


def caps_text(record: RunRecord, names: tuple[str, ...] = CAPS) -> str:
    """The capacities of a record, without those that are zero because the model does not have them."""
    found = {name: record.caps[name] for name in names if record.caps.get(name)}
    return ", ".join(f"{name} {f'{cap:.1f}' if isinstance(cap, float) else cap}" for name, cap in found.items())


def with_spread(middle: str, low: str, high: str, repeats: int) -> str:
    """A cell with mean, minimum and maximum of several repeats: "1.50 (1.10-2.00)"."""
    return middle if middle == "-" or repeats < 2 else f"{middle} ({low}-{high})"
