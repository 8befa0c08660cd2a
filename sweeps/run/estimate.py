"""Points, memory and estimated time of a sweep, with nothing loaded: `specbatch sweep --dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from tabulate import tabulate

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import counted
from specbatch.memory.planner import MemoryPlan, MemoryShare, size_text
from specbatch.progress.bars import Report, time_text
from specbatch.records.sweep_plan import check_plan, plan_of, points
from specbatch.servers.server import Server
from specbatch.sweeps.machine.limits import cpu_speeds, measure_machine
from specbatch.sweeps.run.benchmark import Benchmark, SweepOptions
from specbatch.sweeps.run.engine_groups import engines_of, groups_of
from specbatch.sweeps.run.loading import Configs, check, of_lengths, shares_of
from specbatch.sweeps.run.runner import is_measured
from specbatch.sweeps.run.unloaded import Unloaded

if TYPE_CHECKING:
    from pathlib import Path

    from specbatch.engine.setup.prepare import Prepared

_HEADS = ("configuration", "concurrency", "repeats", "prompts", "new tokens", "about")


class Estimate(NamedTuple):
    """What a sweep would run: points, the seconds of those of engines, how many are of servers, and all as text."""

    points: int
    seconds: float
    of_servers: int
    plan: str = ""

    def __str__(self) -> str:
        start = "without loading, graph capture, warm-up and verifying drafts; less if drafts are accepted or answers"
        servers = f"; {counted(self.of_servers, 'point')} of servers not included" if self.of_servers else ""
        about = f"about {time_text(self.seconds)} ({start} end early{servers})"
        return f"{self.plan}{counted(self.points, 'point')}, {about}\n"


def dry_run(configs: Configs, options: SweepOptions, folder: Path | None, report: Report | None = None) -> Estimate:
    """A row for each configuration and concurrency with points that would run with `folder` as the output: how many
    (repeats), the prompts and new tokens of each, and the time of all of them. Below are the settings of each
    configuration, and the memory that an engine (one replica) would get. Points of servers, which are not connected to,
    have no time.

    A step takes as long as reading all weights, or as multiplying them with a row of each request if that is longer,
    at the speeds that the device has now; prompt tokens are multiplied, too. Each step gives a request one token, and
    answers are as long as allowed: drafts that are accepted and answers that end early make a sweep faster. A
    point takes at least as long as its prompts take to arrive. Refused: engines that do not fit.
    """
    fit = options.fitted(configs)
    if folder is not None:
        check_plan(folder, plan_of(fit, options))
    found = _planned(fit, options)
    plans = {name: plan for name, (_, plan, _) in found.items()}
    first, _, share = next(iter(found.values()))
    own, tokenizer = engines_of(configs), first.target.tokenizer()
    engines = {name: Unloaded(own[name], tokenizer, one, plan) for name, (one, plan, _) in found.items()}
    ready = Benchmark(options).prepare(engines, tokenizer, report)
    for name, engine in engines.items():
        ready.check(name, engine, max(options.concurrency))
    options = ready.benchmark.options  # with the rows of these engines
    speeds = _speeds(first.device)
    left = [point for point in points(configs, options, folder) if folder is None or not is_measured(point, folder)]
    repeats = Counter((point.configuration, point.concurrency) for point in left)
    rows, total = [], 0.0
    for point in {(point.configuration, point.concurrency): point for point in left}.values():
        count = repeats[point.configuration, point.concurrency]
        prompts = options.workload.requests(point.concurrency)
        tokens = sum(wanted.max_new_tokens for wanted in options.workload.params(prompts))
        config, seconds = configs[point.configuration], None
        replicas = config.data_parallel if isinstance(config, EngineConfig) else 1
        read, rate = (speed / (replicas if first.device.type == "cpu" else 1) for speed in speeds)  # shared by all
        if (plan := plans.get(point.configuration)) is not None:
            multiply = plan.weights / (rate * first.dtype.itemsize / 2)  # seconds for one row
            running = min(-(-point.concurrency // replicas), plan.max_running)
            steps = -(-prompts // (running * replicas)) * tokens / prompts
            seconds = steps * max((plan.weights + plan.draft_weights) / read, running * multiply)
            seconds += prompts * options.workload.mean_input * multiply / replicas
            seconds = count * max(seconds, *(options.workload.arrivals(prompts) or [0.0])[-1:])
            total += seconds
        about = None if seconds is None else time_text(seconds)
        rows.append((point.configuration, point.concurrency, count, prompts, tokens, about))
    table = tabulate(rows, headers=_HEADS, tablefmt="github", missingval="-")
    pool = "; one pool for all" if share.pages is not None else ""
    replicated = any(one.data_parallel > 1 for one in engines_of(configs).values())
    lines = "\n".join(_described(configs, plans, "of each replica " if replicated else "", pool))
    of_servers = sum(point.configuration not in plans for point in left)
    return Estimate(len(left), total, of_servers, f"{table}\n\n{lines}\n")


def in_all(every: Collection[Estimate]) -> Estimate:
    """Of sweeps that run one after the other."""
    seconds = sum(one.seconds for one in every)
    return Estimate(sum(one.points for one in every), seconds, sum(one.of_servers for one in every), "in all: ")


def _planned(fit: Configs, options: SweepOptions) -> dict[str, tuple[Prepared, MemoryPlan, MemoryShare]]:
    """Each engine (one replica) with the memory that it would get, and its share. Refused: what `check` refuses, and
    engines that do not fit."""
    from specbatch.engine.setup.memory_plan import memory_plan
    from specbatch.replicas.engine import of_one

    found: dict[str, tuple[Prepared, MemoryPlan, MemoryShare]] = {}
    prepared = check(fit)
    for group in groups_of(engines_of(fit)):
        share = shares_of(group)[0]
        for name, config in group.items():
            one, (_, own) = prepared[name], of_one(config, share)
            with of_lengths(one.config, options.workload):
                found[name] = one, memory_plan(one, own), share
    return {name: found[name] for name in prepared}


def _described(configs: Configs, plans: Mapping[str, MemoryPlan], whose: str, pool: str) -> Iterator[str]:
    for name, config in configs.items():
        if isinstance(config, Server):
            yield f"* {name}: server at {config.base_url}"
        elif (plan := plans.get(name)) is not None:
            weights = f"{size_text(plan.weights + plan.draft_weights)} of weights"
            used = plan.weights + plan.draft_weights + plan.own_kv + plan.states + plan.workspace + plan.graphs
            kv = f"{plan.kv_pages} KV pages ({size_text(plan.kv)}{pool})"
            memory = f"{size_text(used)} {whose}of {size_text(plan.available)} available: {weights}, {kv}"
            yield f"* {name}: {config.speculation}; {config.graphs}; {memory}"


def _speeds(device: torch.device) -> tuple[float, float]:
    """Bytes and floating-point operations per second."""
    found = measure_machine(device)
    if found["read_bytes_s"] and found["gemm_flop_s"]:
        return found["read_bytes_s"], found["gemm_flop_s"]
    return cpu_speeds()
