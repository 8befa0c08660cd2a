"""Named engine configurations (baseline, v1, v2, v2+piecewise, ...) and engines that share one copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.engine_config import EngineConfig, Speculation
from specbatch.errors import each_once, refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

Log = Callable[[str], None]


def _scheduled(config: EngineConfig, schedule: str) -> EngineConfig:
    return replace(config, speculation=replace(config.speculation, schedule=schedule))


def _piecewise(config: EngineConfig) -> EngineConfig:
    return replace(config, graphs=replace(config.graphs, prefill="piecewise"))


def _baseline(config: EngineConfig) -> EngineConfig:
    none = Speculation(algorithm=NO_SPECULATION, schedule="v2")
    return replace(config, speculation=none, draft_attention_backend="auto")


# Each name changes the configuration of the user. The baseline runs without speculation, under schedule v2.
CONFIGURATIONS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "baseline": _baseline,
    "v1": lambda config: _scheduled(config, "v1"),
    "v2": lambda config: _scheduled(config, "v2"),
    "baseline+piecewise": lambda config: _piecewise(_baseline(config)),
    "v1+piecewise": lambda config: _piecewise(_scheduled(config, "v1")),
    "v2+piecewise": lambda config: _piecewise(_scheduled(config, "v2")),
}
PIECEWISE = "+piecewise"


def named(base: EngineConfig, names: Iterable[str]) -> dict[str, EngineConfig]:
    """The configurations of these names. base: the engine with the speculation of v1 and v2."""
    listed = list(names)
    for name in listed:
        if name not in CONFIGURATIONS:
            works = f"use some of {', '.join(CONFIGURATIONS)}, or the path of a file (.toml, .yaml, .yml)"
            raise refuse("configs", name, works)
    each_once("configs", listed)
    for name in listed if base.graphs.prefill == "piecewise" else ():
        if f"{name}{PIECEWISE}" in listed:
            works = f"{name} and {name}{PIECEWISE} would be the same; leave it out, or one of them"
            raise refuse("prefill_graph", "piecewise", works)
    if base.speculation.algorithm == NO_SPECULATION and any(not name.startswith("baseline") for name in listed):
        raise refuse(
            "algorithm",
            NO_SPECULATION,
            "only the configuration baseline drafts nothing; use ngram, or another with its draft",
        )
    return {name: CONFIGURATIONS[name](base) for name in listed}


def check_draft(configs: Iterable[EngineConfig], log: Log | None) -> None:
    """Refuse a draft or corpus that does not fit its target, before an engine without speculation has loaded the
    target."""
    from specbatch.engine.setup.prepare import prepare

    drafting = (config for config in configs if config.speculation.reads_files)
    if (config := next(drafting, None)) is not None:
        prepare(config, log or (lambda line: None))


def load_engine(
    name: str,
    config: EngineConfig,
    log: Log | None,
    *,
    weights_of: InferenceEngine | None,
    share: MemoryShare = EXCLUSIVE,
) -> InferenceEngine:
    """Load the engine of configuration `name`, which prefixes the lines of its log. weights_of: see `Engine`."""
    from specbatch.replicas.engine import engine_of

    prefixed = None if log is None else lambda line: log(f"{name}: {line}")
    return engine_of(config, log=prefixed, weights_of=weights_of, share=share)
