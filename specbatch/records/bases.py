"""Which configuration each one is compared with, so that a speedup is the effect of one thing.

A configuration with speculation is compared with the one without it that has the same prefill graphs and as many
devices (tensor and data parallelism). Where there is none, and for configurations without speculation, it is the
reference: the one named `baseline`, else the first without speculation, else the first. Servers of other engines do not
say which prefill graphs they have, so they are compared with `baseline`, else with the first.

`sweep`, `bench`, `report` and `eval --configs` take the base of a ratio from here, so they agree about the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import NO_SPECULATION
from specbatch.errors import listed
from specbatch.records.run_record import RunRecord

if TYPE_CHECKING:
    from specbatch.records.sweep_plan import Described

BASELINE = "baseline"


def bases_of(configurations: Mapping[str, RunRecord | Described | Mapping[str, Any]]) -> dict[str, str]:
    """The base of each configuration, by name. The base of the reference is the reference itself.

    configurations: all of a sweep, in its order, even those that failed; or their settings as in its plan.
    """
    settings = {name: _settings(one) for name, one in configurations.items()}
    setups = {name: _setup(one) for name, one in settings.items()}
    plain = {name: setups[name] for name, one in settings.items() if setups[name] and not _drafts(one)}
    reference = BASELINE if BASELINE in configurations else next(iter(plain or configurations))
    found = {}
    for name, one in settings.items():
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


def _settings(one: RunRecord | Described | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(one, RunRecord):
        return one.config
    return one if isinstance(one, Mapping) else one.as_dict()


def _setup(settings: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """Prefill graphs, tensor and data parallelism; None for a server."""
    if "server" in settings:
        return None
    return settings["graphs"]["prefill"], settings.get("tensor_parallel", 1), settings.get("data_parallel", 1)


def _drafts(settings: Mapping[str, Any]) -> bool:
    return bool(settings["speculation"]["algorithm"] != NO_SPECULATION)
