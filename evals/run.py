"""Runs an evaluation: options in, report out.

    report = run_eval(engine, EvalOptions(task="gsm8k", limit=20))
    print(report.table())

`prepare` does everything that needs no model, so that mistakes are found before one is loaded:

    ready = prepare(options)
    with Engine(config) as engine:
        report = ready.run(engine)

Tasks that generate text run with the engine's speculation. The other types (multiple_choice, loglikelihood,
loglikelihood_rolling) score given texts with the target alone.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError, counted, refuse
from specbatch.evals.finished import PARTIAL, Answer, Scored, claimed, finished_rows, with_earlier
from specbatch.evals.lm_eval_files import save_lm_eval_files
from specbatch.evals.lm_eval_process import quiet, template_errors
from specbatch.evals.option_checks import apply_arguments, refuse_unused
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.results import answer_rows, scored_rows, scores, verdicts
from specbatch.evals.selection import asking
from specbatch.evals.task import GENERATING, EvalTask, load_tasks
from specbatch.files.atomic_file import writing
from specbatch.jobs.partial_output import PartialRows
from specbatch.records.store import RECORD
from specbatch.servers.server import Server
from specbatch.sweeps.run.sanity_checks import add_digests

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.servers.engine import HttpEngine
    from specbatch.sweeps.run.unloaded import Unloaded

Progress = Callable[[int, int], None]  # answers finished, answers wanted
JOB = "job"  # of a record's workload: all settings that the results depend on
Log = Callable[[str], None]
# Options that a report states as they are.
_STATED = (
    "seed", "limit", "offset", "samples", "predict_only", "chat_template", "thinking", "think_end_token",
    "system_instruction", "gen_kwargs", "add_bos_token", "truncate_prompts",
)  # fmt: skip


@dataclass(frozen=True)
class PreparedEval:
    """A loaded task, and an output folder that can be written to.

    drafts: the engine may draft for other tasks of the run, although this one generates nothing
    """

    options: EvalOptions
    task: EvalTask
    drafts: bool = False

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        """The engine configuration for this task: without decode graphs if the task generates nothing.

        Such a task rejects speculation, which would have no effect but would appear in the results as if it had been
        tested.
        """
        if self.task.generates or self.drafts:
            return config
        algorithm = config.speculation.algorithm
        if algorithm != NO_SPECULATION:
            works = f"task {self.task.name} ({self.task.kind}) scores given texts without drafting"
            raise refuse("algorithm", algorithm, f"{works}; use 'none', or a task that generates")
        return replace(config, graphs=replace(config.graphs, decode="off"))

    @property
    def requests(self) -> int | None:
        """How many questions are asked; None if the task scores texts, of which a question may have many."""
        if self.task.scores_texts:
            return None
        chosen = self.task.chosen(self.options)
        return max(sum(len(chosen[name]) * int(one.config.repeats) for name, one in self.task.tasks.items()), 1)

    def finished(self, config: EngineConfig | Server) -> PartialRows | None:
        """The answers of an interrupted run with engine or server `config`; None without an output folder.

        Refused: answers that were made with other settings.
        """
        if self.options.output is None:
            return None
        return finished_rows(self.options, self.task.num_fewshot, config, generates=self.task.generates)

    def complete(self, config: EngineConfig | Server) -> EvalReport | None:
        """The report of this evaluation with engine or server `config`, if an earlier run has finished it in the output
        folder.

        Refused: the report of another evaluation, and `overwrite`, as results are never overwritten.
        """
        folder = self.options.output
        if folder is None or not (folder / RECORD).exists() or (folder / PARTIAL).exists():
            return None
        try:
            found = EvalReport.load(folder)
        except SpecbatchError:
            raise _not_empty(folder) from None
        if self.options.overwrite or found.record.workload.get(JOB) != self._job(self.finished(config)):
            raise _not_empty(folder)
        return found

    def _job(self, kept: PartialRows | None) -> dict[str, Any] | None:
        """All settings that the results depend on; None without an output folder."""
        sources = {"data_source": self.task.data_source, "fewshot_source": self.task.fewshot_source}
        sources |= {"definition": self.task.definition} if self.task.definition else {}
        asked = {"bootstrap_iters": self.options.bootstrap_iters, "predict_only": self.options.predict_only}
        usual = {item.name: item.default for item in fields(EvalOptions)}
        asked = {name: value for name, value in asked.items() if value != usual[name]}
        return None if kept is None else kept.header | sources | asked

    def check_lengths(self, engine: Unloaded) -> None:
        """Refuse what `check` refuses, and a question that does not fit into the context of an engine."""
        from specbatch.sweeps.run.unloaded import AllFit

        unloaded = cast("InferenceEngine", engine)
        self.check(unloaded)
        if self.task.generates:
            with suppress(AllFit):
                self._evaluate(_adapter(unloaded)(unloaded, self.options.task, **self.options.of_model))

    def run(
        self,
        engine: InferenceEngine | HttpEngine,
        progress: Progress | None = None,
        kept: PartialRows | None = None,
        log: Log | None = None,
    ) -> EvalReport:
        """Answer the questions that have no answer yet, and score all answers.

        Answers are kept in `answers.partial.jsonl` in the output folder as they finish, until the report is written.
        After KeyboardInterrupt, an error or a crash the same evaluation continues from there.

        kept: what `finished` returned; default: for the configuration of `engine`, in which a draft's default length is
        resolved
        log: gets the prompts that `write_out` asks for
        """
        options = self.options
        if isinstance(engine.config, EngineConfig):
            self.engine_config(engine.config)
        if (found := self.complete(asked_of(engine))) is not None:
            return found
        self.check(engine)
        kept = kept or self.finished(asked_of(engine))
        with claimed(kept, options.overwrite) as (rows, keep):
            done = len(rows)

            def on_answer(answer: Answer | Scored, wanted: int) -> None:
                nonlocal done
                done += 1
                if not (isinstance(answer, Answer) and not answer.completion.is_complete):  # else it runs again
                    keep(answer.as_row())
                if progress is not None:
                    progress(done, wanted + self._others(answer))

            model = _adapter(engine)(
                engine,
                options.task,
                **options.of_model,
                concurrency=options.concurrency,
                finished=dict(rows),
                on_answer=on_answer,
                first_ids=self.task.first_ids(),
            )
            engine.reset_record()
            started = time.time()
            results = self._evaluate(model, log)
            with self._quiet():
                report = self._report(engine, model, results)
            if options.output is not None:
                report.record.workload[JOB] = self._job(kept)
                report.save(options.output)
                tokenizer = getattr(engine, "tokenizer", None)  # of a server it may be unknown
                save_lm_eval_files(options.output, [results], report.record, tokenizer, options, started)
        return report

    def check(self, engine: InferenceEngine | HttpEngine) -> None:
        """Refuse what the engine or the server cannot do for the task."""
        if isinstance(engine.config, Server):
            from specbatch.evals.server_lm import check_server

            check_server(engine, self.options, self.task)
            if engine.config.send == "chat":
                return
        if self.options.chat_template and not engine.tokenizer.has_chat_template:
            raise refuse("chat_template", True, "the model's tokenizer has no chat template; leave it out")

    def _others(self, answer: Answer | Scored) -> int:
        """How many requests are not of the kind of `answer`, in a group of both kinds."""
        generated = isinstance(answer, Answer)
        tasks = [task for task in self.task.tasks.values() if (task.OUTPUT_TYPE == GENERATING) != generated]
        return sum(one.repeats for task in tasks for one in task.instances or ())

    def _quiet(self) -> AbstractContextManager[None]:
        return quiet(sandboxed=not self.options.confirm_run_unsafe_code)

    def _evaluate(self, model: Any, log: Log | None = None) -> dict[str, Any]:
        import lm_eval

        def built(name: str, task: Any) -> None:
            if self.options.write_out and log is not None:
                first = task.instances[0]
                log(f"task {name}, question {first.doc_id}, prompt:\n{first.args[0]}")
                log(f"target:\n{task.doc_to_target(first.doc)}")

        # An earlier run may have drawn from these generators.
        for task in self.task.tasks.values():
            task.set_fewshot_seed(seed=self.options.seed)
        groups, chosen = self.task.groups, self.task.chosen(self.options)
        self.task.random_state.restore()
        tasks = {
            "tasks": self.task.tasks,
            "groups": groups,
            "group_map": {one: groups[one].child_names for one in groups},
        }
        with self._quiet(), asking(self.task.tasks, chosen, built), template_errors(self.task.name):
            results: dict[str, Any] = lm_eval.evaluate(
                model,
                tasks,
                bootstrap_iters=self.options.bootstrap_iters,
                apply_chat_template=self.options.chat_template,
                fewshot_as_multiturn=self.options.as_multiturn,
                system_instruction=self.options.system_instruction,
                confirm_run_unsafe_code=self.options.confirm_run_unsafe_code,
            )
        return results

    def _report(self, engine: InferenceEngine | HttpEngine, model: Any, results: dict[str, Any]) -> EvalReport:
        task, options = self.task, self.options
        rows = verdicts(task, results["samples"])
        version_of = results["versions"].get(task.name, "N/A")
        record = engine.record(concurrency=options.concurrency)
        if model.earlier:
            with_earlier(record, model.earlier, [*model.answers, *model.scored])
        elif model.answers and (model.scored or isinstance(engine.config, Server)):
            # The indices are those of the requests of all tasks, and of a server no request is there twice.
            record.requests = [one.completion.as_row() for one in model.answers]
        add_digests(record.requests, {one.completion.index: one.completion for one in model.answers})
        report = EvalReport(
            task=task.name,
            task_version=str(version_of),
            lm_eval_version=version("lm_eval"),
            data_source=task.data_source,
            num_fewshot=task.num_fewshot,
            fewshot_source=task.fewshot_source,
            kind=task.kind,
            sampling=model.sampling,
            max_new_tokens=model.budget if task.generates else None,
            cut=model.cut if task.scores_texts else None,
            prompts_sha256=hashlib.sha256(json.dumps(model.prompts).encode()).hexdigest(),
            scores=list(scores(task, results)),
            questions=answer_rows(rows, model.answers) + scored_rows(task, rows, results["samples"]),
            warning=task.warning,
            notes=[*self.notes(), *model.notes],
            fewshot_as_multiturn=options.as_multiturn,
            **{name: getattr(options, name) for name in _STATED},
            record=record,
        )
        report.questions.sort(key=lambda row: row["doc_id"])
        report.record.workload.update({"command": "eval", **report.settings()})
        return report

    def notes(self) -> list[str]:
        """What the user should know of the task and of the options, one sentence each without the full stop."""
        return [*self.task.notes, *self._sample_notes()]

    def _sample_notes(self) -> Iterator[str]:
        options = self.options
        for name, count in self.task.fewshot.items():
            if options.samples is not None and name in options.samples and count:
                asked = f"{counted(len(options.samples[name]), 'question')} of {name}"
                yield f"{asked} drew their few-shot examples by themselves, so their prompts differ from a full run's"
            elif options.samples is not None and name not in options.samples:
                yield f"samples name no questions of {name}: all were asked"


def prepare(options: EvalOptions) -> PreparedEval:
    """Create the output folder, which may hold an interrupted evaluation, and load the task, of which there is one.

    Raises SpecbatchError for any mistake that needs no model to show.
    """
    if len(options.names) > 1:
        raise refuse("task", options.task, "names several tasks; name one, or use specbatch.evals.several")
    if options.output is not None:
        open_folder(options.output)
    return prepare_each([options])[0]


def prepare_each(options: Sequence[EvalOptions]) -> list[PreparedEval]:
    """`prepare` for several tasks, without their folders. The options differ in the task and the output only."""
    tasks = load_tasks([one.task for one in options], options[0])
    refuse_unused(options[0], tasks)
    for task in tasks:
        apply_arguments(options[0], task)
    drafts = any(task.generates for task in tasks)
    return [PreparedEval(own, task, drafts) for own, task in zip(options, tasks, strict=True)]


def asked_of(engine: InferenceEngine | HttpEngine) -> EngineConfig | Server:
    """The configuration on which results depend: of a server with the name of its model, also if it was not given."""
    config = engine.config
    return replace(config, model=cast("HttpEngine", engine).model) if isinstance(config, Server) else config


def _adapter(engine: InferenceEngine | HttpEngine) -> type[Any]:
    """The class of lm-eval's model."""
    if isinstance(engine.config, Server):
        from specbatch.evals.server_lm import ServerLM

        return ServerLM
    from specbatch.evals.lm import SpecBatchLM

    return SpecBatchLM


def run_eval(
    engine: InferenceEngine | HttpEngine, options: EvalOptions, progress: Progress | None = None
) -> EvalReport:
    """Evaluate `engine` on a task, and write the results to `options.output` if it is set."""
    return prepare(options).run(engine, progress)


def open_folder(folder: Path) -> None:
    """Create a folder for results. Refused: one that has other files."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not any((folder / name).exists() for name in (PARTIAL, RECORD)):
            raise _not_empty(folder)
        tempfile.TemporaryFile(dir=folder).close()  # fail now if the folder is not writable


def _not_empty(folder: Path) -> SpecbatchError:
    return refuse("output", str(folder), "exists and is not empty; name a new folder")
