"""Evaluates tasks in several configurations and at several concurrencies: accuracy and speed in one table.

The folder has the layout of a sweep, so that `report` and `compare` read it:

    folder/sweep.json                            the settings
    folder/left_out.json                         why configurations or points were not measured
    folder/CONFIGURATION/cN/rN/                  the results of one point, as of any evaluation
    folder/summary.md, summary.csv, summary.json all points in one table

Several tasks have a folder each, folder/TASK. Every point answers all questions, or the first ones, as many for each
concurrent request. All engines are loaded on one copy of the weights, and rounds are interleaved (A B C C B A at each
concurrency). Servers of other engines are measured in the same rounds. Points are kept as they finish; one that is
interrupted starts over, because its throughput would be unknown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import SpecbatchError, about, refuse, reporting
from specbatch.evals.finished import hash_of
from specbatch.evals.grid_table import SUMMARY, Grid, grid_of, load_grid
from specbatch.evals.options import GridOptions
from specbatch.evals.run import PreparedEval, prepare, prepare_each
from specbatch.evals.several import folder_of
from specbatch.files.atomic_file import write_json
from specbatch.progress.bars import NotedReport, Report
from specbatch.records.store import RECORD, load_record
from specbatch.records.sweep_plan import (
    LEFT_OUT,
    PLAN,
    Described,
    Point,
    check_plan,
    folder_name,
    points,
)
from specbatch.servers.server import Server
from specbatch.sweeps.run.engine_groups import Engines, Failed
from specbatch.sweeps.run.loading import Configs, Log, connected
from specbatch.sweeps.run.runner import Measured, save_measured
from specbatch.sweeps.run.sweep import run_workloads
from specbatch.sweeps.run.unloaded import Unloaded

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.replicas.cluster import Cluster
    from specbatch.text.tokenizer import Tokenizer

WARM_UP = 4  # questions, and on a GPU a full batch
WARM_UP_TOKENS = 16  # of each answer


def each_task(options: GridOptions) -> list[GridOptions]:
    """The options of each of several tasks, with its own samples."""
    names = options.task.names
    if len(names) == 1:
        return [options]
    if len({folder_of(Path(), name) for name in names}) < len(names):
        raise refuse(
            "task", options.task.task, "has two tasks whose folders have the same name; evaluate one by itself"
        )
    found = []
    for ready in prepare_each([replace(options.task, task=name, output=None) for name in names]):
        own = {name: numbers for name, numbers in (options.task.samples or {}).items() if name in ready.task.tasks}
        found.append(replace(options, task=replace(ready.options, samples=own or None)))
    return found


class Evaluation:
    """The points of one task, as a `PointWorkload`.

    failures   why points were not measured
    refused    errors in the settings, which all points may have in common
    """

    kind, section, lengths = "an evaluation", "", None

    def __init__(self, options: GridOptions) -> None:
        self.options = options
        self.failures: dict[Point, str] = {}
        self.refused: list[SpecbatchError] = []
        self._prompts: dict[int, str] = {}  # by concurrency: the hash of the prompts of its points
        self._fit = set[tuple[int, int]]()  # numbers of questions, and contexts that hold these

    def __reduce__(self) -> tuple[Any, ...]:
        return Evaluation, (self.options,)  # a worker of a cluster loads the task itself

    @property
    def concurrency(self) -> tuple[int, ...]:
        return self.options.concurrency

    @property
    def repeats(self) -> int:
        return self.options.repeats

    @cached_property
    def ready(self) -> PreparedEval:
        """The loaded task."""
        return prepare(replace(self.options.task, output=None))

    def refuse_unfit(self, configs: Configs, folder: Path) -> None:
        """Refuse, before any engine is loaded, a task that generates nothing or has no score, servers that get other
        prompts than the other configurations, and a folder with other settings."""
        task, name = self.ready.task, self.options.task.task
        if task.scores_texts:
            works = f"task {name} ({task.kind}) scores given texts, which decodes nothing"
            raise refuse("configs", ", ".join(configs), f"{works}; leave it out, or use a task that generates")
        if task.is_group and not any(one.has_aggregation for one in [*task.groups.values()][:1]):
            raise refuse("task", name, "is a tag or group without a score of its own; name one of its tasks")
        self._refuse_mixed_prompts(configs)
        if not self.options.task.overwrite:
            check_plan(folder, self.plan(configs), self.kind)

    def _refuse_mixed_prompts(self, configs: Configs) -> None:
        """Messages that a server renders are no prompts of this engine, so their answers cannot be paired."""
        chats = [name for name, one in configs.items() if isinstance(one, Server) and one.send == "chat"]
        if chats and len(chats) < len(configs):
            others = ", ".join(name for name in configs if name not in chats)
            works = (
                f"the server renders the messages itself, and {others} would have other prompts; use 'ids' or 'text'"
            )
            with about(chats[0]):
                raise refuse("send", "chat", f"{works}, or 'chat' for servers alone")
        if chats and not self.options.task.chat_template:
            works = "sends messages, which there are with the chat template only; add chat_template=True"
            with about(chats[0]):
                raise refuse("send", "chat", works)

    def plan(self, configs: Mapping[str, Described]) -> dict[str, Any]:
        task, definition = self.options.task, self.ready.task.definition
        settings = {item.name: getattr(task, item.name) for item in fields(task)}
        plan = {
            "configurations": {name: config.as_dict() for name, config in configs.items()},
            "concurrency": self.concurrency,
            "repeats": self.repeats,
            "prompts_per_concurrency": self.options.prompts_per_concurrency,
            "eval": {
                key: value for key, value in settings.items() if key not in ("output", "overwrite", "concurrency")
            },
            **({"definition": definition} if definition else {}),  # of a task of the user
        }
        found: dict[str, Any] = json.loads(json.dumps(plan, default=str))
        return found

    def requests(self, concurrency: int) -> int:
        return sum(map(len, self.ready.task.chosen(self.options.at(concurrency)).values()))

    def load(self, configs: Configs, log: Log | None, failed: Failed | None) -> AbstractContextManager[Engines]:
        from specbatch.evals.server_lm import needs_tokenizer

        servers = [one for one in configs.values() if isinstance(one, Server)]
        own = any(needs_tokenizer(one.send, self.options.task, scores_texts=False) for one in servers)
        return connected(configs, log, None, failed, tokenizer=own)

    def prepare(self, engines: Engines, tokenizer: Tokenizer, report: Report | None = None) -> Evaluation:
        return self  # lm-eval makes the prompts in each run

    def check(self, name: str, engine: InferenceEngine | Unloaded, concurrency: int) -> None:
        """Refuse questions that do not fit into the context of an engine that is not loaded; a loaded one does it by
        itself. They may wait for pages: only `max_running` is the user's to match."""
        if isinstance(engine, Unloaded):
            key = self.requests(concurrency), engine.caps["max_model_len"]
            if key not in self._fit:
                self._at(concurrency).check_lengths(engine)
                self._fit.add(key)

    def warm_up(self, engine: InferenceEngine, concurrency: int) -> None:
        """Answer a few questions, on a GPU a full batch and one more."""
        ready = self._at(concurrency)
        count = WARM_UP if engine.caps.get("device") == "cpu" else max(WARM_UP, concurrency + 1)
        tokens = min(ready.options.max_new_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
        few = replace(ready.options.at_most(count), max_new_tokens=tokens)
        with self._noting_refusals():
            replace(ready, options=few).run(engine)

    def measure(self, engine: InferenceEngine, point: Point, count: Callable[[], None]) -> Measured:
        """Answer the questions of a point. The workload of its record has what tables of sweeps show."""
        engine.forget_prefixes()
        with self._noting_refusals():
            report = self._at(point.concurrency).run(engine, lambda *_: count())
        answers = report.questions
        report.record.workload |= {
            "dataset": f"eval {report.task}",
            "input_len": None,
            "output_len": report.max_new_tokens,
            "ignore_eos": False,
            "rendered": report.chat_template,
            "prompts": len(answers),
            "distinct_prompts": len({row["prompt_hash"] for row in answers}),
            "output_sha256": hash_of([row.get("token_ids", row["text"]) for row in answers]),
        }
        return Measured(report.record, report.files())

    def describe(self, concurrency: int) -> dict[str, Any]:
        return {}  # no record is written without answers

    def save(self, folder: Path, plan: dict[str, Any], point: Point, measured: Measured) -> None:
        """Write the results of a point; of one that has failed keep why.

        Refused: a task with other prompts in each run, whose answers cannot be compared.
        """
        record = measured.record
        if record.error is not None:
            self.failures[point] = record.error
            return
        if point.concurrency not in self._prompts:
            others = [*folder.glob(f"*/c{point.concurrency}/r*/{RECORD}")]
            first = load_record("output", others[0].parent) if others else record
            self._prompts[point.concurrency] = first.workload["prompts_sha256"]
        if record.workload["prompts_sha256"] != self._prompts[point.concurrency]:
            works = "builds different prompts in each run; use another task, or run each configuration by itself"
            raise refuse("task", self.options.task.task, works)
        save_measured(folder, plan, point, measured)

    def more_points(self, configs: Iterable[str], folder: Path) -> list[Point]:
        return []

    def _at(self, concurrency: int) -> PreparedEval:
        """The task with the questions of a point."""
        return replace(self.ready, options=self.options.at(concurrency))

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        try:
            yield
        except SpecbatchError as error:
            self.refused.append(error)
            raise


def run_grids(
    configs: Configs,
    tasks: Sequence[GridOptions],
    folder: Path,
    *,
    left_out: Mapping[str, str] | None = None,
    cluster: Cluster | None = None,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> dict[str, Grid]:
    """Evaluate every point that is not finished in `folder`, which exists, and write the table of all. By task; several
    have a folder each.

    left_out  why some configurations are not among these. An engine that cannot be built and a point that fails are
              left out, too, and the others go on; the same call runs them again
    cluster   its workers measure the points; None: this process does

    Refused: what `Evaluation.refuse_unfit` refuses, what all configurations have in common, or all that speculate
    (`sweeps.run.unloaded`), and what is refused at all points.
    """
    every = evaluations(configs, tasks, folder)
    for own, evaluation in every.items():
        if log is not None:
            of = f"{evaluation.ready.task.name}: " if len(every) > 1 else ""
            log(f"{of}data: {evaluation.ready.task.data_source}")
            if evaluation.ready.task.warning:
                log(f"{of}warning: {evaluation.ready.task.warning}")
        if evaluation.options.task.overwrite:
            _remove(own, configs)
    failed, grids = Failed(), dict[str, Grid]()

    def kept() -> str:
        each = [point.is_finished(own) for own, one in every.items() for point in points(configs, one)]
        return f"kept {sum(each)} of {len(each)} points in {folder}; the same command with this --out continues"

    with reporting(kept):
        try:
            run_workloads(configs, every, failed=failed, cluster=cluster, log=log, report=report)
        finally:
            for own, evaluation in every.items():
                name = evaluation.options.task.task
                grids[name] = _grid(configs, evaluation, own, {**(left_out or {}), **failed})
    for evaluation in every.values():
        reasons = {str(error) for error in evaluation.refused}
        if evaluation.failures.keys() == {*points(configs, evaluation)} and {*evaluation.failures.values()} == reasons:
            raise evaluation.refused[0]  # what all points have in common is in the settings
    return grids


def evaluations(configs: Configs, tasks: Sequence[GridOptions], folder: Path) -> dict[Path, Evaluation]:
    """The evaluation of each task, by its folder. Refused: what `Evaluation.refuse_unfit` refuses."""
    every = {own: Evaluation(options) for own, options in zip(_folders(tasks, folder), tasks, strict=True)}
    for own, evaluation in every.items():
        evaluation.refuse_unfit(configs, own)
    return every


def load_grids(tasks: Sequence[GridOptions], folder: Path) -> dict[str, Grid]:
    """The tables that `run_grids` has written, by task, from the records on disk."""
    each = zip(_folders(tasks, folder), tasks, strict=True)
    return {options.task.task: load_grid(own) for own, options in each if (own / PLAN).exists()}


def _folders(tasks: Sequence[GridOptions], folder: Path) -> list[Path]:
    names = [options.task.task for options in tasks]
    return [folder if len(names) == 1 else folder_of(folder, name) for name in names]


def _grid(configs: Configs, evaluation: Evaluation, folder: Path, left_out: dict[str, str]) -> Grid:
    """The table of the points that are finished, which is also written. left_out: configurations without an engine."""
    for point, reason in evaluation.failures.items():
        if point.configuration not in left_out:
            left_out[f"{point.configuration} at concurrency {point.concurrency}"] = reason
    if not any(point.is_finished(folder) for point in points(configs, evaluation)):
        return grid_of({}, configs, left_out, evaluation.repeats)
    write_json(folder / LEFT_OUT, left_out)
    grid = load_grid(folder)
    grid.save(folder)
    return grid


def _remove(folder: Path, configs: Configs) -> None:
    """Remove the results of an interrupted evaluation."""
    for name in configs:
        shutil.rmtree(folder / folder_name(name), ignore_errors=True)
    for name in (PLAN, LEFT_OUT, *SUMMARY):
        (folder / name).unlink(missing_ok=True)
