"""`specbatch sweep`: configurations side by side in one process, repeats interleaved, one record per point.

    folder/<configuration>/c<concurrency>/r<repeat>/record.json, requests.jsonl

All engines stay loaded, on one copy of the weights, so that repeat 1 of A, B, C is followed by repeat 2 of A, B, C: a
machine that slows down slows all of them down. Each configuration is warmed up at each concurrency; that is in no
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config import EngineConfig, Speculation
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.memory.pages import held_at_once
from specbatch.memory.plan import ALONE, Place
from specbatch.metrics import RunRecord
from specbatch.progress import Report
from specbatch.request import Completion, SamplingParams
from specbatch.sweeps.doubts import doubts
from specbatch.sweeps.summaries import failures, simulated
from specbatch.sweeps.tables import load_records, losses_of, write_summary
from specbatch.sweeps.workloads import Workload, sha256_of

if TYPE_CHECKING:
    from specbatch.engine import Engine
    from specbatch.sweeps.http_engine import HttpEngine


def _scheduled(config: EngineConfig, schedule: str) -> EngineConfig:
    return replace(config, speculation=replace(config.speculation, schedule=schedule))


# name -> what it makes of the engine asked for. The baseline drafts nothing, under schedule v2.
CONFIGURATIONS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "baseline": lambda asked: replace(
        asked, speculation=Speculation(algorithm="none", schedule="v2"), draft_attention_backend="auto"
    ),
    "v1": lambda asked: _scheduled(asked, "v1"),
    "v2": lambda asked: _scheduled(asked, "v2"),
    "v2+piecewise": lambda asked: replace(_scheduled(asked, "v2"), graphs=replace(asked.graphs, prefill="piecewise")),
}
DEFAULT_CONFIGS = ("baseline", "v1", "v2")  # what runs on a CPU too
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class SweepOptions:
    """Which points are run: each configuration at each concurrency, `repeats` times."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    configs: tuple[str, ...] = DEFAULT_CONFIGS
    repeats: int = 1
    workload: Workload = field(default_factory=Workload)

    def __post_init__(self) -> None:
        for number in self.concurrency:
            if number < 1:
                raise refuse("concurrency", number, "use whole numbers of at least 1, for example 1,8,32,128")
        for name in self.configs:
            if name not in CONFIGURATIONS:
                raise refuse("configs", name, f"use some of {', '.join(CONFIGURATIONS)}")
        for setting in ("concurrency", "configs"):
            values = getattr(self, setting)
            if not values or len(set(values)) < len(values):
                raise refuse(setting, ",".join(map(str, values)), "name at least one, and each only once")
        at_least("repeats", self.repeats, 1)


