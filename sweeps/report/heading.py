"""What a table is of: model, device, workload and settings above it, and how its records were made."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass

from specbatch.config.engine_config import Graphs
from specbatch.records.run_record import CAPS, RunRecord
from specbatch.sweeps.workload.heading import lines_of
from specbatch.weights.known_models import KNOWN_MODELS


def heading(lines: dict[str, str]) -> str:
    """Markdown: a list of "name: value"."""
    return "".join(f"* {name}: {value}\n" for name, value in lines.items())


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


def run_on(records: list[RunRecord]) -> dict[str, str]:
    """Model, device, number of replicas if there are several, dtype and versions, by the name of their line; of this
    engine, if some of the records are of servers."""
    own = [record for record in records if "server" not in record.config]
    records = own or records
    first = records[0]
    config, device = first.config, first.processor
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    place = _resolved("device", records)
    if "server" in config:
        place, device = (
            ", ".join(dict.fromkeys(one.config["device"] for one in records)),
            f"unknown; client on {device}",
        )
        known = ", ".join(dict.fromkeys(one.caps["server_version"] for one in records if "server_version" in one.caps))
        versions = f"{f'server {known}' if known else 'unknown'}; client with {versions}"
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    if not origin and "server" not in config and (model := KNOWN_MODELS.get(config["model"])):
        origin = f" ({model.format})"  # Q4_1 says that its scores are not those of the original weights
    return {
        "model": f"{config['model']}{origin}",
        "device": f"{place} ({device})",
        **_replicas(records),
        "dtype": _resolved("dtype", records),
        **({"deterministic": _deterministic(records)} if any(one.is_deterministic for one in records) else {}),
        "versions": versions,
    }


def made_up(records: list[RunRecord]) -> str:
    """What of the runs was not real, for titles: random weights and simulated acceptance; "" if all was."""
    weights = ["random weights"] if any(one.config.get("load_format") == "dummy" for one in records) else []
    models = dict.fromkeys(one.simulated_acceptance for one in records if one.simulated_acceptance is not None)
    return ", ".join([*weights, *(f"simulated acceptance ({model})" for model in models)])


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


def described(record: RunRecord) -> str:
    """Speculation and graphs of a configuration, or the server and the speculation that its configuration names."""
    if server := record.config.get("server"):
        asked = str(record.speculation).replace(f", schedule {record.speculation.schedule}", "")
        return f"{server}; {asked}" if record.config.get("speculation_known") else str(server)
    return f"{record.speculation}, {Graphs(**record.config['graphs'])}"


def caps_text(record: RunRecord, names: tuple[str, ...] = CAPS) -> str:
    """The capacities of a record, without those that are zero because the model does not have them."""
    found = {name: record.caps[name] for name in names if record.caps.get(name)}
    return ", ".join(f"{name} {f'{cap:.1f}' if isinstance(cap, float) else cap}" for name, cap in found.items())


def _by_name(texts: dict[str, str]) -> str:
    """The text of each configuration; once, without a name, if all are the same."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _prefix_cache(record: RunRecord) -> str:
    requested = record.config["prefix_cache"]
    return requested if isinstance(requested, str) else "on" if requested else "off"


def _fp8(configurations: dict[str, RunRecord]) -> dict[str, str]:
    """Whether activations were quantized to FP8; no line where they never were and all configurations agree."""
    own = {name: record for name, record in configurations.items() if "server" not in record.config}
    found = {name: record.caps.get("fp8_activations", "off") for name, record in own.items()}
    requested = {record.config.get("fp8_activations") for record in own.values()}
    return {"FP8 activations": _by_name(found)} if "on" in found.values() or len(requested) > 1 else {}


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
