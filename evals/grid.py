"""Evaluates one task in several configurations and at several concurrencies: accuracy and speed in one table.

The folder has the layout of a sweep, so that `report` and `compare` read it:

    folder/sweep.json                            the settings
    folder/CONFIGURATION/cN/rN/                  the results of one point, as of any evaluation
    folder/summary.md, summary.csv, summary.json all points in one table

Every point answers all questions, or the first ones, as many for each concurrent request. All engines are loaded on one
copy of the weights, and rounds are interleaved (A B C A B C at each concurrency). Points are kept as they finish; one
that is interrupted starts over, because its throughput would be unknown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.atomic_file import write_atomic, write_json, writing
from specbatch.config import EngineConfig, Graphs
from specbatch.errors import SpecbatchError, at_least, each_once, one_line, refuse, reporting
from specbatch.evals.finished import hash_of
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import PreparedEval, prepare
from specbatch.progress import NotedReport, Waves
from specbatch.records.answers import Score
from specbatch.records.markdown import markdown_table
from specbatch.records.mcnemar import changes, is_binary
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import speculation_of
from specbatch.records.runs import Replicates
from specbatch.records.store import RECORD
from specbatch.records.sweep_plan import LEAST_PROMPTS, PLAN, Point, check_plan, folder_name, points, save
from specbatch.records.verdicts import ONE_REPEAT, speedup_of
from specbatch.text_files import read_json

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

WARM_UP = 4  # questions, and on a GPU a full batch
WARM_UP_TOKENS = 16  # of each answer
BASELINE = "baseline"
SUMMARY = ("summary.md", "summary.csv", "summary.json")
SHOWN = ("accept_length", "mean_ttft_s", "mean_tpot_s", "output_throughput")
Log = Callable[[str], None]
Load = Callable[[], AbstractContextManager[Mapping[str, "InferenceEngine"]]]
Place = tuple[int, str]  # concurrency, configuration


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
        if self.prompts_per_concurrency is not None:
            at_least("prompts_per_concurrency", self.prompts_per_concurrency, 1)

    def limit(self, concurrency: int) -> int | None:
        """The most questions of each task that a point answers; None: all."""
        if self.prompts_per_concurrency is None:
            return self.task.limit
        most = max(self.prompts_per_concurrency * concurrency, LEAST_PROMPTS)
        return most if self.task.limit is None else min(most, self.task.limit)


@dataclass(frozen=True)
class Grid:
    """The reports of each point that was measured, one per repeat.

    bases      by configuration: the one that it is compared with
    left_out   why a configuration, or one of its points, was not measured
    repeats    as many as were asked for
    """

    reports: dict[Place, list[EvalReport]]
    bases: dict[str, str]
    left_out: dict[str, str]
    repeats: int = 1

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each point, by name. Scores and answers are those of the first repeat."""
        return [{"concurrency": place[0], "configuration": place[1], **self._row(place)} for place in self.reports]

    def table(self) -> str:
        """Markdown: accuracy and speed of each point, and below it the other scores."""
        lines = []
        if self.reports:
            rows = self.rows()
            lines = [
                markdown_table([self._cells(row, judged=any("speedup_text" in row for row in rows)) for row in rows]),
                markdown_table(map(self._details, rows)),
                self._notes(rows),
            ]
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        lines += [f"{', '.join(alike)}: left out, {reason}" for reason, alike in names.items()]
        return "\n\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "rows": self.rows(),
            "configurations": {
                f"{name} at concurrency {concurrency}": reports[0].as_dict()
                for (concurrency, name), reports in self.reports.items()
            },
            "left_out": self.left_out,
        }

    def save(self, folder: Path) -> None:
        import pandas

        texts = self.table() + "\n", pandas.DataFrame(self.rows()).to_csv(index=False)
        for name, text in zip(SUMMARY, texts, strict=False):
            write_atomic(folder / name, text)
        write_json(folder / SUMMARY[-1], self.as_dict())

    def _row(self, place: Place) -> dict[str, Any]:
        concurrency, name = place
        report, *_ = reports = self.reports[place]
        row: dict[str, Any] = {
            "questions": len(report.questions),
            "repeats": len(reports),
            "base": self.bases[name],
            "truncated": report.truncated,
        }
        for score in report.overall:
            known = {"": score.value, " stderr": score.stderr, " unparsed": score.unparsed}
            row |= {f"{_named(score, report)}{what}": value for what, value in known.items() if value is not None}
        row |= {key: _mean([one.record.metrics.get(key) for one in reports]) for key in SHOWN}
        base = self.reports.get((concurrency, self.bases[name]))
        if base is None or base is reports:
            return row
        return row | _paired(base[0], report) | _speedup(base, reports)

    def _cells(self, row: dict[str, Any], *, judged: bool) -> dict[str, str]:
        report = self.reports[row["concurrency"], row["configuration"]][0]
        cells = {"concurrency": str(row["concurrency"]), "configuration": row["configuration"]}
        cells["speedup"] = row.get("speedup_text", "-")
        cells[_named(report.overall[0], report)] = _score_text(report.overall[0])
        cells["difference"] = _difference_text(row) if "difference" in row else "-"
        cells |= {
            METRICS[key].heading.removeprefix("mean ").removeprefix("output "): METRICS[key].text(row[key])
            for key in SHOWN
        }
        if not report.record.drafts:
            cells[METRICS["accept_length"].heading] = "-"
        return cells | ({"verdict": row.get("verdict", "-")} if judged else {})

    def _details(self, row: dict[str, Any]) -> dict[str, str]:
        report = self.reports[row["concurrency"], row["configuration"]][0]
        cells = {"concurrency": str(row["concurrency"]), "configuration": row["configuration"]}
        cells["questions"] = str(row["questions"])
        if self.repeats > 1:
            known = row["repeats"]
            cells["repeats"] = f"{known} of {self.repeats}" if known < self.repeats else str(known)
        for score in report.overall:
            missed = "" if score.unparsed is None else f", {score.unparsed:.1%} unparsed"
            cells[_named(score, report)] = _score_text(score) + missed
        same = f"{row['same_answers']} of {row['questions']}" if "same_answers" in row else "-"
        return cells | {"truncated": f"{report.truncated:.1%}", "same answers": same}

    def _notes(self, rows: list[dict[str, Any]]) -> str:
        first = next(iter(self.reports.values()))[0]
        bases: dict[str, list[str]] = {}
        for name, base in self.bases.items():
            if name != base and any(row["configuration"] == name for row in rows):
                bases.setdefault(base, []).append(name)
        over = "; ".join(f"{', '.join(names)} from {base}" for base, names in bases.items())
        repeats = max(row["repeats"] for row in rows)
        spread = (
            f"geometric mean of {repeats} repeats, with its 95% interval"
            if repeats > 1
            else "one repeat, so no interval"
        )
        records = {name: reports[0].record for (_, name), reports in self.reports.items()}
        what = "".join(
            f"* {name}: {one.speculation}; {Graphs(**one.config['graphs'])}\n" for name, one in records.items()
        )
        examples = f"{first.num_fewshot} from {first.fewshot_source}" if first.num_fewshot else "none"
        warning = f" Warning: {first.warning}." if first.warning else ""
        return (
            f"Model: {first.record.config['model']}, {first.record.caps['dtype']} on {first.record.processor}. Data: "
            f"{first.data_source}. Few-shot examples: {examples}.{warning}\n\n{what}\n"
            f"{first.task} (version {first.task_version}, lm-eval {first.lm_eval_version}): {self._counts(rows)} "
            f"({first.sampled}). Scores: "
            f"{first.overall[0].metric} ± standard error. Speedup (ratio of output tok/s, {spread}) and difference (of "
            "the first score on the same questions, with the two-sided p value of McNemar's test, or ± standard error "
            "where answers are not right or wrong) are of "
            f"{over or 'none'}. TTFT and TPOT: means; tok/s: of output tokens. Same answers: token for "
            f"token.{self._deterministic()}"
        )

    def _counts(self, rows: list[dict[str, Any]]) -> str:
        """How many answers a point has, and the hash of their prompts."""
        hashes = {row["questions"]: "" for row in rows}
        hashes |= {len(one.questions): one.prompts_sha256[:16] for [one, *_] in self.reports.values()}
        if len(hashes) == 1:
            [(number, sha256)] = hashes.items()
            return f"{number} answers per point, prompts sha256 {sha256}"
        named = "; ".join(f"{number}: {sha256}" for number, sha256 in sorted(hashes.items()))
        return f"{min(hashes)} to {max(hashes)} answers per point, prompts sha256 of {named}"

    def _deterministic(self) -> str:
        found = {name: reports[0].record.is_deterministic for (_, name), reports in self.reports.items()}
        names = [name for name, is_on in found.items() if is_on]
        if not names:
            return ""
        return f" Deterministic: {'yes' if len(names) == len(found) else ', '.join(names)}."


