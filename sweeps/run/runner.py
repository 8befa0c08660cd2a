"""Runs a sweep: configurations of a model in one process, repeats interleaved, one record per point.

All engines stay loaded on one copy of the weights, so that repeat 2 of A, B, C follows repeat 1 of A, B, C: a machine
that slows down affects all of them. Each configuration is warmed up at each concurrency, outside of the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.core.request import SamplingParams
from specbatch.errors import SpecbatchError, at_least, counted, each_once, refuse, reporting
from specbatch.jobs.engine_groups import Failed, Load, LoadedGroup, engines_of, in_batches, marginal_of
from specbatch.memory.page_pool import held_at_once
from specbatch.progress.bars import NotedReport, Waves, begin_phase
from specbatch.progress.point_times import PointWork
from specbatch.records.run_record import RunRecord
from specbatch.records.store import load_record
from specbatch.records.sweep_plan import Described, Point, check_plan, plan_of, points, round_of, rounds_at, save
from specbatch.sweeps.report.notes import failures
from specbatch.sweeps.report.tables import load_records, losses_of, precision_of, write_summary
from specbatch.sweeps.run.loading import (
    Configs,
    Engines,
    Log,
    check_early,
    clients_of,
    connected,
    fitted,
    noted,
    one_group,
)
from specbatch.sweeps.workload.conversations import Call, ask, label, longest
from specbatch.sweeps.workload.sanity_checks import warnings
from specbatch.sweeps.workload.workloads import Workload, sha256_of

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.replicas.cluster import Cluster
    from specbatch.sweeps.http.engine import HttpEngine
    from specbatch.text.tokenizer import Tokenizer

DIGEST = 16  # hexadecimal digits
WARM_UP_TOKENS = 16
CPU_WARM_UP = 4  # requests and tokens: a CPU has nothing to compile, and a whole batch takes as long as a point


@dataclass(frozen=True)
class SweepOptions:
    """Which points are run: each configuration at each concurrency, `repeats` times.

    until_precise   adds rounds at each concurrency until the 95% interval of every ratio to the baseline, which is
                    valid at every number of rounds (`specbatch.records.estimates`), is at most this (0.02: ±2%), or
                    `most_repeats` rounds have run; None: adds none
    section         the name of this sweep in a bench, which consists of several
    """

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    repeats: int = 1
    workload: Workload = field(default_factory=Workload)
    section: str = ""
    until_precise: float | None = None
    most_repeats: int = 10

    def __post_init__(self) -> None:
        for number in self.concurrency:
            if number < 1:
                raise refuse("concurrency", number, "use whole numbers of at least 1, for example 1,8,32,128")
        each_once("concurrency", self.concurrency)
        at_least("repeats", self.repeats, 1)
        if self.until_precise is not None:
            at_least("repeats", self.repeats, 2)  # of one there is no interval
            at_least("most_repeats", self.most_repeats, self.repeats)
        most, count = max(self.concurrency), self.workload.count(max(self.concurrency))
        if most > count and not self.workload.is_open:
            raise refuse("concurrency", most, f"there are {count} prompts; use at most {count}, or more groups")


def run_sweep(
    configs: Configs,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
    cluster: Cluster | None = None,
) -> str:
    """Run every point that is not finished, write its record as soon as it is done, and return the Markdown summary.

    `folder` exists; where it holds points of the same sweep, they stay as they are, except for failed ones, which run
    again. On an error or Ctrl-C the summary of what is finished is written first. A configuration that fails (it does
    not fit, its draft is unknown) leaves records with the error, and the others go on. Refused: what concerns all of
    them, such as an unknown model, a draft that all share, or a concurrency that none can hold.

    cluster: its workers measure the points; None: this process does
    """
    fit, failed = fitted(configs, options), Failed()
    if cluster is None:
        check_early(fit, failed, log)

        def load(group: Configs) -> AbstractContextManager[Engines]:
            return connected(group, log, options.workload, failed)

        run = partial(run_points, fit, load, options, folder, log=log, report=report, failed=failed)
    else:
        from specbatch.sweeps.run.blocks import run_blocks

        one_group(fit)
        run = partial(run_blocks, cluster, engines_of(fit), options, folder, log=log, report=report)
    return _summarized(fit, run, options, folder, log)


def run_server(
    server: HttpEngine,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> str:
    """Run a sweep with a server as the only configuration, named by its model. A point whose requests all fail leaves a
    record with the error, and the others go on."""
    name = server.model
    configs = {name: server.config}
    run = partial(run_points, configs, lambda _: nullcontext({name: server}), options, folder, log=log, report=report)
    return _summarized(configs, run, options, folder, log)


def _summarized(
    configs: Mapping[str, Described],
    run: Callable[[], None],
    options: SweepOptions,
    folder: Path,
    log: Log | None,
) -> str:
    """Run all points and write the summary, also of a sweep that is interrupted or fails."""

    def kept() -> str:
        finished = sum(point.is_finished(folder) for point in points(configs, options, folder))
        return what_is_kept(finished, f"the summary in {folder}")

    with reporting(kept):
        try:
            run()
        finally:
            begun = any(point.is_finished(folder) for point in points(configs, options))
            summary = write_summary(folder) if begun else ""
    if log is not None and (below := losses_of(load_records(folder))):
        log(below.log_text)
    return summary


def what_is_kept(finished: int, tables: str) -> str:
    """How many points are finished, for an interruption or a failure. tables: which are written, and where."""
    if not finished:
        return "no point was finished"
    return f"kept {counted(finished, 'finished point')} and {tables}; the same command with this --out continues"


def run_points(
    configs: Mapping[str, Described],
    load: Load,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
    failed: Failed | None = None,
    measured: Callable[[Any, Point, RunRecord], None] | None = None,
) -> None:
    """Run every point that has no record yet, or failed, and write its record as soon as it is done.

    load      opens the engines of some configurations; not called if nothing is left
    failed    engines that could not be built. Their points, and those that fail, leave a record with the error, and the
              others go on. None: an error ends the sweep
    measured  called with engine, point and record before the record is written
    """
    if len(engines_of(configs)) < len(configs):
        options.workload.refuse_unsent()
    plan = plan_of(configs, options)
    check_plan(folder, plan)
    every = list(points(configs, options, folder))
    left = [point for point in every if not is_measured(point, folder)] or further_rounds(configs, options, folder)
    if not left:
        if log is not None:
            log(f"{f'{options.section}: ' if options.section else ''}{len(every)} of {len(every)} points are finished")
        return
    if report is not None and options.section:
        begin_phase(report, f"bench {options.section}")  # the remaining time is that of the section
    waves = Waves(report, marginal=marginal_of(configs))
    with LoadedGroup(configs, load, failed) as loaded:

        def run(engines: Engines, ours: list[Point]) -> None:
            for point, record in measured_points(configs, engines, options, ours, log, waves, failed, loaded.tokenizer):
                waves.finish(*work_of(point, options), record.metrics.get("duration_s"))
                if measured is not None and not record.error:
                    measured(engines[point.configuration], point, record)
                save(folder, plan, point, record)

        while left:
            waves.expect(work_of(point, options) for point in left)
            lost: list[Point] = []  # of groups that cannot be loaded
            for place, ours in in_batches(left, loaded.groups):
                if engines := loaded.engines(place):
                    run(engines, ours)
                else:
                    lost += ours
            run({}, lost)
            left = further_rounds(configs, options, folder)


def work_of(point: Point, options: SweepOptions) -> PointWork:
    """The requests of a point, for the remaining time."""
    return PointWork(options.workload.requests(point.concurrency), point.concurrency, point.configuration)


def further_rounds(configs: Iterable[str], options: SweepOptions, folder: Path) -> list[Point]:
    """The next round at each concurrency where a ratio is not known to `options.until_precise` yet. Configurations that
    fail have none."""
    if options.until_precise is None:
        return []
    known = precision_of(load_records(folder))
    vague = {concurrency for (concurrency, _), share in known.items() if share > options.until_precise}
    rounds = {number: rounds_at(number, options.repeats, folder) for number in options.concurrency if number in vague}
    return [
        point
        for concurrency, done in rounds.items()
        if done < options.most_repeats
        for point in round_of(configs, concurrency, done + 1)
    ]


def is_measured(point: Point, folder: Path) -> bool:
    """Whether a point has a record, of a server without failed requests: where it has stopped, the first ones may have
    ended before."""
    if not point.is_finished(folder):
        return False
    record = load_record("output", point.folder(folder))
    return record.error is None and not ("server" in record.config and record.counters.get("errors"))


def measured_points(
    configs: Mapping[str, Described],
    engines: Engines,
    options: SweepOptions,
    left: list[Point],
    log: Log | None,
    waves: Waves,
    failed: Failed | None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[tuple[Point, RunRecord]]:
    """Measure the points that are left, in the order of a sweep. waves: counts their completions; failed: as in
    `run_points`; tokenizer: None: that of the engines."""
    if not left:
        return
    workload, most, shown_before = options.workload, max(options.concurrency), set[str]()
    logged = {*(failed or {}).items()}  # an engine that could not be built is logged where it was tried
    tokenizer = tokenizer or next(iter(engines.values())).tokenizer
    every = workload.prompts(tokenizer, workload.count(most))
    params = workload.params(len(every))
    lengths = list(longest(workload, tokenizer, every, params))
    for client in clients_of(engines):
        client.know_messages(every, workload.messages(len(every)))
    held: dict[str, str] | None = None if failed is None else {}
    for name, engine in engines.items():
        with noted(held, name):
            check_concurrency(name, engine.caps, _replicas(engine), most, lengths)
    if held and {*held, *(failed or ())} >= {*configs} and not options.section:  # a bench records the points that fit
        raise SpecbatchError(next(iter(held.values())))
    for concurrency, ours in groupby(left, key=lambda point: point.concurrency):
        now, prompts = list(ours), every[: workload.count(concurrency)]
        wanted = params[: len(prompts)]
        errors = None if failed is None else dict(failed)  # of this concurrency
        for name in dict.fromkeys(point.configuration for point in now if point.configuration in engines):
            with noted(errors, name):
                check_concurrency(
                    name, engines[name].caps, _replicas(engines[name]), concurrency, lengths[: len(prompts)]
                )
                _warm_up(engines[name], prompts, wanted, concurrency)
        for point in now:
            name, record = point.configuration, None
            if not errors or name not in errors:
                with noted(errors, name):
                    count = partial(waves.add, concurrency, name=name)
                    waves.begin()
                    record = _measure(engines[name], prompts, wanted, workload, concurrency, count)
            if record is None:
                assert errors is not None
                record = RunRecord(configs[name].as_dict(), {}, {}, {}, [], workload.describe(prompts))
                record.workload["error"] = errors[name]
            if record.error:
                if log is not None and (name, record.error) not in logged:
                    log(f"failed: {_where(point)}: {record.error}")
                logged.add((name, record.error))
            elif log is not None:
                _log_warnings(point, record, log, shown_before)
            if options.until_precise is not None:
                record.workload["until_precise"] = options.until_precise
            if options.section:
                record.workload["section"] = options.section
            yield point, record


def _log_warnings(point: Point, record: RunRecord, log: Log, shown_before: set[str]) -> None:
    """Log warnings that were not shown before."""
    for line in record.workload["warnings"]:
        if line not in shown_before:
            log(f"warning: {_where(point)}: {line}")
        shown_before.add(line)


def _where(point: Point) -> str:
    return f"{point.configuration} at concurrency {point.concurrency}, repeat {point.repeat}"


def check_concurrency(name: str, caps: Mapping[str, Any], replicas: int, most: int, lengths: list[int]) -> None:
    """Refuse requests of these lengths that would wait for a slot or for pages: the numbers would be of another
    concurrency. Each replica must hold its share, of the longest ones. A server does not report its pages."""
    if "kv_pages" not in caps:
        return
    limit = held_at_once(caps, lengths) * replicas
    if most > limit:
        fewer = f"at most {limit}, " if limit else ""
        raise refuse(
            "concurrency",
            most,
            f"{name} can hold {limit} of these requests at once (max_running={caps['max_running']}, "
            f"kv_pages={caps['kv_pages']}); use {fewer}shorter requests or more kv_pages",
        )


def _warm_up(
    engine: InferenceEngine | HttpEngine, prompts: list[list[int]], params: list[SamplingParams], concurrency: int
) -> None:
    """Run a full batch, and on a GPU one request that takes the slot of another. Prompt passes alternate with
    iterations, so each request has enough new tokens that the first one still runs when the last one begins."""
    caps, replicas, most = engine.caps, _replicas(engine), WARM_UP_TOKENS
    running = -(-concurrency // replicas) * replicas  # each replica has a full batch
    count = running
    if caps.get("device") == "cpu":
        count, most = min(count, CPU_WARM_UP * replicas), CPU_WARM_UP
    elif "prefill_chunk" in caps:
        count += replicas
        passes = -(-sum(map(len, prompts[:running])) // (caps["prefill_chunk"] * replicas))
        most = max(most, (passes + 2) * caps["verify_rows"])
    short = [replace(wanted, max_new_tokens=min(wanted.max_new_tokens, most)) for wanted in params[:count]]
    engine.generate(prompts[:count], short, concurrency=min(running, len(short)))


def _replicas(engine: InferenceEngine | HttpEngine) -> int:
    return engine.config.data_parallel if isinstance(engine.config, EngineConfig) else 1


def _has_corpus(engine: InferenceEngine | HttpEngine) -> bool:
    return isinstance(engine.config, EngineConfig) and engine.config.speculation.corpus is not None


def _measure(
    engine: InferenceEngine | HttpEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    workload: Workload,
    concurrency: int,
    count: Callable[[], None],
) -> RunRecord:
    """Measure one point: a closed loop that keeps `concurrency` requests unfinished, prompts that arrive by a clock, of
    which at most `concurrency` run, or one request after the other. At its start the prefix cache is empty, and the
    corpus has no answers of this run."""
    if engine.config.prefix_cache or _has_corpus(engine):
        engine.forget_prefixes()
    engine.reset_record()
    asked = list(ask(engine, workload, prompts, params, concurrency, lambda _: count()))
    completions = [completion for call in asked for completion in call.completions]
    record = engine.record(concurrency=concurrency, workload=workload.describe(prompts))
    label(workload, asked, record.requests, len(prompts))
    _add_digests(record.requests, asked, len(prompts))
    if workload.slo is not None:
        record.metrics |= workload.slo.metrics(record.requests, record.metrics["duration_s"])
    record.workload["output_sha256"] = sha256_of([item.token_ids or item.text for item in completions])
    real = record.simulated_accept_length is None  # a simulated accept length makes the text meaningless
    record.workload["warnings"] = list(warnings(workload, completions, params, drafts=record.drafts)) if real else []
    if replaced := record.counters.get("replaced_replicas"):  # the times include the loss
        record.workload["error"] = f"{counted(replaced, 'replica')} ended and had to be replaced"
        record.metrics, record.counters, record.requests = {}, {}, []
        return record
    if (errors := failures(record)) and not record.metrics["requests"]:
        reasons = "; ".join(f"{error} ({number})" for error, number in errors)
        record.workload["error"] = f"every request failed: {reasons}"
    return record


def _add_digests(rows: list[dict[str, Any]], asked: list[Call], count: int) -> None:
    """Add to each row, labelled by `label`, what its answer was, so that answers can be compared. A server reports no
    tokens."""
    answers = {(call.turn - 1) * count + call.places[one.index]: one for call in asked for one in call.completions}
    for row in rows:
        if (answer := answers.get(row["index"])) is not None and answer.is_complete:
            row["text_digest"] = sha256_of([answer.text])[:DIGEST]
            if answer.token_ids:
                row["token_digest"] = sha256_of([answer.token_ids])[:DIGEST]
