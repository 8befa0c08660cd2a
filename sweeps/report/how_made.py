"""How the records of a report were made: commands, git revision, hardware, driver, environment variables, versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specbatch.records.run_record import RunRecord


@dataclass(frozen=True)
class HowMade:
    """commands: distinct ones, ready for a shell, none where they were not recorded. lines: text by name."""

    commands: list[str]
    lines: dict[str, str]


def how_made(records: list[RunRecord], caps: str) -> HowMade:
    """Collect it; a line has several values where records differ, and is left out where none has one.

    caps: the text on the capacities of the engines.
    """
    created = sorted(record.created for record in records)
    found = {
        "git revision": _distinct(record.revision for record in records),
        "GPU": _distinct(record.gpu for record in records),
        "driver": _distinct(_of_gpu(record, "driver") for record in records),
        "CUDA": _distinct(_of_gpu(record, "cuda") for record in records),
        "CPU": _distinct(_cpu(record) for record in records),
        "environment": _distinct(_environment(record) for record in records),
        "versions": _distinct(_versions(record) for record in records),
        "effective caps": caps,
        "records": f"{len(records)}, made from {created[0]} to {created[-1]}",
    }
    commands = list(dict.fromkeys(filter(None, (record.command for record in records))))
    return HowMade(commands, {name: text for name, text in found.items() if text})


def _of_gpu(record: RunRecord, name: str) -> str | None:
    return None if record.gpu is None else record.hardware.get(name)


def _cpu(record: RunRecord) -> str | None:
    hardware = record.hardware
    sizes = {"cores": hardware.get("cores"), "GiB": hardware.get("memory_gib")}
    name = hardware.get("cpu")
    return name and ", ".join([name, *(f"{size} {unit}" for unit, size in sizes.items() if size)])


def _environment(record: RunRecord) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(record.provenance.get("environment", {}).items()))


def _versions(record: RunRecord) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())


def _distinct(texts: Iterable[str | None]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))