def bases_of(configs: Mapping[str, EngineConfig]) -> dict[str, str]:
    """The configuration that each one is compared with: without speculation and with the same prefill graphs, so that a
    ratio compares one thing; else the one named baseline, else the first."""
    first = BASELINE if BASELINE in configs else next(iter(configs))
    plain = {config.graphs.prefill: name for name, config in reversed(list(configs.items())) if not _drafts(config)}
    return {
        name: plain.get(config.graphs.prefill, first) if _drafts(config) else first for name, config in configs.items()
    }


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

    load    opens the engines; not called if nothing is left
    failed  why a configuration has no engine, which `load` may add to. Its points are left out and the others go on, as
            after a point that fails; the same call runs them again

    Refused: a folder with other settings, tasks that generate nothing, and what is refused at all points.
    """
    ready = prepare(replace(options.task, output=None))
    if not ready.task.generates:
        works = f"task {options.task.task} ({ready.task.kind}) scores given texts and decodes nothing"
        raise refuse("configs", ", ".join(configs), f"{works}; leave it out, or use a task that generates")
    if ready.task.is_group and not any(one.has_aggregation for one in [*ready.task.groups.values()][:1]):
        raise refuse("task", options.task.task, "is a tag or group without a score of its own; name one of its tasks")
    if log is not None:
        log(f"data: {ready.task.data_source}")
        if ready.task.warning:
            log(f"warning: {ready.task.warning}")
    plan, every = _plan(configs, options), list(points(configs, options))
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
            _run(every, load, ready, options, plan, folder, found, failed, log, progress)
        finally:
            if found:
                grid().save(folder)
    return grid()


def load_grid(folder: Path) -> Grid:
    """The finished points of an evaluation in `folder`, from disk. Why others were left out is not kept.

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
    return _grid(reports, configs, {}, plan["repeats"])


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
    warm, refused = set[Place](), list[Exception]()
    counts = {point: ready.task.questions(options.limit(point.concurrency)) for point in left}
    waves = Waves(progress, ((count, point.concurrency) for point, count in counts.items()))
    with load() as engines:
        for point in left:
            name, place = point.configuration, f"{point.configuration} at concurrency {point.concurrency}"
            if name not in engines or place in failed:
                waves.finish(counts[point], point.concurrency)
                continue
            asked = replace(ready.options, concurrency=point.concurrency, limit=options.limit(point.concurrency))
            ours = replace(ready, options=asked)
            try:
                if (point.concurrency, name) not in warm:
                    _warm_up(ours, engines[name])
                    warm.add((point.concurrency, name))
                engines[name].forget_prefixes()
                report = ours.run(engines[name], lambda *_: waves.add(point.concurrency))  # noqa: B023
            except Exception as error:
                reason = one_line(error)
                if log is not None and reason not in failed.values():
                    log(f"failed: {place}: {reason}")
                failed[place] = reason
                refused.append(error)
                continue
            finally:
                waves.finish(counts[point], point.concurrency)
            _check_prompts([*(found[one] for one in found if one.concurrency == point.concurrency), report])
            _keep(report, point, plan, folder)
            found[point] = report
    if not found and {*failed.values()} == {str(error) for error in refused if isinstance(error, SpecbatchError)}:
        raise refused[0]  # what all points have in common is in the settings


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


