"""Checks prompts against engines that are not loaded, so that those that do not fit are refused before a run begins."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specbatch.config.draft_shape import AUTO
from specbatch.config.engine_config import EngineConfig
from specbatch.engine.requests.prompt_reader import PromptReader
from specbatch.errors import SpecbatchError
from specbatch.memory.page_pool import reserved_length
from specbatch.memory.planner import MemoryPlan, longest_request
from specbatch.progress.bars import NotedReport, Report, phase
from specbatch.records.sweep_plan import points
from specbatch.sweeps.run.engine_groups import Failed, engines_of, groups_of
from specbatch.sweeps.run.loading import (
    Configs,
    Log,
    check,
    check_machine,
    noted,
    of_lengths,
    refuse_failed,
    speculating_of,
)
from specbatch.sweeps.run.runner import TOKENIZING, PointWorkload, is_measured

if TYPE_CHECKING:
    from specbatch.engine.setup.prepare import Prepared
    from specbatch.text.tokenizer import Tokenizer


class Unloaded:
    """What a workload needs of an engine to make and check prompts. What only its memory plan knows limits nothing
    without a plan. Refused: a `max_model_len` that the models or `kv_pages` do not have."""

    def __init__(
        self, config: EngineConfig, one: Prepared, tokenizer: Tokenizer | None = None, plan: MemoryPlan | None = None
    ) -> None:
        """one: a replica. tokenizer: None: that of its target."""
        self.config, self.tokenizer, own = config, tokenizer or one.target.tokenizer(), one.config
        self.caps = {"page_size": own.page_size, "verify_slots": _verify_slots(one)}
        if plan is not None:
            self.caps |= {name: getattr(plan, name) for name in ("max_running", "kv_pages", "max_model_len")}
        else:
            longest = _longest(one)
            running = sys.maxsize if own.max_running == AUTO else own.max_running
            self.caps |= {"max_running": running, "kv_pages": own.kv_pages or sys.maxsize, "max_model_len": longest}
        self.check = PromptReader(self.tokenizer, one.target.config, self.caps).check


def _verify_slots(one: Prepared) -> int:
    return one.draft.kv_slots_per_step(one.config.speculation.num_drafts)


def _longest(one: Prepared) -> int:
    return longest_request(one.config, one.max_position, one.config.kv_pages, reserved_length(0, _verify_slots(one)))


def longest_of(config: EngineConfig) -> int | None:
    """Tokens of the longest prompt with its answer, as far as it is known before an engine is loaded. One that cannot
    run fails when it is built."""
    if config.max_model_len is None:
        with suppress(SpecbatchError):
            return _longest(check_machine(config))
    return config.max_model_len


def _tokenizer_of(engines: Mapping[str, Unloaded]) -> Tokenizer | None:
    """That of all engines of a model, if there is one yet: it takes up to a second to load."""
    return next((engine.tokenizer for engine in engines.values()), None)


def check_all(configs: Configs, workload: PointWorkload, folder: Path, report: Report | None = None) -> None:
    """Refuse engines that cannot run, prompts that one of them cannot run, and a concurrency that it cannot hold, with
    nothing loaded. Nothing is refused if all points are finished in `folder`."""
    is_done = all(is_measured(point, folder) for point in points(configs, workload))
    if is_done and not workload.more_points(configs, folder):
        return
    prepared, engines = check(configs), dict[str, Unloaded]()
    failed, causes = Failed(), list[Exception]()
    for name, config in engines_of(configs).items():
        with noted(failed, name, causes), of_lengths(config, workload.lengths):
            engines[name] = Unloaded(config, prepared[name], _tokenizer_of(engines))
    if engines:
        ready = workload.prepare(engines, next(iter(engines.values())).tokenizer, report)
        for name, engine in engines.items():
            with noted(failed, name, causes):
                ready.check(name, engine, max(workload.concurrency))
    refuse_failed(prepared, failed, causes)


def check_early(
    configs: Configs,
    workloads: Iterable[PointWorkload],
    failed: Failed,
    *,
    lengths_of: PointWorkload,
    log: Log | None,
    report: NotedReport | None = None,
) -> dict[str, Unloaded]:
    """Find what cannot run before another group of engines, or another workload, has run for hours. Raises what all
    configurations have in common. Returns the engines of several groups or workloads.

    workloads: those with points that are left; lengths_of: the one whose lengths an error names
    """
    every, own, causes = list(workloads), engines_of(configs), list[Exception]()
    is_one_group = len(groups_of(configs)) == 1
    if not own or not every or (is_one_group and len(every) == 1):
        return {}  # they are loaded, and all prompts are checked, before any point runs
    engines, short = dict[str, Unloaded](), Failed()
    if is_one_group:
        failed = Failed()  # they are built, which fails again, before any point runs
    for name, config in own.items():
        with noted(failed, name, causes):
            one = check_machine(config)
            with noted(short, name, causes), of_lengths(config, lengths_of.lengths):
                engines[name] = Unloaded(config, one, _tokenizer_of(engines))
        if log is not None and not is_one_group and name in (found := failed | short):
            log(f"{name}: {found[name]}")
    if len(causes) == len(own):
        raise causes[0]
    if (speculating := speculating_of(configs)) and speculating <= failed.keys():
        raise SpecbatchError(next(iter(failed.values())), setting="configs")
    tokenizer = next(iter(engines.values())).tokenizer
    for workload in every:
        at = min(workload.concurrency) if workload.section else max(workload.concurrency)  # as in a run
        held, causes = Failed(), list[Exception]()
        with phase(report, TOKENIZING) as tokenizing:
            ready = workload.prepare(engines, tokenizer, tokenizing)
        for name, engine in engines.items():
            with noted(held, name, causes):
                ready.check(name, engine, at)
        if engines.keys() <= held.keys():
            raise causes[0]
        if log is not None:
            for name, reason in held.items():
                log(f"{f'{workload.section}: ' if workload.section else ''}{name}: {reason}")
    return engines
