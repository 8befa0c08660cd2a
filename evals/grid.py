"""Evaluates one task in several configurations and at several concurrencies: accuracy and speed in one table.

The folder has the layout of a sweep, so that `report` and `compare` read it:

    folder/sweep.json                            the settings
    folder/left_out.json                         why configurations or points were not measured
    folder/CONFIGURATION/cN/rN/                  the results of one point, as of any evaluation
    folder/summary.md, summary.csv, summary.json all points in one table

Every point answers all questions, or the first ones, as many for each concurrent request. All engines are loaded on one
copy of the weights, and rounds are interleaved (A B C C B A at each concurrency). Points are kept as they finish; one
that is interrupted starts over, because its throughput would be unknown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.errors import SpecbatchError, at_least, each_once, one_line, refuse, reporting
from specbatch.evals.finished import hash_of
from specbatch.evals.grid_table import SUMMARY, Grid, Place
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import PreparedEval, prepare
from specbatch.files.atomic_file import write_json, writing
from specbatch.files.text_files import read_json
from specbatch.jobs.engine_groups import Load, LoadedGroup, in_batches, marginal_of
from specbatch.progress.bars import NotedReport, Waves
from specbatch.progress.point_times import PointWork
from specbatch.records.bases import bases_of
from specbatch.records.run_record import speculation_of
from specbatch.records.store import RECORD
from specbatch.records.sweep_plan import LEAST_PROMPTS, LEFT_OUT, PLAN, Point, check_plan, folder_name, points, save

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

WARM_UP = 4  # questions, and on a GPU a full batch
WARM_UP_TOKENS = 16  # of each answer
Log = Callable[[str], None]


@dataclass(frozen=True)
class GridOptions:
    """Each configuration answers the questions of `task` at each concurrency, `repeats` times. The concurrency and the
    folder of `task` are ignored.

    prompts_per_concurrency  a point has at most this many questions per concurrent request, the first ones, and at
                             least `LEAST_PROMPTS`. None: all questions
    """

    task: EvalOptions
    concurrency: tuple[int, ...]
    repeats: int = 1
    prompts_per_concurrency: int | None = None

    def __post_init__(self) -> None:
        for number in self.concurrency:
            at_least("concurrency", number, 1)
        each_once("concurrency", self.concurrency)
        at_least("repeats", self.repeats, 1)
        if (most := self.prompts_per_concurrency) is not None:
            at_least("prompts_per_concurrency", most, 1)
            if self.task.limit is not None and self.task.limit < 1:
                raise refuse("limit", self.task.limit, "with prompts_per_concurrency use a whole number")
        for name in ("predict_only", "write_out"):
            if getattr(self.task, name):
                raise refuse(name, True, "goes with one configuration; leave it out")

    def at(self, concurrency: int) -> EvalOptions:
        """The options of a point."""
        options = replace(self.task, concurrency=concurrency, output=None)
        if self.prompts_per_concurrency is None:
            return options
        return options.at_most(max(self.prompts_per_concurrency * concurrency, LEAST_PROMPTS))


def run_grid(
    configs: Mapping[str, EngineConfig],
    load: Load,
    options: GridOptions,
    folder: Path,
    *,
    failed: dict[str, str],
    log: Log | None = None,
    progress: NotedReport | None = None,
) -> Grid:
    """Evaluate every point that is not finished in `folder`, which exists, and write the table of all.

    load    opens the engines of some configurations; not called if nothing is left
    failed  why a configuration has no engine, which `load` may add to. Its points are left out and the others go on, as
            after a point that fails; the same call runs them again

    Refused: a folder with other settings, tasks that generate nothing, and what is refused at all points.
    """
    ready = prepare(replace(options.task, output=None))
    if ready.task.scores_texts:
        works = f"task {options.task.task} ({ready.task.kind}) scores given texts, which decodes nothing"
        raise refuse("configs", ", ".join(configs), f"{works}; leave it out, or use a task that generates")
    if ready.task.is_group and not any(one.has_aggregation for one in [*ready.task.groups.values()][:1]):
        raise refuse("task", options.task.task, "is a tag or group without a score of its own; name one of its tasks")
    if log is not None:
        log(f"data: {ready.task.data_source}")
        if ready.task.warning:
            log(f"warning: {ready.task.warning}")
    plan, every = _plan(configs, options, ready.task.definition), list(points(configs, options))
    if options.task.overwrite:
        _remove(folder, configs)
    check_plan(folder, plan, "an evaluation")
    found: dict[Point, EvalReport] = {}

    def grid() -> Grid:
        reports: dict[Place, list[EvalReport]] = {}
        for point in filter(found.__contains__, every):
            reports.setdefault((point.concurrency, point.configuration), []).append(found[point])
        return _grid(reports, configs, failed, options.repeats)

    with reporting(lambda: _kept(len(found), len(every), folder)):
        try:
            _run(every, configs, load, ready, options, plan, folder, found, failed, log, progress)
        finally:
            if found:
                write_json(folder / LEFT_OUT, failed)
                grid().save(folder)
    return grid()


def load_grid(folder: Path) -> Grid:
    """The finished points of an evaluation in `folder`, from disk, and why others were left out.

    Refused: results that cannot be read.
    """
    plan = read_json("folder", folder / PLAN, "name the folder of an evaluation of several configurations")
    configs = {
        name: EngineConfig(speculation=speculation_of(settings["speculation"]), graphs=Graphs(**settings["graphs"]))
        for name, settings in plan["configurations"].items()
    }
    reports: dict[Place, list[EvalReport]] = {}
    for concurrency, name in product(plan["concurrency"], configs):
        point = folder / folder_name(name) / f"c{concurrency}"
        repeats = sorted(point.glob(f"r*/{RECORD}"), key=lambda path: int(path.parent.name[1:]))
        if repeats:
            reports[concurrency, name] = [EvalReport.load(path.parent) for path in repeats]
    left_out = folder / LEFT_OUT
    return _grid(reports, configs, read_json("folder", left_out) if left_out.exists() else {}, plan["repeats"])


def _grid(
    reports: dict[Place, list[EvalReport]],
    configs: Mapping[str, EngineConfig],
    failed: dict[str, str],
    asked: int,
) -> Grid:
    """Without the repeats in which every request failed, which are left out by name."""
    left_out = dict(failed)
    known: dict[Place, list[EvalReport]] = {}
    for (concurrency, name), repeats in reports.items():
        for number, report in enumerate(repeats, start=1):
            if report.record.error is None:
                known.setdefault((concurrency, name), []).append(report)
            else:
                place = f"{name} at concurrency {concurrency}, repeat {number} of {len(repeats)}"
                left_out[place] = report.record.error
    return Grid(known, bases_of(configs), left_out, asked)


def _run(
    every: list[Point],
    configs: Mapping[str, EngineConfig],
    load: Load,
    ready: PreparedEval,
    options: GridOptions,
    plan: dict[str, Any],
    folder: Path,
    found: dict[Point, EvalReport],
    failed: dict[str, str],
    log: Log | None,
    progress: NotedReport | None,
) -> None:
    """Add the report of each point to `found`: of finished points from disk, of the others from an engine."""
    for point in every:
        if point.is_finished(folder):
            found[point] = EvalReport.load(point.folder(folder), "output")
    left = [point for point in every if point not in found]
    if found and log is not None:
        log(f"{len(found)} of {len(every)} points are finished")
    if not left:
        return
    _check_lengths(left, configs, ready, options)
    warm, refused = set[tuple[int, str, int]](), list[Exception]()
    loads = {
        point: PointWork(
            sum(map(len, ready.task.chosen(options.at(point.concurrency)).values())),
            point.concurrency,
            point.configuration,
        )
        for point in left
    }
    waves = Waves(progress, loads.values(), marginal=marginal_of(configs))
    with LoadedGroup(configs, load, failed) as loaded:
        for group, point in [(group, point) for group, own in in_batches(left, loaded.groups) for point in own]:
            engines = loaded.engines(group)
            name, place = point.configuration, f"{point.configuration} at concurrency {point.concurrency}"
            if name not in engines or place in failed:
                waves.finish(*loads[point])
                continue
            ours = replace(ready, options=options.at(point.concurrency))
            try:
                if (point.concurrency, name, loaded.count) not in warm:
                    _warm_up(ours, engines[name])
                    warm.add((point.concurrency, name, loaded.count))
                engines[name].forget_prefixes()
                waves.begin()
                report = ours.run(engines[name], lambda *_: waves.add(point.concurrency, name=name))  # noqa: B023
            except Exception as error:
                reason = one_line(error)
                if log is not None and reason not in failed.values():
                    log(f"failed: {place}: {reason}")
                failed[place] = reason
                refused.append(error)
                continue
            finally:
                waves.finish(*loads[point])
            _check_prompts([*(found[one] for one in found if one.concurrency == point.concurrency), report])
            _keep(report, point, plan, folder)
            found[point] = report
    if not found and {*failed.values()} == {str(error) for error in refused if isinstance(error, SpecbatchError)}:
        raise refused[0]  # what all points have in common is in the settings


def _check_lengths(
    left: list[Point], configs: Mapping[str, EngineConfig], ready: PreparedEval, options: GridOptions
) -> None:
    """Refuse a `max_model_len` into which a question does not fit, before all engines are loaded."""
    largest = max(left, key=lambda point: point.concurrency)  # its questions include those of the other points
    ready = replace(ready, options=options.at(largest.concurrency))
    for config in {configs[point.configuration].max_model_len: configs[point.configuration] for point in left}.values():
        ready.check_lengths(config)


def _check_prompts(reports: list[EvalReport]) -> None:
    """Refuse a task with other prompts in each run: their answers cannot be compared."""
    if len({report.prompts_sha256 for report in reports}) > 1:
        works = (
            "builds different prompts in each run; use another task, or run each configuration by itself with --spec"
        )
        raise refuse("task", reports[0].task, works)


def _keep(report: EvalReport, point: Point, plan: dict[str, Any], folder: Path) -> None:
    """Write the results of a point, its record last: a point with a record is finished. The workload has what tables of
    sweeps show."""
    answers = report.questions
    report.record.workload |= {
        "dataset": f"eval {report.task}",
        "input_len": None,
        "output_len": report.max_new_tokens,
        "ignore_eos": False,
        "rendered": report.chat_template,
        "prompts": len(answers),
        "distinct_prompts": len({row["prompt_hash"] for row in answers}),
        "output_sha256": hash_of([row["token_ids"] for row in answers]),
    }
    with writing(folder):
        point.folder(folder).mkdir(parents=True, exist_ok=True)
    report.save_answers(point.folder(folder))
    save(folder, plan, point, report.record)


def _plan(configs: Mapping[str, EngineConfig], options: GridOptions, definition: str) -> dict[str, Any]:
    """Everything that the points are made from, as JSON. definition: of a task of the user."""
    settings = {item.name: getattr(options.task, item.name) for item in fields(options.task)}
    plan = {
        "configurations": {name: config.as_dict() for name, config in configs.items()},
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "prompts_per_concurrency": options.prompts_per_concurrency,
        "eval": {key: value for key, value in settings.items() if key not in ("output", "overwrite", "concurrency")},
        **({"definition": definition} if definition else {}),
    }
    found: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return found


def _kept(finished: int, points: int, folder: Path) -> str:
    return f"kept {finished} of {points} points in {folder}; the same command with this --out continues"


def _remove(folder: Path, configs: Mapping[str, EngineConfig]) -> None:
    """Remove the results of an interrupted evaluation."""
    for name in configs:
        shutil.rmtree(folder / folder_name(name), ignore_errors=True)
    for name in (PLAN, LEFT_OUT, *SUMMARY):
        (folder / name).unlink(missing_ok=True)


def _warm_up(ready: PreparedEval, engine: InferenceEngine) -> None:
    """Answer a few questions before measuring, on a GPU a full batch and one more, so that compilation at first use
    does not slow the first point down."""
    options = ready.options
    count = WARM_UP if engine.caps.get("device") == "cpu" else max(WARM_UP, (options.concurrency or 0) + 1)
    tokens = min(options.max_new_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    few = replace(options.at_most(count), max_new_tokens=tokens)
    replace(ready, options=few).run(engine)
