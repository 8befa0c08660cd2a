"""The folder of a sweep: its plan, its points in the order of interleaved rounds, and which of them are finished.

folder/sweep.json, folder/<configuration>/c<concurrency>/r<repeat>/record.json, requests.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from specbatch.errors import refuse
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.files.text_files import read_json
from specbatch.records.differences import describe_differences
from specbatch.records.run_record import RunRecord
from specbatch.records.schema import Positive, Table
from specbatch.records.store import RECORD
from specbatch.records.validation import checked

PLAN = "sweep.json"
LEFT_OUT = "left_out.json"  # of an evaluation in several configurations: why some were not measured
SWEEP = "a sweep"
_MOST_POINTS = 1_000_000


class Plan(Table):
    """sweep.json."""

    configurations: dict[str, Any]
    concurrency: Annotated[list[Positive], Field(min_length=1, max_length=1000)]
    repeats: Positive

    @model_validator(mode="after")
    def _finite(self) -> Self:
        if len(self.configurations) * len(self.concurrency) * self.repeats > _MOST_POINTS:
            raise ValueError(f"should have at most {_MOST_POINTS} points")
        for name in self.configurations:
            if "\x00" in name or not 0 < len(name.encode(errors="replace")) <= 255:
                raise ValueError("configurations should have names that a folder can have")
        return self


class Described(Protocol):
    """A configuration, of an engine or of a server."""

    def as_dict(self) -> dict[str, Any]: ...


class Rounds(Protocol):
    """The concurrencies and repeats of a sweep."""

    @property
    def concurrency(self) -> Iterable[int]: ...

    @property
    def repeats(self) -> int: ...


class Options(Rounds, Protocol):
    """The options of a sweep, as far as its plan depends on them.

    workload: a dataclass with the hash of its prompts in `rows_sha256`; all fields with repr belong to the plan.
    """

    @property
    def workload(self) -> Any: ...


class Point(NamedTuple):
    """One measurement. place: the position of its configuration in a round."""

    configuration: str
    place: int
    concurrency: int
    repeat: int

    def folder(self, root: Path) -> Path:
        return root / folder_name(self.configuration) / f"c{self.concurrency}" / f"r{self.repeat}"

    def is_finished(self, root: Path) -> bool:
        return (self.folder(root) / RECORD).exists()


def point_of(record: RunRecord) -> Point:
    """The point that a record is of."""
    return Point(*(record.workload[name] for name in Point._fields))


def folder_name(configuration: str) -> str:
    return configuration.replace("/", "_")


def points(configurations: Iterable[str], options: Rounds, folder: Path | None = None) -> Iterator[Point]:
    """In the order in which they run: A B C C B A at each concurrency.

    folder: of the sweep, with the rounds that it has begun beyond `options.repeats` (--until-precise).
    """
    return _points(list(configurations), options.concurrency, options.repeats, folder)


def rounds_at(concurrency: int, repeats: int, folder: Path) -> int:
    """How many rounds the sweep in `folder` has at a concurrency: `repeats`, or more if it has begun more."""
    begun = (path.parent.name[1:] for path in folder.glob(f"*/c{concurrency}/r*/{RECORD}"))
    return max([repeats, *(int(number) for number in begun if number.isdecimal())])


def round_of(configurations: Iterable[str], concurrency: int, repeat: int) -> Iterator[Point]:
    """The points of one round. Every second one runs in the opposite order, so that a steady drift of the machine slows
    no configuration more than another."""
    every = [Point(name, place, concurrency, repeat) for place, name in enumerate(configurations)]
    return iter(every if repeat % 2 else reversed(every))


def _points(
    configurations: list[str], concurrency: Iterable[int], repeats: int, folder: Path | None
) -> Iterator[Point]:
    for number in concurrency:
        rounds = repeats if folder is None else rounds_at(number, repeats, folder)
        for repeat in range(1, rounds + 1):
            yield from round_of(configurations, number, repeat)


def plan_of(configurations: Mapping[str, Described], options: Options) -> dict[str, Any]:
    """Everything that the points of a sweep are made from, as JSON. Prompts are represented by their hash."""
    workload = options.workload
    plan = {
        "configurations": {name: config.as_dict() for name, config in configurations.items()},
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "workload": {item.name: getattr(workload, item.name) for item in fields(workload) if item.repr},
        "rows_sha256": workload.rows_sha256,
    }
    found: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return found


def check_plan(folder: Path, plan: dict[str, Any], of: str = SWEEP) -> None:
    """Refuse a folder that holds another sweep. of: what the user calls it.

    A configuration of which nothing was measured may have become another one: a wrong address of a server, or a wrong
    path, can be corrected. If nothing was measured at all, all may have.
    """
    path = folder / PLAN
    if not path.exists():
        return
    before = _read_plan("output", path, "name a new folder")
    there, now = before["configurations"], plan["configurations"]
    changed = [name for name in there if there[name] != now.get(name)]
    if changed:
        silent = {name for name in changed if not _is_begun(folder, name)}
        if silent == there.keys():
            before["configurations"] = now
        else:
            before["configurations"] = there | {name: now[name] for name in silent & now.keys()}
    differs = [name for name in plan if before.get(name) != plan[name]]
    if differs:
        there, now = (", ".join(one["configurations"]) for one in (before, plan))
        other = f"choice of configurations ({there} there, {now} now)"
        if there == now:
            sizes = [name for name in differs if name != "configurations"]  # a bench derives these from the sizes
            other = describe_differences(before, plan, sizes if sizes and of != SWEEP else differs)
        works = f"is of {of} with another {other}; repeat that command, or name a new folder"
        raise refuse("output", str(folder), works)


def begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new folder: a sweep without points, which is unfinished."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write_plan(folder, plan)


def save(folder: Path, plan: dict[str, Any], point: Point, record: RunRecord) -> None:
    """Write the record of a finished point; the plan is written with the first, and again with the first after a change
    that `check_plan` allows."""
    if not (folder / PLAN).exists():
        begin(folder, plan)
    elif (before := _read_plan("output", folder / PLAN, "name a new folder")) != plan:
        for name, config in before["configurations"].items():
            if plan["configurations"].get(name) != config:  # `check_plan` allowed it: all of its points have failed
                for path in _records_of(folder, name):
                    path.unlink()
        _write_plan(folder, plan)
    with writing(point.folder(folder)):
        point.folder(folder).mkdir(parents=True, exist_ok=True)
    record.workload |= point._asdict()
    record.save(point.folder(folder))


def _write_plan(folder: Path, plan: dict[str, Any]) -> None:
    write_atomic(folder / PLAN, json.dumps(plan, indent=1) + "\n")


def _records_of(folder: Path, configuration: str) -> list[Path]:
    return [*(folder / folder_name(configuration)).glob(f"c*/r*/{RECORD}")]


def _is_begun(folder: Path, configuration: str) -> bool:
    """Whether a point of it was measured."""
    works = "move it away or run it again"
    found = (read_json("output", path, works).get("workload", {}) for path in _records_of(folder, configuration))
    return any("error" not in workload for workload in found)


def unfinished(run: Path, setting: str = "folder") -> list[Point]:
    """Points without a record, of the sweeps below folder `run`, or of the sweep that it is a part of.

    Refused: a plan that cannot be read, as the user's `setting`.
    """
    place = run.resolve()
    plans = sorted(place.rglob(PLAN)) or [path for folder in place.parents[:3] if (path := folder / PLAN).exists()][:1]
    found = []
    for path in plans:
        plan = _read_plan(setting, path, "move it away or run the sweep again")
        every = list(_points(list(plan["configurations"]), plan["concurrency"], plan["repeats"], path.parent))
        missing = [point for point in every if not point.is_finished(path.parent)]
        missing.sort(key=lambda point: (plan["concurrency"].index(point.concurrency), point.repeat, point.place))
        found += [point for point in missing if point.folder(path.parent).is_relative_to(place)]
    return found


def _read_plan(setting: str, path: Path, works: str) -> dict[str, Any]:
    plan: dict[str, Any] = read_json(setting, path, works)
    checked(setting, str(path), Plan, plan, works)
    return plan
