"""Checks what a run asks against engines that are not loaded, so that what cannot run is known before a run begins.

One rule for sweeps and evaluations: what all configurations have in common, or all that speculate, is refused before
anything is loaded. What one of several cannot run is logged at once, its points fail, and the others go on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbatch.config.draft_shape import AUTO
from specbatch.config.engine_config import EngineConfig
from specbatch.engine.requests.prompt_reader import PromptReader
from specbatch.memory.page_pool import reserved_length
from specbatch.memory.planner import MemoryPlan, longest_request
from specbatch.progress.bars import NotedReport, phase
from specbatch.sweeps.run.engine_groups import Failed, engines_of
from specbatch.sweeps.run.loading import Configs, Log, check_machine, noted, of_lengths, refuse_failed, speculating_of
from specbatch.sweeps.run.runner import TOKENIZING, PointWorkload

if TYPE_CHECKING:
    from specbatch.engine.scoring import Likelihood
    from specbatch.engine.setup.prepare import Prepared
    from specbatch.text.tokenizer import Tokenizer


class AllFit(Exception):
    """Prompts reached an engine that is not loaded: they have been checked."""


class Unloaded:
    """What a workload needs of an engine to make and check prompts. What only its memory plan knows limits nothing
    without a plan. Refused: what `check_machine` refuses, and a `max_model_len` that the models or `kv_pages` do not
    have."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        one: Prepared | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:
        """tokenizer: None: that of its target. one: a replica that has been checked."""
        one = one or check_machine(config)
        self.config, self.tokenizer, own = config, tokenizer or one.target.tokenizer(), one.config
        slots = one.draft.kv_slots_per_step(own.speculation.num_drafts)
        self.caps = {"page_size": own.page_size, "verify_slots": slots}
        if plan is not None:
            self.caps |= {name: getattr(plan, name) for name in ("max_running", "kv_pages", "max_model_len")}
        else:
            longest = longest_request(own, one.max_position, own.kv_pages, reserved_length(0, slots))
            running = sys.maxsize if own.max_running == AUTO else own.max_running
            self.caps |= {"max_running": running, "kv_pages": own.kv_pages or sys.maxsize, "max_model_len": longest}
        self.check = PromptReader(self.tokenizer, one.target.config, self.caps).check

    def generate(self, *_: Any, **__: Any) -> None:
        raise AllFit

    def score(self, pairs: Sequence[Any], **_: Any) -> list[Likelihood]:
        """Of a group of tasks that scores texts, too."""
        from specbatch.engine.scoring import Likelihood

        return [Likelihood(0.0, False) for _ in pairs]


def check_early(
    configs: Configs,
    workloads: Iterable[PointWorkload],
    failed: Failed,
    *,
    lengths_of: PointWorkload | None = None,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> dict[str, Unloaded]:
    """Find what cannot run before anything is loaded, by the rule of this module. Returns the other engines.

    workloads: those with points that are left; failed: gets why configurations can run no point; lengths_of: the
    workload whose lengths an error names, None: the first one
    """
    every, own, causes = list(workloads), engines_of(configs), list[Exception]()
    if not own or not every:
        return {}
    engines, lengths = dict[str, Unloaded](), (lengths_of or every[0]).lengths
    for name, config in own.items():
        with noted(failed, name, causes), of_lengths(config, lengths):
            tokenizer = next((engine.tokenizer for engine in engines.values()), None)  # it takes up to a second to load
            engines[name] = Unloaded(config, tokenizer)
    _refuse_common(own, failed, causes)
    unable = dict.fromkeys(engines, "")  # to run any point of the workloads so far: why
    lines = [f"{name}: {reason}" for name, reason in failed.items()]
    tokenizer = next(iter(engines.values())).tokenizer
    for workload in reversed(every):  # so that the prompts of the first one are made when it begins
        at = min(workload.concurrency) if workload.section else max(workload.concurrency)  # as in a run
        with phase(report, TOKENIZING) as tokenizing:
            ready = workload.prepare(engines, tokenizer, tokenizing)
        held, never, causes = Failed(), Failed(), list[Exception]()
        for name, engine in engines.items():
            with noted(held, name, causes):
                ready.check(name, engine, at)
            if name in held:  # fewer requests, with some of the same prompts, may fit
                with noted(never, name):
                    ready.check(name, engine, min(workload.concurrency))
        if engines.keys() <= held.keys():
            raise causes[0]
        unable = {name: never[name] for name in unable if name in never}
        of = f"{workload.section}: " if workload.section else ""
        lines = [*(f"{of}{name}: {reason}" for name, reason in held.items()), *lines]
    failed |= unable
    _refuse_common(own, failed, causes)
    if log is not None:
        for line in lines:
            log(line)
    return {name: engine for name, engine in engines.items() if name not in unable}


def _refuse_common(own: Mapping[str, EngineConfig], failed: Failed, causes: Sequence[Exception]) -> None:
    """Refuse what all engines, or all that speculate, cannot run."""
    for names in ({*own}, speculating_of(own)):
        if names and names <= failed.keys():
            refuse_failed(own, {name: failed[name] for name in own if name in names}, causes)
