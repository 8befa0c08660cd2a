"""Evaluates one task in every configuration: baseline, v1, v2 and v2+piecewise, sharing one copy of the weights.

    folder/CONFIGURATION/                        the results of one configuration, as of any evaluation
    folder/ablation.md, ablation.csv, ablation.json  all configurations in one table
    folder/ablation.partial.jsonl                the settings, until all configurations are finished

The table shows scores, how many answers are token for token those of the baseline, acceptance and speed. It has no
empty cells: a configuration that cannot run is named below it, with the reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic, write_json
from specbatch.config import EngineConfig
from specbatch.errors import refuse
from specbatch.evals.finished import PARTIAL
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport, cells_of
from specbatch.evals.run import PreparedEval, Progress, prepare
from specbatch.jobs.configurations import check_draft, load_engine, named
from specbatch.jobs.partial_output import PartialRows
from specbatch.memory.planner import MemoryShare
from specbatch.records.markdown import markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.store import RECORD

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

WARM_UP = 4  # questions
WARM_UP_TOKENS = 16  # of each answer
CONFIGURATIONS = ("baseline", "v1", "v2", "v2+piecewise")
STARTED = "ablation.partial.jsonl"
SHOWN = ("accept_length", "accept_rate", "mean_ttft_s", "mean_tpot_s", "output_throughput")
NO_DRAFTS = "no speculation"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Ablation:
    """Reports by configuration, the baseline first.

    left_out   why a configuration did not run
    """

    reports: dict[str, EvalReport]
    left_out: dict[str, str]

    def rows(self) -> list[dict[str, str]]:
        """One table row per configuration."""
        baseline = next(iter(self.reports.values()))
        return [{"configuration": name, **_cells(report, baseline)} for name, report in self.reports.items()]

    def table(self) -> str:
        """Markdown."""
        lines = [markdown_table(self.rows())]
        lines += [f"{name}: left out, {reason}" for name, reason in self.left_out.items()]
        first = next(iter(self.reports.values()))
        name = next(iter(self.reports))
        lines.append(
            f"{first.task} (version {first.task_version}, lm-eval {first.lm_eval_version}): {len(first.questions)} "
            f"answers ({first.sampled}), prompts sha256 {first.prompts_sha256[:16]}. Score: mean ± its standard "
            f"error. Same answers: token for token equal to {name}. Speed: output tok/s relative to {name}."
        )
        return "\n\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "configurations": {name: one.as_dict() for name, one in self.reports.items()},
            "left_out": self.left_out,
        }

    def save(self, folder: Path) -> None:
        import pandas

        write_atomic(folder / "ablation.md", self.table() + "\n")
        write_atomic(folder / "ablation.csv", pandas.DataFrame(self.rows()).to_csv(index=False))
        write_json(folder / "ablation.json", self.as_dict())


def configurations(base: EngineConfig, on_cuda: bool) -> tuple[dict[str, EngineConfig], dict[str, str]]:
    """The configurations that the device can run, and why it cannot run the others. `base` drafts, with schedule v2."""
    configs, left_out = named(base, CONFIGURATIONS), {}
    if not on_cuda:
        del configs[CONFIGURATIONS[-1]]
        left_out[CONFIGURATIONS[-1]] = "piecewise prefill graphs need a CUDA device"
    return configs, left_out


def run_ablation(
    configs: Mapping[str, EngineConfig],
    options: EvalOptions,
    folder: Path,
    *,
    left_out: Mapping[str, str] | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Evaluate the same questions in every configuration.

    `folder` must exist. If a configuration fails, the results of those before it are kept. Where `folder` holds an
    ablation that was interrupted, its configurations are not run again, except for their missing answers. Refused: an
    ablation with other settings.
    """
    ready = prepare(replace(options, output=None))
    if not ready.task.generates:
        works = f"task {options.task} ({ready.task.kind}) scores given texts and decodes nothing"
        raise refuse("ablation", True, f"{works}; leave it out, or use a task that generates")
    if log is not None:
        log(f"data: {ready.task.data_source}")
    started = _started(configs, options, folder)
    ablation = Ablation({}, dict(left_out or {}))
    with started.claim(starts_over=options.overwrite) as keep:
        try:
            _run(configs, ready, folder, ablation.reports, lambda index: keep({"index": index}), log, progress)
        except KeyboardInterrupt:
            if not started.rows:
                started.path.unlink()
                raise
            finished = f" ({', '.join(ablation.reports)})" if ablation.reports else ""
            kept = f"kept {len(ablation.reports)} of {len(configs)} configurations{finished} in {folder}"
            raise KeyboardInterrupt(f"{kept}; the same command with this --out continues") from None
        finally:
            if ablation.reports:
                ablation.save(folder)
        started.path.unlink()
    return ablation


