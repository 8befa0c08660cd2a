"""Runs a sweep: configurations of a model in one process, repeats interleaved, one record per point.

All engines stay loaded on one copy of the weights, so that repeat 2 of A, B, C follows repeat 1 of A, B, C: a machine
that slows down affects all of them. Each configuration is warmed up at each concurrency, outside of the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config import EngineConfig
from specbatch.core.request import Completion, SamplingParams
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.jobs.configurations import check_draft, load_engine
from specbatch.memory.page_pool import held_at_once
from specbatch.memory.planner import MemoryShare
from specbatch.progress import Report
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import Described, Point, check_plan, plan_of, points, save
from specbatch.sweeps.report.notes import failures
from specbatch.sweeps.report.tables import load_records, losses_of, write_summary
from specbatch.sweeps.run.sanity_checks import warnings
from specbatch.sweeps.run.workloads import Workload, sha256_of, shown

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine
    from specbatch.sweeps.run.http_engine import HttpEngine


WARM_UP_TOKENS = 16
CPU_WARM_UP = 4  # requests and tokens: a CPU has nothing to compile, and a whole batch takes as long as a point


@dataclass(frozen=True)
class SweepOptions:
    """Which points are run: each configuration at each concurrency, `repeats` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    repeats: int = 1
    workload: Workload = field(default_factory=Workload)

    def __post_init__(self) -> None:
        for number in self.concurrency:
            if number < 1:
                raise refuse("concurrency", number, "use whole numbers of at least 1, for example 1,8,32,128")
        if not self.concurrency or len(set(self.concurrency)) < len(self.concurrency):
            listed = ",".join(map(str, self.concurrency))
            raise refuse("concurrency", listed, "name at least one, and each only once")
        at_least("repeats", self.repeats, 1)
        most, count = max(self.concurrency), self.workload.count(max(self.concurrency))
        if most > count and not self.workload.is_open:
            raise refuse("concurrency", most, f"there are {count} prompts; use at most {count}, or more groups")


