"""Loads runs for comparison: their points, the repeats of each point, and which points of two runs match.

A run is a folder of `sweep`, `bench`, `eval` or `check`, a part of one (`out/v2`, `out/v2/c32`), the output file of
`generate`, or a folder of another engine that lm-eval has written. Records with the same key and the same settings are
repeats of one point, also where they come from several runs: `before/1`, `before/2`, ... as `before`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specbatch.errors import SpecbatchError, refuse
from specbatch.records.answers import EvalAnswers, load_answers
from specbatch.records.archive import unpacked
from specbatch.records.differences import conflicts, flatten, shortened_pair
from specbatch.records.lm_eval_results import ResultsFile
from specbatch.records.run_record import CAPS, RunRecord
from specbatch.records.store import EARLIER, ReadRows, find_records, load_output, output_of
from specbatch.records.sweep_plan import unfinished

# Settings of the model and of the workload that must be equal, or the numbers cannot be compared.
_MODEL_SETTINGS = ("model", "load_format", "tokenizer")
_WORKLOAD_SETTINGS = (
    *("task", "task_version", "num_fewshot", "limit", "dataset", "category", "input_len", "output_len", "ignore_eos"),
    *("max_new_tokens", "new_tokens", "sampling", "chat_template", "request_rate", "slo", "concurrency", "seed"),
    *("prompts", "input_sha256", "prompts_sha256", "own_sampling", "gen_kwargs", "add_bos_token"),
)
_COMPARED_CAPS = (
    "device",
    "dtype",
    "kv_dtype",
    "fp8_activations",
    "deterministic",
    "attention_backend",
    "draft_shape",
    *CAPS,
)


class PointKey(NamedTuple):
    """Identifies a point of a run; "" for parts that it does not have. section: of a bench; size: the concurrency."""

    section: str = ""
    configuration: str = ""
    size: int | str = ""

    def __str__(self) -> str:
        section, configuration, size = self
        return " ".join(filter(None, (section, configuration, f"concurrency {size}" if size != "" else "")))


@dataclass(frozen=True)
class Replicates:
    """The records of one point, one per repeat, and the folder of each (of `generate`: its output file).

    failures: why other repeats were not measured. Their records are left out, unless all repeats failed.
    """

    paths: list[Path]
    records: list[RunRecord]
    failures: list[str] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """Why the point was not measured; None if a repeat was."""
        return self.records[0].error

    @property
    def resumed(self) -> str | None:
        """Why a job of `generate` or `eval` has no times: it was interrupted and continued. None if it ran without a
        break."""
        counts = [(earlier, len(one.requests)) for one in self.records if (earlier := one.workload.get(EARLIER))]
        if not counts:
            return None
        many = ", ".join(f"{earlier} of {total}" for earlier, total in counts)
        lacks = "throughput, times and accept rate" if self.mean("accept_rate") is None else "throughput and times"
        return (
            f"{many} answers come from earlier, interrupted runs, which left no record: {lacks} over all prompts are "
            "unknown. To measure them, run the whole job at once (--overwrite)"
        )

    @property
    def rounds(self) -> list[tuple[Any, ...]]:
        """The run and the repeat of each record. Points of one run with the same rounds were measured interleaved."""
        return [
            (*path.resolve().parts[:-3], record.workload.get("repeat"))
            for path, record in zip(self.paths, self.records, strict=True)
        ]

    def mean(self, key: str) -> float | None:
        """The mean over repeats of metric `key`, in the record's unit; None where a repeat lacks it."""
        found = [value for record in self.records if (value := record.metrics.get(key)) is not None]
        return fmean(found) if len(found) == len(self.records) else None


@dataclass(frozen=True)
class Run:
    """missing: how many repeats of an interrupted sweep have no record, by point."""

    path: Path
    points: dict[PointKey, Replicates]
    missing: Counter[PointKey]

    @property
    def configurations(self) -> set[str]:
        return {key.configuration for key in self.points}

    @property
    def other_engine(self) -> str | None:
        """As `RunRecord.other_engine`."""
        return next(iter(self.points.values())).records[0].other_engine

    def by_task(self) -> dict[PointKey, Replicates]:
        """The points of evaluations by task. Refused: two of one task."""
        found: dict[PointKey, Replicates] = {}
        for point in self.points.values():
            key = PointKey(str(point.records[0].workload.get("task", "")))
            if key in found:
                raise SpecbatchError(f"{self.path} holds several runs of {key.section}; name one of them")
            found[key] = point
        return found