def _plan(configs: Mapping[str, EngineConfig], options: GridOptions) -> dict[str, Any]:
    """Everything that the points are made from, as JSON."""
    settings = {item.name: getattr(options.task, item.name) for item in fields(options.task)}
    plan = {
        "configurations": {name: config.as_dict() for name, config in configs.items()},
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "prompts_per_concurrency": options.prompts_per_concurrency,
        "eval": {key: value for key, value in settings.items() if key not in ("output", "overwrite", "concurrency")},
    }
    found: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return found


def _kept(finished: int, points: int, folder: Path) -> str:
    return f"kept {finished} of {points} points in {folder}; the same command with this --out continues"


def _remove(folder: Path, configs: Mapping[str, EngineConfig]) -> None:
    """Remove the results of an interrupted evaluation."""
    for name in configs:
        shutil.rmtree(folder / folder_name(name), ignore_errors=True)
    for name in (PLAN, *SUMMARY):
        (folder / name).unlink(missing_ok=True)


def _warm_up(ready: PreparedEval, engine: InferenceEngine) -> None:
    """Answer a few questions before measuring, on a GPU a full batch and one more, so that compilation at first use
    does not slow the first point down."""
    options = ready.options
    count = WARM_UP if engine.caps.get("device") == "cpu" else max(WARM_UP, (options.concurrency or 0) + 1)
    tokens = min(options.max_new_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    few = replace(options, limit=min(options.limit or count, count), max_new_tokens=tokens)
    replace(ready, options=few).run(engine)


def _paired(base: EvalReport, report: EvalReport) -> dict[str, Any]:
    """The change of the first score from `base`, question by question, and how many answers are the same."""
    same = sum(
        ours["token_ids"] == theirs["token_ids"] for ours, theirs in zip(report.questions, base.questions, strict=True)
    )
    score = report.overall[0]
    chosen = score.filter, score.metric
    found: dict[str, Any] = {"same_answers": same}
    if all(is_binary(one, *chosen) for one in (base, report)):
        changed = changes(base, report, *chosen)
        counts = {"lost": len(changed.lost), "gained": len(changed.gained), "p": changed.p_changed()}
        return found | {"difference": changed.delta, **counts}
    old, new = ([row["scores"][score.filter][score.metric] for row in one.questions] for one in (base, report))
    found["difference"] = score.value - base.overall[0].value
    if all(isinstance(value, int | float) for value in old + new) and len(old) > 1:
        found["difference_stderr"] = stdev(b - a for a, b in zip(old, new, strict=True)) / len(old) ** 0.5
    return found


def _speedup(base: list[EvalReport], reports: list[EvalReport]) -> dict[str, Any]:
    """The ratio of output tok/s to `base`, with its interval and verdict."""
    before, after = (Replicates([Path()] * len(each), [one.record for one in each]) for each in (base, reports))
    found = speedup_of(METRICS["output_throughput"], before, after)
    if found is None:
        return {}
    numbers = {"speedup": found.ratio, "speedup_low": found.low, "speedup_high": found.high, "verdict": found.verdict}
    return {**numbers, "speedup_text": str(found) if found.verdict != ONE_REPEAT else f"{found.ratio:.2f}"}


def _score_text(score: Score) -> str:
    return f"{score.value:.3f}" + ("" if score.stderr is None else f" ± {score.stderr:.3f}")


def _difference_text(row: Mapping[str, Any]) -> str:
    text = f"{row['difference']:+.3f}"
    if "p" in row:
        return f"{text} (p = {row['p']:.2g})"
    return f"{text} ± {row['difference_stderr']:.3f}" if "difference_stderr" in row else text


def _named(score: Score, report: EvalReport) -> str:
    """The heading of a score: its filter, or its metric, or both where one of them does not tell scores apart."""
    filters, metrics = ({getattr(one, name) for one in report.overall} for name in ("filter", "metric"))
    if len(filters) == 1:
        return score.metric
    return score.filter if len(metrics) == 1 else f"{score.filter} {score.metric}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _drafts(config: EngineConfig) -> bool:
    return config.speculation.algorithm != NO_SPECULATION
