"""Measures the points of a run: configurations at several concurrencies, repeats interleaved, one record per point.

All engines stay loaded on one copy of the weights, so that repeat 2 of A, B, C follows repeat 1 of A, B, C: a machine
that slows down affects all of them. Each configuration is warmed up at each concurrency, outside of the measurements.
What a point does is a `PointWorkload`: the requests of a benchmark (`specbatch.sweeps.run.benchmark`) or the questions
of an evaluation (`specbatch.evals.grid`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specbatch.errors import counted
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.progress.bars import NotedReport, Report, Waves, begin_phase
from specbatch.progress.point_times import PointWork
from specbatch.records import sweep_plan
from specbatch.records.run_record import RunRecord
from specbatch.records.store import load_record
from specbatch.records.sweep_plan import Described, Point, check_plan, points
from specbatch.sweeps.machine.conditions import conditions
from specbatch.sweeps.run.engine_groups import Engines, Failed, LoadedGroup, in_batches, marginal_of
from specbatch.sweeps.run.loading import Configs, Log, noted

if TYPE_CHECKING:
    from specbatch.sweeps.workload.workloads import Workload
    from specbatch.text.tokenizer import Tokenizer

TOKENIZING = "tokenizing prompts"  # a phase of the progress


class Measured(NamedTuple):
    """A point that was measured, or has failed: its record, and the files beside it (content by name)."""

    record: RunRecord
    files: Mapping[str, str] = {}


class PreparedWorkload(Protocol):
    """A workload whose prompts are made. Methods may raise for one engine: its points fail, and the others go on."""

    def check(self, name: str, engine: Any, concurrency: int) -> None:
        """Refuse a concurrency that the engine of configuration `name` cannot hold."""

    def warm_up(self, engine: Any, concurrency: int) -> None:
        """Run a few requests, so that compilation at first use does not slow the first point down."""

    def measure(self, engine: Any, point: Point, count: Callable[[], None]) -> Measured:
        """Measure one point. count: called as each request ends."""

    def describe(self, concurrency: int) -> dict[str, Any]:
        """The workload in the record of a point that was not measured."""


class PointWorkload(Protocol):
    """What the points of a run do: each configuration at each concurrency, `repeats` times.

    kind      what the user calls the run, for errors
    section   the name of this run in a bench, which consists of several
    lengths   the workload whose lengths an error names, if engines are as long as these
    """

    @property
    def concurrency(self) -> tuple[int, ...]: ...

    @property
    def repeats(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def section(self) -> str: ...

    @property
    def lengths(self) -> Workload | None: ...

    def plan(self, configs: Mapping[str, Described]) -> dict[str, Any]:
        """Everything that the points are made from, as JSON: a folder with another plan is refused."""

    def requests(self, concurrency: int) -> int:
        """Requests of a point, for the remaining time."""

    def load(self, configs: Configs, log: Log | None, failed: Failed | None) -> AbstractContextManager[Engines]:
        """Open engines that can share weights. failed: gets the reasons why some cannot be built."""

    def prepare(self, engines: Engines, tokenizer: Tokenizer, report: Report | None = None) -> PreparedWorkload:
        """Make the prompts. Raises SpecbatchError for what concerns all configurations. report: of the prompts."""

    def save(self, folder: Path, plan: dict[str, Any], point: Point, measured: Measured) -> None:
        """Write a point that was measured or has failed; `save_measured` writes all of it."""

    def more_points(self, configs: Iterable[str], folder: Path) -> list[Point]:
        """Points to add after all have been run; none to end."""


def without_numbers(found: Measured, error: str) -> Measured:
    """A point that was measured, with only the error."""
    found.record.workload["error"] = error
    found.record.metrics, found.record.counters, found.record.requests = {}, {}, []
    return Measured(found.record)


def save_measured(folder: Path, plan: dict[str, Any], point: Point, measured: Measured) -> None:
    """Write the files of a point, its record last: a point with a record is finished."""
    with writing(point.folder(folder)):
        point.folder(folder).mkdir(parents=True, exist_ok=True)
    for name, content in measured.files.items():
        write_atomic(point.folder(folder) / name, content)
    sweep_plan.save(folder, plan, point, measured.record)


def run_points(
    configs: Mapping[str, Described],
    loaded: LoadedGroup,
    workload: PointWorkload,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> None:
    """Run every point that has no record yet, or failed, and write it as soon as it is done.

    loaded  the engines of these configurations, perhaps with those of others; not loaded if nothing is left. Its
            `failed`: reasons why engines could not be built. Their points, and those that fail, are saved with the
            error, and the others go on. None: an error ends the run
    """
    plan = workload.plan(configs)
    check_plan(folder, plan, workload.kind)
    every = list(points(configs, workload, folder))
    unfinished = [point for point in every if not is_measured(point, folder)]
    left = unfinished or workload.more_points(configs, folder)
    if log is not None and (done := len(every) - len(unfinished)) and (unfinished or not left):
        log(f"{f'{workload.section}: ' if workload.section else ''}{done} of {len(every)} points are finished")
    if not left:
        return
    if report is not None and workload.section:
        begin_phase(report, workload.section)  # the remaining time is that of the section
    waves, failed = Waves(report, marginal=marginal_of(configs)), loaded.failed

    def run(engines: Engines, ours: list[Point]) -> None:
        own = {name: engine for name, engine in engines.items() if name in configs}
        for point, found in measured_points(configs, own, workload, ours, log, waves, failed, loaded):
            waves.finish(*work_of(point, workload), found.record.metrics.get("duration_s"))
            workload.save(folder, plan, point, found)

    while left:
        waves.expect(work_of(point, workload) for point in left)
        lost: list[Point] = []  # of groups that cannot be loaded
        for place, ours in in_batches(left, loaded.groups):
            if engines := loaded.engines(place):
                run(engines, ours)
            else:
                lost += ours
        run({}, lost)
        left = workload.more_points(configs, folder)


def work_of(point: Point, workload: PointWorkload) -> PointWork:
    """The requests of a point, for the remaining time."""
    return PointWork(workload.requests(point.concurrency), point.concurrency, point.configuration)


def is_measured(point: Point, folder: Path) -> bool:
    """Whether a point has a record, of a server without failed requests: where it has stopped, the first ones may have
    ended before."""
    if not point.is_finished(folder):
        return False
    record = load_record("output", point.folder(folder))
    return record.error is None and not ("server" in record.config and record.counters.get("errors"))


def left_of(configs: Mapping[str, Described], workloads: Mapping[Path, PointWorkload]) -> list[PointWorkload]:
    """The workloads, by the folders of their results, that have points to measure."""
    return [
        one
        for folder, one in workloads.items()
        if not all(is_measured(at, folder) for at in points(configs, one, folder)) or one.more_points(configs, folder)
    ]


def measured_points(
    configs: Mapping[str, Described],
    engines: Engines,
    workload: PointWorkload,
    left: list[Point],
    log: Log | None,
    waves: Waves,
    failed: Failed | None,
    loaded: LoadedGroup | None = None,
) -> Iterator[tuple[Point, Measured]]:
    """Measure the points that are left, in the order of a run. waves: counts their completions; failed: as in
    `run_points`; loaded: what `engines` are of, None: all are loaded."""
    if not left:
        return
    shown_before = set[str]()
    logged = {*(failed or {}).items()}  # an engine that could not be built is logged where it was tried
    shared: Any = None if loaded is None else loaded.tokenizer
    shared = shared or getattr(next(iter(engines.values())), "tokenizer", None)  # servers may need none
    others = {} if loaded is None else loaded.others  # which get the same prompts
    with waves.phase(TOKENIZING) as report:
        ready = workload.prepare({**others, **engines}, shared, report)
    held: dict[str, str] | None = None if failed is None else {}
    causes: list[Exception] = []
    for name, engine in engines.items():
        with noted(held, name, causes):
            ready.check(name, engine, max(workload.concurrency))
    if held and {*held, *(failed or ())} >= {*configs} and not workload.section:  # a bench records the points that fit
        raise causes[0]
    for concurrency, ours in groupby(left, key=lambda point: point.concurrency):
        now, errors = list(ours), None if failed is None else dict(failed)  # of this concurrency
        for name in dict.fromkeys(point.configuration for point in now if point.configuration in engines):
            with noted(errors, name):
                ready.check(name, engines[name], concurrency)
                ready.warm_up(engines[name], concurrency)
        for point in now:
            name, found = point.configuration, None
            if not errors or name not in errors:
                with noted(errors, name):
                    waves.begin()
                    count = partial(waves.add, concurrency, name=name)
                    with conditions(engines[name].caps.get("device", "")) as around:
                        found = _without_lost_replicas(ready.measure(engines[name], point, count))
                    found.record.conditions = around
            if found is None:
                assert errors is not None
                about = ready.describe(concurrency) | {"error": errors[name]}
                found = Measured(RunRecord(configs[name].as_dict(), {}, {}, {}, [], about))
            if error := found.record.error:
                if log is not None and (name, error) not in logged:
                    log(f"failed: {_where(point)}: {error}")
                logged.add((name, error))
            elif log is not None:
                _log_warnings(point, found.record, log, shown_before)
            yield point, found


def _without_lost_replicas(found: Measured) -> Measured:
    """Of a point during which a replica was replaced only the error: the times include the loss."""
    if not (replaced := found.record.counters.get("replaced_replicas")):
        return found
    return without_numbers(found, f"{counted(replaced, 'replica')} ended and had to be replaced")


def _log_warnings(point: Point, record: RunRecord, log: Log, shown_before: set[str]) -> None:
    """Log warnings that were not shown before."""
    for line in record.workload.get("warnings", ()):
        if line not in shown_before:
            log(f"warning: {_where(point)}: {line}")
        shown_before.add(line)


def _where(point: Point) -> str:
    return f"{point.configuration} at concurrency {point.concurrency}, repeat {point.repeat}"
