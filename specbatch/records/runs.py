"""Runs on disk as points that can be held against each other, and what keeps two of them apart.

A run is a folder of `sweep`, `bench`, `eval` or `check`, a part of one (`out/v2`, `out/v2/c32`), or the output file of
`generate`. Records of one place and the same settings are repeats of one point, also where they
come from several runs: `before/1`, `before/2`, ... as `before`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specbatch.errors import SpecbatchError, refuse
from specbatch.jobs.batch_job import read_output
from specbatch.records.points import unfinished
from specbatch.records.run_record import SCHEMA, RunRecord
from specbatch.sweeps.report.summaries import CAPS

# Settings of the engine and of the workload that must be equal, or the numbers are of different things.
_OF_MODEL = ("model", "load_format", "tokenizer")
_OF_WORK = (
    *("task", "task_version", "num_fewshot", "limit", "dataset", "input_len", "output_len", "ignore_eos"),
    *("max_new_tokens", "new_tokens", "sampling", "chat_template", "request_rate", "concurrency", "seed"),
    *("prompts", "input_sha256", "prompts_sha256"),
)
_CAPS = ("device", "dtype", "kv_dtype", "float8_activations", "attention_backend", "draft_shape", *CAPS)
_RECORD = ".record.json"
EARLIER = "earlier_answers"  # of a workload: how many answers an earlier run of the job had made


class Where(NamedTuple):
    """Where in a run a point is; "" where the run has no such thing. size: of a bench, or the concurrency."""

    section: str = ""
    configuration: str = ""
    size: int | str = ""

    def __str__(self) -> str:
        section, configuration, size = self
        what = "size" if section else "concurrency"
        return " ".join(filter(None, (section, configuration, f"{what} {size}" if size != "" else "")))


@dataclass(frozen=True)
class Measured:
    """The records of one place, a repeat each, and the folder of each (of `generate`: its output file)."""

    paths: list[Path]
    records: list[RunRecord]

    @property
    def failed(self) -> str | None:
        """Why it was not measured."""
        return next((record.workload["error"] for record in self.records if "error" in record.workload), None)

    @property
    def resumed(self) -> str | None:
        """Why times are not known of a job of `generate` that was interrupted and went on."""
        counts = [(earlier, len(one.requests)) for one in self.records if (earlier := one.workload.get(EARLIER))]
        if not counts:
            return None
        many = ", ".join(f"{earlier} of {total}" for earlier, total in counts)
        return (
            f"{many} answers are of runs before the last one, of which no record is left: throughput, times and accept "
            "rate of all prompts are not known. A job that runs in one go (--overwrite) has them"
        )

    @property
    def rounds(self) -> list[tuple[Any, ...]]:
        """The run and the repeat of each record: what other points of that run share, as repeats are interleaved."""
        return [
            (*path.resolve().parts[:-3], record.workload.get("repeat"))
            for path, record in zip(self.paths, self.records, strict=True)
        ]

    def value(self, name: str) -> float | None:
        """Metric `name`, the mean over repeats; None where one of them lacks it."""
        found = [value for record in self.records if (value := record.metrics.get(name)) is not None]
        return fmean(found) if len(found) == len(self.records) else None


@dataclass(frozen=True)
class Run:
    """missing: how many repeats of a sweep have no record, by place: it was cut short."""

    path: Path
    points: dict[Where, Measured]
    missing: Counter[Where]

    @property
    def configurations(self) -> set[str]:
        return {place.configuration for place in self.points}


@dataclass(frozen=True)
class Pairs:
    """Points that both runs have, by place, and the places that only one of them has."""

    both: dict[Where, tuple[Measured, Measured]]
    only_before: list[Where]
    only_after: list[Where]


def load_run(setting: str, path: Path) -> Run:
    """Read the records at `path`, which is the user's `setting`.

    Refused: none, an unreadable one, runs of different settings or workloads at one place.
    """
    found = [
        (folder, record) for folder, record in _records(setting, path) if record.workload.get("section") != "machine"
    ]
    if not found:
        raise refuse(setting, str(path), "holds no record.json; name what eval, sweep, bench or generate wrote")
    points: dict[Where, Measured] = {}
    for folder, record in sorted(found, key=lambda item: _order(item[1])):
        point = points.setdefault(_place(record), Measured([], []))
        if point.records and (apart := _apart(_settings(point.records[0]), _settings(record))):
            others = f"{point.paths[0]} and {folder} ({'; '.join(apart)})"
            raise refuse(setting, str(path), f"holds runs of different settings, such as {others}; name one of them")
        point.paths.append(folder)
        point.records.append(record)
    missing = Counter(Where("", point.configuration, point.concurrency) for point in unfinished(path, setting))
    return Run(path, points, missing)


def match(before: Run, after: Run) -> Pairs:
    """Pair points by place. Where each run has one configuration, these are what is compared, whatever their names.

    Refused: no common place; points of another model or workload.
    """
    alone = len(before.configurations) == len(after.configurations) == 1
    old, new = (
        {place._replace(configuration="") if alone else place: point for place, point in run.points.items()}
        for run in (before, after)
    )
    both = {place: (old[place], new[place]) for place in old if place in new}
    if not both:
        raise SpecbatchError(
            f"{before.path} and {after.path} have no point in common: {_names(old)}, and {_names(new)}; "
            "compare runs of the same concurrency and configurations, or one configuration of each (out/v1 out/v2)"
        )
    for place, (one, other) in both.items():
        _refuse_different(place, one, other)
    return Pairs(both, [place for place in old if place not in new], [place for place in new if place not in old])


def differences(pairs: Pairs) -> dict[str, list[str]]:
    """Settings, caps, versions and hardware that differ, each with its "before -> after" (several where points do)."""
    found: dict[str, dict[str, None]] = {}
    for before, after in pairs.both.values():
        old, new = (_described(point.records[0]) for point in (before, after))
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                found.setdefault(name, {})[f"{_short(old.get(name))} -> {_short(new.get(name))}"] = None
    return {name: list(texts) for name, texts in found.items()}


def _records(setting: str, path: Path) -> Iterator[tuple[Path, RunRecord]]:
    output = path.with_name(path.name.removesuffix(_RECORD))
    beside = output.with_name(output.name + _RECORD)
    try:
        if beside.is_file():
            body = json.loads(beside.read_text(encoding="utf-8"))
            yield output, _checked(setting, beside, _generated(output, RunRecord(**body, requests=[])))
        elif path.is_dir():
            for file in sorted(path.rglob("record.json")):
                yield file.parent, _checked(setting, file, RunRecord.load(file.parent))
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, SpecbatchError):
            raise
        line = next(iter(str(error).splitlines()), "")
        raise refuse(setting, str(path), f"a record in it cannot be read ({type(error).__name__}: {line})") from error


def _checked(setting: str, file: Path, record: RunRecord) -> RunRecord:
    if record.schema != SCHEMA:
        raise refuse(setting, str(file), f"has schema {record.schema}, and this version reads {SCHEMA}")
    return record


def _generated(output: Path, record: RunRecord) -> RunRecord:
    """The record of `generate` with the rows of its output.

    Of a job that was interrupted and went on, the record is of the last run alone. What the rows say of all prompts
    takes the place of its numbers, and its times are left out: how long the earlier runs took, and on what machine,
    nobody has written down.
    """
    rows = read_output(output) if output.exists() else []
    earlier = len(rows) - int(record.metrics["requests"] or 0)
    if earlier < 0:  # rows were taken away
        return record
    record.requests = [row | {"emitted": round((row["accept_length"] or 0) * row["verify_steps"])} for row in rows]
    if earlier:
        emitted, verifies = (sum(row[name] for row in record.requests) for name in ("emitted", "verify_steps"))
        record.metrics = {"requests": len(rows), "accept_length": emitted / verifies if verifies else None}
        record.workload[EARLIER] = earlier
    return record


def _place(record: RunRecord) -> Where:
    work = record.workload
    if "configuration" not in work:
        return Where()
    return Where(work.get("section", ""), work["configuration"], work.get("size", work.get("concurrency", "")))


def _order(record: RunRecord) -> tuple[Any, ...]:
    work, place = record.workload, _place(record)
    size = place.size if isinstance(place.size, int) else 0
    return place.section, size, work.get("place", 0), work.get("repeat", 0)


def _refuse_different(place: Where, before: Measured, after: Measured) -> None:
    if apart := _apart(*(_identity(point.records[0]) for point in (before, after))):
        where = f" at {place}" if str(place) else ""
        works = "compare runs of one model on the same prompts"
        raise SpecbatchError(f"these runs are of different things{where}: {'; '.join(apart)}; {works}")


def _apart(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not equal of what both say, as "name a and b". A point that failed, and a record of an older version, say
    less of their workload."""
    pairs = [(name, before[name], after[name]) for name in before if name in after]
    return [f"{name} {_short(old)} and {_short(new)}" for name, old, new in pairs if old != new]


def _settings(record: RunRecord) -> dict[str, Any]:
    return _flat(record.config) | _identity(record)


def _identity(record: RunRecord) -> dict[str, Any]:
    config, work = record.config, record.workload
    found = {name: config.get(name) for name in _OF_MODEL} | {"command": work.get("command")}
    if config.get("load_format") == "dummy":
        found["seed of the weights"] = config.get("seed")
    return found | {name: work[name] for name in _OF_WORK if name in work}


def _described(record: RunRecord) -> dict[str, Any]:
    caps = {f"effective {name}": record.caps[name] for name in _CAPS if name in record.caps}
    versions = {f"{name} version": version for name, version in record.versions.items()}
    return {**_flat(record.config), **caps, **versions, "hardware": record.processor}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _names(places: dict[Where, Any]) -> str:
    return "; ".join(str(place) or "one unnamed point" for place in places)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
