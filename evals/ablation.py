"""One task on every rung: nothing drafted, v1, v2, and v2 with prompts from graphs, on one copy of the weights.

    folder/<rung>/: what an evaluation writes; folder/ladder.md, ladder.csv, ladder.json: the rungs side by side

Scores, answers that are the lowest rung's to the token, acceptance and speed stand in one table without an empty cell:
a rung that cannot be run is named below it with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.atomic_file import write_atomic
from specbatch.config import EngineConfig
from specbatch.errors import refuse
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, PreparedEval, Progress, prepare
from specbatch.memory.planner import MemoryShare
from specbatch.sweeps.run.grid import named
from specbatch.sweeps.run.runner import check_draft, load_engine

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine

WARM_UP = 4  # questions
WARM_UP_TOKENS = 16  # of each answer
RUNGS = ("baseline", "v1", "v2", "v2+piecewise")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Ladder:
    """Reports by rung, the lowest first; left_out: why a rung is missing."""

    reports: dict[str, EvalReport]
    left_out: dict[str, str]

    def rows(self) -> list[dict[str, str]]:
        """A row for each rung; every cell says something."""
        lowest = next(iter(self.reports.values()))
        return [{"rung": name, **_cells(report, lowest)} for name, report in self.reports.items()]

    def table(self) -> str:
        """Markdown."""
        from tabulate import tabulate

        lines = [tabulate(self.rows(), headers="keys", tablefmt="github", disable_numparse=True)]
        lines += [f"{name}: left out, {reason}" for name, reason in self.left_out.items()]
        first = next(iter(self.reports.values()))
        asked = f"{len(first.questions)} answers to prompts of sha256 {first.prompts_sha256[:16]}"
        lines.append(
            f"{first.task} (version {first.task_version}, lm-eval {first.lm_eval_version}), {asked}; score ± standard "
            "error, of one score by itself; same answers: token for token those of the first rung; speed: output tok/s "
            "over the first rung's"
        )
        return "\n\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"rungs": {name: one.as_dict() for name, one in self.reports.items()}, "left_out": self.left_out}

    def save(self, folder: Path) -> None:
        import pandas

        write_atomic(folder / "ladder.md", self.table() + "\n")
        write_atomic(folder / "ladder.csv", pandas.DataFrame(self.rows()).to_csv(index=False))
        write_atomic(folder / "ladder.json", json.dumps(self.as_dict(), indent=2) + "\n")


def rungs(base: EngineConfig, on_cuda: bool) -> tuple[dict[str, EngineConfig], dict[str, str]]:
    """The engines of all rungs that the device can run, and why it cannot run the others. base: drafts, in v2."""
    configs, left_out = named(base, RUNGS), {}
    if not on_cuda:
        del configs[RUNGS[-1]]
        left_out[RUNGS[-1]] = "as prompts are replayed on a CUDA device only"
    return configs, left_out


def run_ladder(
    configs: Mapping[str, EngineConfig],
    options: EvalOptions,
    folder: Path,
    *,
    left_out: Mapping[str, str] | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> Ladder:
    """Ask every rung the same questions. `folder` exists; what is finished is written when a later rung fails."""
    ready = prepare(replace(options, output=None))
    if not ready.task.generates:
        works = f"task {options.task} ({ready.task.kind}) scores given texts, which is the same work on every rung"
        raise refuse("ladder", True, f"{works}: nothing is drafted or decoded; leave it out, or use a generating task")
    reports: dict[str, EvalReport] = {}
    ladder = Ladder(reports, dict(left_out or {}))
    done = 0

    def count(finished: int, wanted: int) -> None:
        if progress is not None:
            progress(done + finished, wanted * len(configs))

    check_draft(configs.values(), log)
    try:
        with ExitStack() as stack:
            first: Engine | None = None
            for index, (name, config) in enumerate(configs.items()):
                share = MemoryShare(index, len(configs))
                engine = stack.enter_context(load_engine(name, config, log, weights_of=first, share=share))
                first = first or engine
                _warm_up(ready, engine)
                own = folder / name
                own.mkdir()
                report = replace(ready, options=replace(options, output=own)).run(engine, count)
                asked = {report.prompts_sha256, *(other.prompts_sha256 for other in reports.values())}
                if len(asked) > 1:
                    works = "use a task that does not, or each rung by itself with --spec"
                    raise refuse("task", options.task, f"asks other prompts each time; {works}")
                reports[name] = report
                done += len(report.questions)
    except KeyboardInterrupt:
        if not reports:
            raise
        kept = f"kept {len(reports)} of {len(configs)} rungs ({', '.join(reports)}) and their table in {folder}"
        raise KeyboardInterrupt(kept) from None
    finally:
        if reports:
            ladder.save(folder)
    return ladder


def _warm_up(ready: PreparedEval, engine: Engine) -> None:
    """Ask a little first: what is compiled at first use would count against the lowest rung, which the others are held
    against."""
    asked = ready.options
    tokens = min(asked.max_new_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    few = replace(asked, limit=min(asked.limit or WARM_UP, WARM_UP), max_new_tokens=tokens)
    replace(ready, options=few).run(engine)
    engine.forget_prefixes()


def _cells(report: EvalReport, lowest: EvalReport) -> dict[str, str]:
    cells: dict[str, str] = {}
    for score in report.scores:
        error = "one question" if score.stderr is None else f"± {score.stderr:.4f}"
        missed = "" if score.unparsed is None else f", {score.unparsed:.1%} unparsed"
        cells[f"{score.filter} {score.metric}"] = f"{score.value:.4f} {error}{missed}"
    same = sum(
        ours["token_ids"] == theirs["token_ids"]
        for ours, theirs in zip(report.questions, lowest.questions, strict=True)
    )
    metrics, first = report.record.metrics, lowest.record.metrics
    drafts = report.record.config["speculation"]["algorithm"] != NO_SPECULATION
    cells["same answers"] = f"{same} of {len(report.questions)}"
    cells["accept length"] = f"{metrics['accept_length']:.2f}" if drafts else "nothing drafted"
    cells["accept rate"] = _number(metrics["accept_rate"], ".3f") if drafts else "nothing drafted"
    cells["mean TTFT (ms)"] = _number(metrics["mean_ttft_s"], ".1f", 1000)
    cells["mean TPOT (ms)"] = _number(metrics["mean_tpot_s"], ".2f", 1000)
    cells["output tok/s"] = _number(metrics["output_throughput"], ".1f")
    ours, theirs = metrics["output_throughput"], first["output_throughput"]
    cells["speed"] = f"{ours / theirs:.2f}" if ours and theirs else "not measured"
    return cells


def _number(value: float | None, form: str, times: float = 1) -> str:
    return "not measured" if value is None else format(times * value, form)