def run_sweep(
    base: EngineConfig,
    options: SweepOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> str:
    """Run every point, write its record as soon as it is done, and return the Markdown summary.

    `base` is the engine with the speculation of v1 and v2; `folder` exists. On an error or Ctrl-C the
    summary of what is finished is written first. Refused: a concurrency that an engine cannot hold.
    """
    configs = engine_configs(base, options)
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        check_draft(configs.values(), log)
        for index, (name, config) in enumerate(configs.items()):
            first, side = next(iter(engines.values()), None), Place(index, len(configs))
            engines[name] = stack.enter_context(load_engine(name, config, log, weights_of=first, place=side))
        return run_points(engines, options, folder, log=log, report=report)


def run_points(
    engines: Mapping[str, Engine | HttpEngine],
    options: SweepOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> str:
    """The points of engines that are there; see `run_sweep`. A point of which every request failed ends the sweep, as
    an error."""
    finished, workload = 0, options.workload
    count = _counter(options, len(engines), report)
    try:
        tokenizer = next(iter(engines.values())).tokenizer
        most = max(options.concurrency)
        every = workload.prompts(tokenizer, workload.count(most))
        params = workload.params(len(every))
        for name, engine in engines.items():
            _check_concurrency(name, engine.caps, most, every, params)
        for concurrency in options.concurrency:
            prompts = every[: workload.count(concurrency)]
            for engine in engines.values():
                _warm_up(engine, prompts[:concurrency], params[:concurrency])
            for repeat, (place, name) in product(range(1, options.repeats + 1), enumerate(engines)):
                record = _measure(engines[name], prompts, params[: len(prompts)], workload, concurrency, count)
                where = f"{name} at concurrency {concurrency}, repeat {repeat}"
                failed = "; ".join(f"{error} ({number})" for error, number in failures(record))
                if failed and not record.metrics["requests"]:
                    kept = f"kept {finished} finished points in {folder}"
                    raise SpecbatchError(f"every request of {where} failed: {failed}; {kept}")
                if log is not None:
                    for line in record.workload["doubts"]:
                        log(f"doubtful: {where}: {line}")
                record.workload |= {
                    "configuration": name,
                    "place": place,
                    "concurrency": concurrency,
                    "repeat": repeat,
                }
                point = folder / name.replace("/", "_") / f"c{concurrency}" / f"r{repeat}"
                point.mkdir(parents=True)
                record.save(point)
                finished += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"kept {finished} finished points and their summary in {folder}") from None
    finally:
        summary = write_summary(folder) if finished else ""
    if log is not None and (below := losses_of(load_records(folder))):
        log(below)
    return summary


def engine_configs(base: EngineConfig, options: SweepOptions) -> dict[str, EngineConfig]:
    """The engine of each configuration. They live side by side."""
    most = max(options.concurrency)
    if base.max_running < most:
        raise refuse("max_running", base.max_running, f"concurrency {most} needs at least {most}")
    if base.speculation.algorithm == "none" and set(options.configs) - {"baseline"}:
        raise refuse(
            "algorithm", "none", "only the configuration baseline drafts nothing; use ngram, or another with its draft"
        )
    configs = {}
    for name in options.configs:
        configs[name] = replace(
            CONFIGURATIONS[name](base), max_model_len=base.max_model_len or options.workload.max_model_len
        )
    return configs


def check_draft(configs: Iterable[EngineConfig], log: Callable[[str], None] | None) -> None:
    """Refuse a draft that does not fit, before an engine that drafts nothing has loaded the target in vain."""
    from specbatch.build import prepare

    drafting = (config for config in configs if config.speculation.algorithm not in ("none", "ngram"))
    if (config := next(drafting, None)) is not None:
        prepare(config, log or (lambda line: None))


def load_engine(
    name: str,
    config: EngineConfig,
    log: Callable[[str], None] | None,
    *,
    weights_of: Engine | None,
    place: Place = ALONE,
) -> Engine:
    """The engine of a configuration, whose name stands before each line of its log."""
    from specbatch.engine import Engine

    say = None if log is None else lambda line: log(f"{name}: {line}")
    return Engine(config, log=say, weights_of=weights_of, place=place)


def _check_concurrency(
    name: str, caps: dict[str, Any], most: int, prompts: list[list[int]], params: list[SamplingParams]
) -> None:
    """Refuse what would wait for a place or for pages: its numbers would be of another concurrency. A server says
    nothing of its pages."""
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
    short = [replace(wanted, max_new_tokens=min(wanted.max_new_tokens, WARM_UP_TOKENS)) for wanted in params]
    engine.generate(prompts, short, concurrency=len(prompts))


def _measure(
    engine: Engine | HttpEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    workload: Workload,
    concurrency: int,
    on_completion: Callable[[Completion], None],
) -> RunRecord:
    """One point: a closed loop that keeps `concurrency` requests unfinished, or prompts that arrive by a clock, at most
    `concurrency` of them worked on. The prefix cache is empty at its start."""
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
    real = simulated(record) is None  # else the text is no model's
    record.workload["doubts"] = list(doubts(workload, completions, params)) if real else []
    return record


def _counter(options: SweepOptions, engines: int, report: Report | None) -> Callable[[Completion], None]:
    """Reports progress in requests over the whole sweep, so that the time left is known early."""
    per_round = sum(options.workload.count(concurrency) for concurrency in options.concurrency)
    total = per_round * options.repeats * engines
    done = 0

    def count(completion: Completion) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total)

    return count
