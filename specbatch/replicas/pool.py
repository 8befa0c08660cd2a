"""The replicas of a data-parallel engine: starts them, replaces those that end, and collects their messages."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from specbatch.errors import FailedError, SpecbatchError, counted, listed
from specbatch.progress.bars import Report
from specbatch.replicas.messages import (
    Begin,
    Build,
    Built,
    Call,
    Close,
    Command,
    Completed,
    Ended,
    Log,
    Message,
    Output,
    Progress,
    Refused,
    Returned,
    Shrunk,
    Submit,
)

# Replicas in a row that ended at a place before it is given up: in their start, and after it without a result.
MOST_FAILED_STARTS, MOST_FAILED_RUNS = 3, 6
DIFFERS = 1.05  # times as many KV pages, which the log shows
STUCK_S = 1800.0  # without a step; a long prompt of a large model on a CPU takes less
LONGEST_LOOK_S = 1.0  # that counts as time in which the replicas could be heard


class Link(Protocol):
    """The connection to a replica."""

    def send(self, command: Command) -> None:
        """Pass on a command. One that has ended ignores it."""

    def close(self) -> None:
        """End the replica."""


class Starter(Protocol):
    """Starts replicas: in processes, or as actors of a cluster.

    least   how many must be ready before work begins
    most    how many are started
    """

    least: int
    most: int

    def start(self, place: int, deliver: Callable[[Message], None]) -> Link:
        """Start the replica in a place from 0 to `most` - 1. deliver: called with its messages, in another thread; the
        last one is `Ended`."""
        ...


@dataclass
class _Replica:
    """A replica that runs.

    place           from 0; its successor has the same
    built           its engines
    failures        of its predecessors in a row that ended without a result
    has_worked      whether it has sent a result
    logged          its lines of the logs, by engine and without numbers
    heard           when it sent its last message or was given something to do, by `ReplicaPool.clock`
    """

    place: int
    link: Link
    failures: int
    has_worked: bool = False
    built: set[int] = field(default_factory=set)
    logged: Counter[tuple[int, str]] = field(default_factory=Counter)
    heard: float = 0.0


class ReplicaPool:
    """Replicas with the same engines, each with a number of its own. Their messages are handled when they are asked
    for.

    replaced   how many have ended and were replaced
    """

    def __init__(self, starter: Starter, log: Callable[[str], None]) -> None:
        self._starter = starter
        self._log = log
        self._logged: Counter[tuple[int, str]] = Counter()  # the most that a replica has logged of each line
        self._printed: set[str] = set()
        self._inbox: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._builds: dict[int, Build] = {}
        self._logs: dict[int, Callable[[str], None]] = {}  # of the engines
        self._building: int | None = None
        self._active: int | None = None  # the engine that was used last
        self._numbers, self._tickets = count(), count()
        self._replicas: dict[int, _Replica] = {}
        self._smaller: dict[int, Mapping[str, int]] = {}  # settings of places where memory was short
        self._looked = time.monotonic()
        self.replaced = 0
        self._clock = 0.0
        try:
            for place in range(starter.most):
                self._start(place)
        except BaseException:
            self.close()
            raise

    def ready(self) -> dict[int, int]:
        """The replicas that have built all engines, with their places."""
        built = self._builds.keys()
        return {number: replica.place for number, replica in self._replicas.items() if replica.built >= built}

    def build(self, build: Build, log: Callable[[str], None], report: Report) -> Built:
        """Build an engine on all replicas. Returns when enough of them are ready: the answer of the first, with the
        least of the capacities that any of them has.

        log: gets the lines of the engine, those of all replicas once. Raises SpecbatchError if an engine is refused, a
        replica fails, or too few are left of those that are lost; no replica keeps the engine.
        """
        self._builds[build.engine] = build
        self._logs[build.engine] = log
        self._building = self._active = build.engine
        for replica in self._replicas.values():
            replica.link.send(build)
        try:
            return self._wait_for(build.engine, report)
        except BaseException:
            self.close_engine(build.engine)
            raise
        finally:
            self._building = None

    def close_engine(self, engine: int) -> None:
        """Close an engine on all replicas."""
        del self._builds[engine], self._logs[engine]
        for replica in self._replicas.values():
            replica.built.discard(engine)
            replica.link.send(Close(engine))

    def send(self, number: int, command: Command) -> None:
        if isinstance(command, Begin | Call):
            self._active = command.engine
        if (replica := self._replicas.get(number)) is not None:
            replica.link.send(command)
            if isinstance(command, Begin | Submit | Call):
                replica.heard = self.clock()

    def call(self, number: int, engine: int, method: str, **arguments: Any) -> int:
        """Call a method of an engine on a replica. Returns the ticket that its answer has."""
        ticket = next(self._tickets)
        self.send(number, Call(ticket, engine, method, arguments))
        return ticket

    def call_all(self, engine: int, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all replicas that are ready, at least one. Returns their values, without those of replicas
        that end."""
        tickets: dict[int, int] = {}
        values: dict[int, Any] = {}
        while not tickets or tickets.keys() - values.keys():
            if not tickets:
                tickets = {number: self.call(number, engine, method, **arguments) for number in self.ready()}
            for number, message in self.receive():
                match message:
                    case Returned(ticket, value) if tickets.get(number) == ticket:
                        values[number] = value
                    case Refused(error, _, ticket) if tickets.get(number) == ticket:
                        raise error
                    case Ended():
                        tickets.pop(number, None)
        return [values[number] for number in sorted(values)]

    def call_one(self, engine: int, method: str, **arguments: Any) -> Any:
        """Call a method on one replica. If it ends, another one is called."""
        asked: int | None = None
        ticket = -1
        while True:
            if asked is None and (ready := self.ready()):
                asked = next(iter(ready))
                ticket = self.call(asked, engine, method, **arguments)
            for number, message in self.receive():
                match message:
                    case Returned(answered, value) if answered == ticket:
                        return value
                    case Refused(error, _, answered) if answered == ticket:
                        raise error
                    case Ended() if number == asked:
                        asked = None

    def receive(self, timeout: float | None = None) -> Iterator[tuple[int, Message]]:
        """Wait for messages, up to `timeout` seconds, and yield those that are there, with the numbers of their
        replicas.

        A replica that has ended is replaced first. Raises SpecbatchError if none is left.
        """
        self.clock()
        if not self._replicas:
            raise FailedError("no replica is left; a new engine starts others")
        try:
            there = [self._inbox.get(timeout=timeout)]
            while not self._inbox.empty():
                there.append(self._inbox.get())
        except Empty:
            return
        for number, message in there:
            replica = self._replicas.get(number)
            if replica is not None:
                replica.heard = self.clock()
            if replica is not None and (handled := self._handled(replica, message)) is not None:
                if isinstance(handled, Ended):
                    self._replace(number, handled)
                yield number, handled

    def clock(self) -> float:
        """Seconds in which replicas could be heard: while this process is stopped, or does other things, it stands
        still."""
        now = time.monotonic()
        self._clock += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        return self._clock

    def end_stuck(self, busy: Iterable[int]) -> None:
        """Let the next `receive` end those of the replicas that have work and say nothing."""
        for number in busy:
            replica = self._replicas.get(number)
            if replica is not None and self.clock() - replica.heard > STUCK_S:
                self._inbox.put((number, Ended(f"it has not made a step for {STUCK_S:.0f} s")))

    def close(self) -> None:
        """End all replicas."""
        replicas, self._replicas = self._replicas, {}
        if replicas:
            with ThreadPoolExecutor(len(replicas)) as threads:
                list(threads.map(lambda replica: replica.link.close(), replicas.values()))

    def _handled(self, replica: _Replica, message: Message) -> Message | None:
        """The message for those who ask; None if there is nothing left to do."""
        match message:
            case Log(engine, line):
                key = engine, re.sub(r"[0-9.,]+( [KMGT]?i?B\b)?", "#", line)
                replica.logged[key] += 1
                if replica.logged[key] > self._logged[key]:  # the first replica logs it for all
                    self._logged[key] += 1
                    self._logs.get(engine, self._log)(line)
                return None
            case Shrunk(engine, line):
                self._logs.get(engine, self._log)(f"replica {replica.place}: {line}")
                return None
            case Output(line):
                if line not in self._printed:
                    self._printed.add(line)
                    self._tell(f"replica {replica.place}: {line}")
                return None
            case Built(engine):
                replica.built.add(engine)
            case Completed() | Returned():
                replica.has_worked = True
            case Refused(error, engine, None) if engine != self._building:
                # Either it was refused before by another replica, or a successor cannot build what was built.
                return Ended(str(error)) if engine in self._builds else None
        return message

    def _tell(self, line: str) -> None:
        """Log a line about a replica, as one of the engine that it works for."""
        log = self._log if self._active is None else self._logs.get(self._active, self._log)
        log(line)

    def _wait_for(self, engine: int, report: Report) -> Built:
        built: dict[int, Built] = {}  # by place
        recorded: dict[int, Progress] = {}
        while not built or len(self.ready()) < self._starter.least:
            for number, message in self.receive():
                match message:
                    case Built() if message.engine == engine:
                        built[self._replicas[number].place] = message
                    case Refused(error, refused, None) if refused == engine:
                        raise error
                    case Ended(reason, _, lost):
                        if not lost or len(self._replicas) < self._starter.least:
                            kind = FailedError if lost else SpecbatchError  # versions that differ are a mistake
                            raise kind(f"a replica ended while it was built: {reason}")
                    case Progress():
                        recorded[number] = message
                        done, total = (sum(getattr(item, of) for item in recorded.values()) for of in ("done", "total"))
                        report(done, total)
        first, *others = (built[place] for place in sorted(built))
        pages = [item.caps["kv_pages"] for item in (first, *others)]
        if max(pages) > DIFFERS * min(pages):
            self._logs[engine](f"KV pages of the replicas: {', '.join(map(str, pages))}")
        return replace(first, caps=_least([item.caps for item in (first, *others)]))

    def _start(self, place: int, failures: int = 0) -> None:
        number = next(self._numbers)
        link = self._starter.start(place, lambda message: self._inbox.put((number, message)))
        self._replicas[number] = _Replica(place, link, failures)
        for build in self._builds.values():
            settings: Mapping[str, Any] = self._smaller.get(place, {}) if build.share.count == 1 else {}
            link.send(replace(build, config=replace(build.config, **settings)))

    def _replace(self, number: int, ended: Ended) -> None:
        replica = self._replicas.pop(number)
        replica.link.close()
        failures = 0 if replica.has_worked or ended.smaller else replica.failures + 1
        had_started = replica.built >= self._builds.keys()
        most = MOST_FAILED_RUNS if had_started else MOST_FAILED_STARTS
        if ended.details and ended.details not in self._printed:
            self._printed.add(ended.details)
            self._tell(f"replica {replica.place}: {ended.details.rstrip()}")
        what = f"replica {replica.place} ended ({ended.reason})"
        if failures < most or (had_started and not self._replicas):
            settings = ""
            if ended.smaller:
                self._smaller[replica.place] = {**self._smaller.get(replica.place, {}), **ended.smaller}
                settings = f" with {listed(f'{name}={value}' for name, value in ended.smaller.items())}"
            self._tell(f"{what}; starting another{settings}")
            self._start(replica.place, failures)
            self.replaced += 1
        elif self._replicas:
            left = len(self._replicas)
            self._tell(f"{what}; going on with {counted(left, 'other')}")
        else:
            raise FailedError(f"data_parallel={self._starter.most}: no replica is left; {what}")


def _least(caps: list[dict[str, Any]]) -> dict[str, Any]:
    """Capacities that all replicas have: those of the first, and of counts the least."""
    found = dict(caps[0])
    for name, value in found.items():
        if type(value) is int:
            found[name] = min(each[name] for each in caps)
    return found