@dataclass(frozen=True)
class Pairs:
    """Points that both runs have, and the keys of points that only one of them has."""

    both: dict[PointKey, tuple[Replicates, Replicates]]
    only_before: list[PointKey]
    only_after: list[PointKey]


def load_run(setting: str, path: Path, read_rows: ReadRows) -> Run:
    """Load the run at `path`, the value of `setting`. read_rows reads an output of generate.

    Refused: no record, an unreadable one, records of one point with different settings or workloads.
    """
    if output_of(path) is None and (file := ResultsFile.find(setting, path)) is not None:
        found = {PointKey(task): Replicates([file.path], [record]) for task, record in file.records().items()}
        return Run(path, found if len(found) > 1 else {PointKey(): point for point in found.values()}, Counter())
    points: dict[PointKey, Replicates] = {}
    for folder, record in read_records(setting, path, read_rows):
        point = points.setdefault(_key(record), Replicates([], []))
        if point.records and (different := conflicts_of(point.records[0], record)):
            others = f"{point.paths[0]} and {folder} ({'; '.join(different)})"
            raise refuse(setting, str(path), f"holds runs of different settings, such as {others}; name one of them")
        point.paths.append(folder)
        point.records.append(record)
    points = {key: _without_failures(point) for key, point in points.items()}
    with unpacked(setting, path) as files:
        missing = Counter(PointKey("", point.configuration, point.concurrency) for point in unfinished(files, setting))
    return Run(path, points, missing)


def read_records(setting: str, path: Path, read_rows: ReadRows) -> list[tuple[Path, RunRecord]]:
    """The records of the run at `path`, each with its folder or output, in the order of its points.

    path: as for `load_run`, or an archive of records (`specbatch.records.archive`).
    """
    if (output := output_of(path)) is not None:
        found = [(output, load_output(setting, output, read_rows))]
    else:
        with unpacked(setting, path) as folder:
            found = [(path / place.relative_to(folder), record) for place, record in find_records(setting, folder)]
    if not found:
        works = "holds no record.json" if path.exists() else "no such file or folder"
        works += "; name what eval, sweep, bench, check or generate wrote, or results of lm-eval"
        raise refuse(setting, str(path), works)
    return sorted(found, key=lambda item: _order(item[1]))


def answers_of(setting: str, run: Path, point: Replicates, files: Path) -> EvalAnswers | None:
    """The answers of the only repeat of a point; None where another command than eval wrote it.

    run, files: the run that holds the point, and where its files are (`specbatch.records.archive.unpacked`)
    """
    (path,), (record,) = point.paths, point.records
    if record.other_engine is not None:
        return ResultsFile(setting, path).answers(record.workload["task"])
    return load_answers(setting, path, run, files)


def match(before: Run, after: Run) -> Pairs:
    """Pair the points of two runs. If each run has one configuration, these are compared whatever their names. Points
    of another engine, of which only the answers are known, are paired by task; their prompts are compared later.

    Refused: no common point; points of different models or workloads.
    """
    if before.other_engine or after.other_engine:
        return _match_tasks(before, after)
    single = len(before.configurations) == len(after.configurations) == 1
    old, new = (
        {key._replace(configuration="") if single else key: point for key, point in run.points.items()}
        for run in (before, after)
    )
    both = {key: (old[key], new[key]) for key in old if key in new}
    if not both:
        raise SpecbatchError(
            f"{before.path} and {after.path} have no point in common: {_names(old)}, and {_names(new)}; "
            "compare runs of the same concurrency and configurations, or one configuration of each (out/v1 out/v2)"
        )
    for key, points in both.items():
        if different := conflicts(*(_identity(point.records[0]) for point in points)):
            where = f" at {key}" if str(key) else ""
            works = "compare runs of the same model, prompts, lengths and sampling"
            raise SpecbatchError(f"these runs differ{where}: {'; '.join(different)}; {works}")
    return Pairs(both, [key for key in old if key not in new], [key for key in new if key not in old])


