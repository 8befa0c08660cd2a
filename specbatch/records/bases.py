"""Which configuration each one is compared with, so that a speedup is the effect of one thing.

A configuration with speculation is compared with the one without it that has the same prefill graphs and as many
devices (tensor and data parallelism). Where there is none, and for configurations without speculation, it is the
reference: the one named `baseline`, else the first without speculation, else the first. Servers of other engines do not
say which prefill graphs they have, so they are compared with `baseline`, else with the first.

`sweep`, `bench`, `report` and `eval --configs` take the base of a ratio from here, so they agree about the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import listed
from specbatch.records.run_record import RunRecord

BASELINE = "baseline"


def bases_of(configurations: Mapping[str, RunRecord | EngineConfig]) -> dict[str, str]:
    """The base of each configuration, by name. The base of the reference is the reference itself.

    configurations: all of a sweep, in its order, even those that failed.
    """
    setups = {name: _setup(one) for name, one in configurations.items()}
    plain = {name: setups[name] for name, one in configurations.items() if setups[name] and not _drafts(one)}
    reference = BASELINE if BASELINE in configurations else next(iter(plain or configurations))
    found = {}
    for name, one in configurations.items():
        alike = [other for other, theirs in plain.items() if theirs == setups[name]] if _drafts(one) else []
        found[name] = reference if reference in alike or not alike else alike[0]
    return found


def base_in_words(base: str) -> str:
    """As sentences name it."""
    return "the baseline" if base == BASELINE else base


def bases_sentence(bases: Mapping[str, str]) -> str:
    """Which configuration is compared with which, as `bases_of` has it; "" if all are compared with the same one."""
    reference = next((base for name, base in bases.items() if name == base), "")
    others: dict[str, list[str]] = {}
    for name, base in bases.items():
        if base != reference:
            others.setdefault(base, []).append(name)
    parts = (
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} compared with {base}, " for base, names in others.items()
    )
    return f"{''.join(parts)}the others with {reference}." if others else ""


def _setup(one: RunRecord | EngineConfig) -> tuple[str, int, int] | None:
    """Prefill graphs, tensor and data parallelism; None for a server."""
    config = one.as_dict() if isinstance(one, EngineConfig) else one.config
    if "server" in config:
        return None
    return config["graphs"]["prefill"], config.get("tensor_parallel", 1), config.get("data_parallel", 1)


def _drafts(one: RunRecord | EngineConfig) -> bool:
    return one.drafts if isinstance(one, RunRecord) else one.speculation.algorithm != NO_SPECULATION