def _started(configs: Mapping[str, EngineConfig], options: EvalOptions, folder: Path) -> PartialRows:
    """The settings of the ablation in `folder`, and a row per configuration that was started."""
    settings = {item.name: getattr(options, item.name) for item in fields(options)}
    header = {
        "command": "eval --ablation",
        "configurations": {name: config.as_dict() for name, config in configs.items()},
        **{name: value for name, value in settings.items() if name not in ("output", "overwrite")},
    }
    known = json.loads(json.dumps(header, default=str))
    started = PartialRows(
        folder / STARTED, known, lambda row: row["index"] in range(len(configs)), start_over="pass --overwrite"
    )
    if started.path.exists() and not options.overwrite:
        started.load()
    return started


def _run(
    configs: Mapping[str, EngineConfig],
    ready: PreparedEval,
    folder: Path,
    reports: dict[str, EvalReport],
    keep: Callable[[int], None],
    log: Log | None,
    progress: Progress | None,
) -> None:
    """Add the report of each configuration to `reports`. keep: called with the index of each that starts."""
    options, done = ready.options, 0

    def count(finished: int, wanted: int) -> None:
        if progress is not None:
            progress(done + finished, wanted * len(configs))

    check_draft(configs.values(), log)
    with ExitStack() as stack:
        engines: list[InferenceEngine] = []
        for index, (name, config) in enumerate(configs.items()):
            own = folder / name
            if options.overwrite and own.is_dir():
                shutil.rmtree(own)
            if (own / RECORD).is_file() and not (own / PARTIAL).exists():
                report = EvalReport.load(own, "output")
                if log is not None:
                    log(f"{name}: finished by an earlier run")
            else:
                share, first = MemoryShare(len(engines), len(configs)), next(iter(engines), None)
                engine = stack.enter_context(load_engine(name, config, log, weights_of=first, share=share))
                engines.append(engine)
                _warm_up(ready, engine)
                own.mkdir(exist_ok=True)
                keep(index)
                ours = replace(ready, options=replace(options, output=own))
                report = ours.run(engine, count, ours.finished(config))
            hashes = {report.prompts_sha256, *(other.prompts_sha256 for other in reports.values())}
            if len(hashes) > 1:
                works = "use another task, or run each configuration by itself with --spec"
                raise refuse("task", options.task, f"builds different prompts in each run; {works}")
            reports[name] = report
            done += len(report.questions)


def _warm_up(ready: PreparedEval, engine: InferenceEngine) -> None:
    """Answer a few questions before measuring, so that compilation at first use does not slow the baseline down."""
    options = ready.options
    tokens = min(options.max_new_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    few = replace(options, limit=min(options.limit or WARM_UP, WARM_UP), max_new_tokens=tokens)
    replace(ready, options=few).run(engine)
    engine.forget_prefixes()


def _cells(report: EvalReport, baseline: EvalReport) -> dict[str, str]:
    cells: dict[str, str] = {}
    for score in report.scores:
        error = "one question" if score.stderr is None else f"± {score.stderr:.4f}"
        missed = "" if score.unparsed is None else f", {score.unparsed:.1%} unparsed"
        cells[f"{score.filter} {score.metric}"] = f"{score.value:.4f} {error}{missed}"
    same = sum(
        ours["token_ids"] == theirs["token_ids"]
        for ours, theirs in zip(report.questions, baseline.questions, strict=True)
    )
    cells["same answers"] = f"{same} of {len(report.questions)}"
    cells |= cells_of(report.record, SHOWN)
    if not report.record.drafts:
        cells |= dict.fromkeys((METRICS["accept_length"].heading, METRICS["accept_rate"].heading), NO_DRAFTS)
    ours, theirs = (one.record.metrics.get("output_throughput") for one in (report, baseline))
    cells["speed"] = f"{ours / theirs:.2f}" if ours and theirs else "-"
    return cells
