"""Groups of configurations whose engines can share weights, and in which order the points of a sweep load them.

Engines on another number of devices (`ON_DEVICES`) cannot use the same copy of the weights. Of several groups one is
loaded at a time: each round loads them one after the other, in the other order than the round before (A B, B A, ...),
so that every round has all configurations, and a machine that slows down affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import reason_of
from specbatch.progress.point_times import MARGINAL, MARGINAL_ON_CPU
from specbatch.records.sweep_plan import Point
from specbatch.runtime.device import device_type

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

ON_DEVICES = ("tensor_parallel", "data_parallel")
Engines = Mapping[str, Any]  # engines, or clients of servers, by configuration
Failed = dict[str, str]  # by configuration: why its engine could not be built
Load = Callable[[Mapping[str, Any]], AbstractContextManager[Engines]]  # opens the engines of some configurations


def engines_of(configs: Mapping[str, Any]) -> dict[str, EngineConfig]:
    """Those that are not servers."""
    return {name: config for name, config in configs.items() if _is_engine(config)}


def _is_engine(config: object) -> TypeGuard[EngineConfig]:
    return isinstance(config, EngineConfig)


def marginal_of(configs: Mapping[str, Any]) -> float:
    """For the remaining time of the points of these configurations (`PointTimes`)."""
    on_cpu = any(device_type(config.device) == "cpu" for config in engines_of(configs).values())
    return MARGINAL_ON_CPU if on_cpu else MARGINAL


def groups_of(configs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations whose engines can share weights, together, in the order of the first one of each group.
    Servers are in the first group."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, config in engines_of(configs).items():
        found.setdefault(tuple(getattr(config, key) for key in ON_DEVICES), {})[name] = config
    groups = list(found.values()) or [{}]
    first = {name: config for name, config in configs.items() if name in groups[0] or not _is_engine(config)}
    return [first, *groups[1:]]


def in_batches(left: Iterable[Point], groups: Sequence[Collection[str]]) -> list[tuple[int, list[Point]]]:
    """The points in the order in which they run, with the place of the group that must be loaded: as they are if there
    is one group, else round by round."""
    points = list(left)
    if len(groups) == 1:
        return [(0, points)] if points else []
    found: list[tuple[int, list[Point]]] = []
    for repeat in sorted({point.repeat for point in points}):
        for place in range(len(groups)) if repeat % 2 else reversed(range(len(groups))):
            own = [point for point in points if point.repeat == repeat and point.configuration in groups[place]]
            if own and found and found[-1][0] == place:
                found[-1][1].extend(own)
            elif own:
                found.append((place, own))
    return found


class LoadedGroup:
    """The engines of one group at a time. Those of the group before are closed first.

    load     opens the engines of a group
    failed   gets the reasons why the engines of a group cannot be built; if those of no group can, or with one group,
             the error is raised. None: it is raised in any case
    others   engines that are not loaded, of all groups
    """

    def __init__(
        self, configs: Mapping[str, Any], load: Load, failed: Failed | None, others: Engines | None = None
    ) -> None:
        self.groups = groups_of(configs)
        self.tokenizer: Tokenizer | None = None  # of an engine that was loaded
        self.count = 0  # groups that were loaded
        self._load, self.failed, self.others = load, failed, others or {}
        self._stack = ExitStack()
        self._place: int | None = None
        self._engines: Engines = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def engines(self, place: int) -> Engines:
        """The engines of a group; empty if none of them can be built, but those of others."""
        if place == self._place:
            return self._engines
        self._stack.close()
        self._place, self._engines = None, {}
        group = self.groups[place]
        if self.failed is not None and engines_of(group).keys() <= self.failed.keys() and len(self.groups) > 1:
            return {}
        try:
            self._engines = self._stack.enter_context(self._load(group))
        except Exception as error:
            if self.failed is None or len(self.groups) == 1:
                raise
            for name in group:
                self.failed.setdefault(name, reason_of(name, error))
            if {name for each in self.groups for name in each} <= self.failed.keys():
                raise
            return {}
        self._place, self.count = place, self.count + 1
        self.tokenizer = getattr(next(iter(self._engines.values())), "tokenizer", None)
        return self._engines