def run_sweep(
    configs: Mapping[str, EngineConfig],
    options: SweepOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> str:
    """Run every point that is not finished, write its record as soon as it is done, and return the Markdown summary.

    `folder` exists; where it holds points of the same sweep, they stay as they are. On an error or Ctrl-C the summary
    of what is finished is written first. Refused: a concurrency that an engine cannot hold.
    """
    fit = fitted(configs, options)
    return _finish(fit, lambda: _loaded(fit, options.workload, log), options, folder, log, report)


def run_server(
    server: HttpEngine,
    options: SweepOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> str:
    """Run a sweep with a server as the only configuration, named by its model. A point whose requests all fail ends the
    sweep with an error."""
    return _finish(
        {server.model: server.config}, lambda: nullcontext({server.model: server}), options, folder, log, report
    )


def _finish(
    configs: Mapping[str, Described],
    load: Callable[[], AbstractContextManager[Mapping[str, Engine | HttpEngine]]],
    options: SweepOptions,
    folder: Path,
    log: Callable[[str], None] | None,
    report: Report | None,
) -> str:
    plan = plan_of(configs, options)
    check_plan(folder, plan)
    every = list(points(configs, options))
    left = [point for point in every if not point.is_finished(folder)]
    try:
        if left:
            with load() as engines:
                _run(engines, options, left, partial(save, folder, plan), log, _counter(options, left, report))
    except KeyboardInterrupt:
        finished = sum(point.is_finished(folder) for point in every)
        works = "the same command with this --out continues"
        raise KeyboardInterrupt(f"kept {finished} finished points and their summary in {folder}; {works}") from None
    finally:
        summary = write_summary(folder) if any(point.is_finished(folder) for point in every) else ""
    if log is not None and (below := losses_of(load_records(folder))):
        log(below.log_text)
    return summary


@contextmanager
def _loaded(
    configs: Mapping[str, EngineConfig], workload: Workload, log: Callable[[str], None] | None
) -> Iterator[dict[str, Engine | HttpEngine]]:
    """The engines of the configurations, on one copy of the weights."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        check_draft(configs.values(), log)
        for index, (name, config) in enumerate(configs.items()):
            first, side = next(iter(engines.values()), None), MemoryShare(index, len(configs))
            with of_lengths(config, workload):
                engine = load_engine(name, config, log, weights_of=first, share=side)
            engines[name] = stack.enter_context(engine)
        yield {**engines}


def _run(
    engines: Mapping[str, Engine | HttpEngine],
    options: SweepOptions,
    left: list[Point],
    done: Callable[[Point, RunRecord], None],
    log: Callable[[str], None] | None,
    count: Callable[[Completion], None],
) -> None:
    workload, tokenizer = options.workload, next(iter(engines.values())).tokenizer
    most, shown_before = max(options.concurrency), set[str]()
    every = workload.prompts(tokenizer, workload.count(most))
    params = workload.params(len(every))
    for name, engine in engines.items():
        _check_concurrency(name, engine.caps, most, every, params)
    for concurrency, ours in groupby(left, key=lambda point: point.concurrency):
        now = list(ours)
        prompts = every[: workload.count(concurrency)]
        for name in dict.fromkeys(point.configuration for point in now):
            _warm_up(engines[name], prompts[:concurrency], params[:concurrency])
        for point in now:
            engine = engines[point.configuration]
            record = _measure(engine, prompts, params[: len(prompts)], workload, concurrency, count)
            where = f"{point.configuration} at concurrency {concurrency}, repeat {point.repeat}"
            failed = "; ".join(f"{error} ({number})" for error, number in failures(record))
            if failed and not record.metrics["requests"]:
                raise SpecbatchError(f"every request of {where} failed: {failed}; finished points are kept")
            for line in record.workload["warnings"]:
                if log is not None and line not in shown_before:
                    log(f"warning: {where}: {line}")
                shown_before.add(line)
            done(point, record)


def fitted(configs: Mapping[str, EngineConfig], options: SweepOptions) -> dict[str, EngineConfig]:
    """Engines as long as the workload's prompts and answers, unless they were asked to be longer."""
    most = max(options.concurrency)
    for config in configs.values():
        if config.max_running < most:
            raise refuse("max_running", config.max_running, f"concurrency {most} needs at least {most}")
    length = options.workload.max_model_len
    return {name: replace(config, max_model_len=config.max_model_len or length) for name, config in configs.items()}


@contextmanager
def of_lengths(config: EngineConfig, workload: Workload) -> Iterator[None]:
    """Report a max_model_len that is refused in terms of the workload's lengths, if it follows from them."""
    try:
        yield
    except SpecbatchError as error:
        if error.setting != "max_model_len" or config.max_model_len != workload.max_model_len:
            raise
        lengths = {name: shown(getattr(workload, name)) for name in ("shared_len", "input_len", "output_len")}
        name, *others = lengths if workload.is_grouped else ("input_len", "output_len")
        works = f"with {' and '.join(f'{other}={lengths[other]}' for other in others)} that is {error}"
        raise refuse(name, lengths[name], works) from None


def check(configs: Mapping[str, EngineConfig], options: SweepOptions) -> None:
    """Refuse engines that cannot run, with nothing loaded."""
    from specbatch.engine.builder import prepare

    for config in fitted(configs, options).values():
        prepare(config, lambda line: None)


def _check_concurrency(
    name: str, caps: dict[str, Any], most: int, prompts: list[list[int]], params: list[SamplingParams]
) -> None:
    """Refuse requests that would wait for a slot or for pages: the numbers would be of another concurrency. A server
    does not report its pages."""
    if "kv_pages" not in caps:
        return
    lengths = [len(prompt) + wanted.max_new_tokens for prompt, wanted in zip(prompts, params, strict=True)]
    limit = held_at_once(caps, lengths)
    if most > limit:
        raise refuse(
            "concurrency",
            most,
            f"{name} can hold {limit} of these requests at once (max_running={caps['max_running']}, "
            f"kv_pages={caps['kv_pages']}); use at most {limit}, shorter requests or more kv_pages",
        )


def _warm_up(engine: Engine | HttpEngine, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    on_cpu = engine.caps.get("device") == "cpu"
    most, count = (CPU_WARM_UP, CPU_WARM_UP) if on_cpu else (WARM_UP_TOKENS, len(prompts))
    short = [replace(wanted, max_new_tokens=min(wanted.max_new_tokens, most)) for wanted in params[:count]]
    engine.generate(prompts[:count], short, concurrency=len(short))


def _measure(
    engine: Engine | HttpEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    workload: Workload,
    concurrency: int,
    on_completion: Callable[[Completion], None],
) -> RunRecord:
    """Measure one point: a closed loop that keeps `concurrency` requests unfinished, or prompts that arrive by a clock,
    of which at most `concurrency` run. The prefix cache is empty at its start."""
    if engine.config.prefix_cache:
        engine.forget_prefixes()
    engine.reset_record()
    completions = engine.generate(
        prompts,
        params,
        concurrency=concurrency,
        arrivals=workload.arrivals(len(prompts)),
        on_completion=on_completion,
    )
    record = engine.record(concurrency=concurrency, workload=workload.describe(prompts))
    record.workload["output_sha256"] = sha256_of([item.token_ids or item.text for item in completions])
    real = record.simulated_accept_length is None  # a simulated accept length makes the text meaningless
    record.workload["warnings"] = list(warnings(workload, completions, params)) if real else []
    return record


def _counter(options: SweepOptions, left: list[Point], report: Report | None) -> Callable[[Completion], None]:
    """Report progress in requests over all points that are left."""
    total = sum(options.workload.count(point.concurrency) for point in left)
    done = 0

    def count(completion: Completion) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total)

    return count