def _match_tasks(before: Run, after: Run) -> Pairs:
    old, new = before.by_task(), after.by_task()
    both = {key: (old[key], new[key]) for key in old if key in new}
    if not both:
        raise SpecbatchError(
            f"{before.path} and {after.path} have no task in common: {_names(old)}, and {_names(new)}; "
            "compare evaluations of the same task"
        )
    only = [key for key in old if key not in new], [key for key in new if key not in old]
    if len(old) == len(new) == 1:
        both = {PointKey(): points for points in both.values()}
    return Pairs(both, *only)


def differences(pairs: Pairs) -> dict[str, list[str]]:
    """Settings, caps, versions, hardware, git revision and environment variables that differ, each with its "before ->
    after" (several where points do)."""
    found: dict[str, dict[str, None]] = {}
    for before, after in pairs.both.values():
        old, new = (_environment(point.records[0]) for point in (before, after))
        started = [how_started(point.records[0]) for point in (before, after)]
        if all(started):  # earlier versions did not record it
            old, new = old | started[0], new | started[1]
        if all(ids := [point.records[0].gpu_id for point in (before, after)]):
            old, new = old | {"GPU": ids[0]}, new | {"GPU": ids[1]}
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                found.setdefault(name, {})[" -> ".join(shortened_pair(old.get(name), new.get(name)))] = None
    return {name: list(texts) for name, texts in found.items()}


def measured(repeats: list[RunRecord]) -> list[RunRecord]:
    """The repeats of a point that count. If all failed they are kept, without numbers: a throughput of 0 would say that
    the configuration is slow."""
    known = [record for record in repeats if record.error is None]
    return known or [
        replace(record, metrics={}, counters={}, requests=[], workload=record.workload | {"error": record.error})
        for record in repeats
    ]


def _without_failures(point: Replicates) -> Replicates:
    failures = [record.error for record in point.records if record.error is not None]
    paths = [path for path, record in zip(point.paths, point.records, strict=True) if record.error is None]
    return Replicates(paths or point.paths, measured(point.records), failures)


def _key(record: RunRecord) -> PointKey:
    work = record.workload
    if "configuration" not in work:
        return PointKey()
    return PointKey(work.get("section", ""), work["configuration"], work.get("concurrency", ""))


def _order(record: RunRecord) -> tuple[Any, ...]:
    work, key = record.workload, _key(record)
    size = key.size if isinstance(key.size, int) else 0
    return key.section, size, work.get("place", 0), work.get("repeat", 0)


def conflicts_of(one: RunRecord, other: RunRecord) -> list[str]:
    """In which settings and in what of their workloads two records differ; nothing of repeats of one point."""
    return conflicts(*(flatten(record.config) | _identity(record) for record in (one, other)))


def _identity(record: RunRecord) -> dict[str, Any]:
    """What the numbers are of. A failed point, and a record of an older version, hold less of their workload. A server
    that is evaluated has its own name for the model."""
    config, work = record.config, record.workload
    found = {"command": work.get("command")}
    if not record.of_server or found["command"] != "eval":
        found |= {name: config.get(name) for name in _MODEL_SETTINGS}
    if config.get("load_format") == "dummy":
        found["seed of the weights"] = config.get("seed")
    return found | {name: work[name] for name in _WORKLOAD_SETTINGS if name in work}


def _environment(record: RunRecord) -> dict[str, Any]:
    caps = {f"effective {name}": record.caps[name] for name in _COMPARED_CAPS if name in record.caps}
    versions = {f"{name} version": version for name, version in record.versions.items()}
    return {**flatten(record.config), **caps, **versions, "hardware": record.processor}


def how_started(record: RunRecord) -> dict[str, Any]:
    """What may explain other times although all settings are equal; empty for a record of an earlier version."""
    if not record.provenance:
        return {}
    environment: dict[str, Any] = record.provenance.get("environment", {})
    return {"git revision": record.revision, "driver": record.hardware.get("driver"), **environment}


def _names(points: dict[PointKey, Any]) -> str:
    return "; ".join(str(key) or "one unnamed point" for key in points)
