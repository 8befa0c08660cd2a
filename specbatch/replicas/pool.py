"""The replicas of a data-parallel engine: starts them, replaces those that end, and collects their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from specbatch.errors import SpecbatchError
from specbatch.progress import Report
from specbatch.replicas.messages import (
    Build,
    Built,
    Call,
    Close,
    Command,
    Ended,
    Log,
    Message,
    Progress,
    Refused,
    Returned,
)

MOST_FAILED_STARTS = 3  # in a row, before a replica is given up


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
    failed_starts   of its predecessors, in a row
    """

    place: int
    link: Link
    failed_starts: int
    built: set[int] = field(default_factory=set)


class ReplicaPool:
    """Replicas with the same engines, each with a number of its own. Their messages are handled when they are asked
    for.

    replaced   how many have ended and were replaced
    """

    def __init__(self, starter: Starter, log: Callable[[str], None]) -> None:
        self._starter = starter
        self._log = log
        self._said: set[str] = set()
        self._inbox: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._builds: dict[int, Build] = {}
        self._numbers, self._tickets = count(), count()
        self._replicas: dict[int, _Replica] = {}
        self._building = False
        self.replaced = 0
        try:
            for place in range(starter.most):
                self._start(place)
        except BaseException:
            self.close()
            raise

    def ready(self) -> list[int]:
        """The replicas that have built all engines."""
        return [number for number, replica in self._replicas.items() if replica.built >= self._builds.keys()]

    def build(self, build: Build, report: Report) -> Built:
        """Build an engine on all replicas. Returns when enough of them are ready: the answer of the first.

        Raises SpecbatchError if an engine is refused or a replica ends.
        """
        self._builds[build.engine] = build
        self._said.clear()
        for replica in self._replicas.values():
            replica.link.send(build)
        self._building = True
        try:
            return self._wait_for(build.engine, report)
        finally:
            self._building = False

    def close_engine(self, engine: int) -> None:
        """Close an engine on all replicas."""
        del self._builds[engine]
        for replica in self._replicas.values():
            replica.built.discard(engine)
            replica.link.send(Close(engine))

    def send(self, number: int, command: Command) -> None:
        if (replica := self._replicas.get(number)) is not None:
            replica.link.send(command)

    def call(self, number: int, engine: int, method: str, **arguments: Any) -> int:
        """Call a method of an engine on a replica. Returns the ticket that its answer has."""
        ticket = next(self._tickets)
        self.send(number, Call(ticket, engine, method, arguments))
        return ticket

    def call_all(self, engine: int, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all replicas that are ready. Returns their values, without those of replicas that end."""
        tickets = {number: self.call(number, engine, method, **arguments) for number in self.ready()}
        values: dict[int, Any] = {}
        while tickets.keys() - values.keys():
            for number, message in self.receive():
                match message:
                    case Returned(ticket, value) if tickets.get(number) == ticket:
                        values[number] = value
                    case Refused(error):
                        raise error
                    case Ended():
                        tickets.pop(number, None)
        return [values[number] for number in sorted(values)]

    def receive(self, timeout: float | None = None) -> Iterator[tuple[int, Message]]:
        """Wait for messages, up to `timeout` seconds, and yield them with the numbers of their replicas.

        A replica that has ended is replaced first. Raises SpecbatchError if none is left.
        """
        while True:
            if not self._replicas:
                raise SpecbatchError("no replica is left; build a new engine")
            try:
                number, message = self._inbox.get(timeout=timeout)
            except Empty:
                return
            timeout = 0.0
            replica = self._replicas.get(number)
            if replica is None:
                continue
            match message:
                case Log(line):
                    if line not in self._said:  # replicas that build the same engine say the same
                        self._log(f"replica {replica.place}: {line}")
                    self._said.add(line)
                    continue
                case Built(engine):
                    replica.built.add(engine)
                case Refused(error, None) if not self._building:  # by a successor, of what its predecessor had built
                    message = Ended(str(error))
            if isinstance(message, Ended):
                self._replace(number, message.reason)
            yield number, message

    def close(self) -> None:
        """End all replicas."""
        replicas, self._replicas = self._replicas, {}
        for replica in replicas.values():
            replica.link.close()

    def _wait_for(self, engine: int, report: Report) -> Built:
        first: Built | None = None
        recorded: dict[int, Progress] = {}
        while first is None or len(self.ready()) < self._starter.least:
            for number, message in self.receive():
                match message:
                    case Built() if message.engine == engine:
                        first = first or message
                    case Refused(error):
                        raise error
                    case Ended(reason):
                        raise SpecbatchError(f"a replica ended while it was built: {reason}")
                    case Progress():
                        recorded[number] = message
                        done, total = (sum(getattr(item, of) for item in recorded.values()) for of in ("done", "total"))
                        report(done, total)
        return first

    def _start(self, place: int, failed_starts: int = 0) -> None:
        number = next(self._numbers)
        link = self._starter.start(place, lambda message: self._inbox.put((number, message)))
        self._replicas[number] = _Replica(place, link, failed_starts)
        for build in self._builds.values():
            link.send(build)

    def _replace(self, number: int, reason: str) -> None:
        replica = self._replicas.pop(number)
        replica.link.close()
        failed = 0 if replica.built >= self._builds.keys() else replica.failed_starts + 1
        ended = f"replica {replica.place} ended ({reason})"
        if failed < MOST_FAILED_STARTS:
            self._log(f"{ended}; starting another")
            self._said.clear()
            self._start(replica.place, failed)
            self.replaced += 1
        elif self._replicas:
            left = len(self._replicas)
            self._log(f"{ended}; going on with {left} other{'s' if left > 1 else ''}")
        else:
            raise SpecbatchError(f"data_parallel={self._starter.most}: no replica is left; {ended}")
