"""A rank's connection to rank 0: calls arrive, and progress, failures and a beat every second go back."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from specbatch.errors import one_line

Call = tuple[int, str, tuple[Any, ...]]  # number of an engine, method of its worker, arguments
BEAT_S = 1.0


class Beat(NamedTuple):
    """The process runs."""


class Progress(NamedTuple):
    """Of building an engine: `done` of `total` layers and graphs."""

    engine: int
    done: int
    total: int


class Built(NamedTuple):
    """This rank's part of an engine."""

    engine: int


class Digests(NamedTuple):
    """Of the tokens of decode steps, see `TokenCheck`."""

    engine: int
    number: int
    history: list[int]


class Failed(NamedTuple):
    """The rank ends. reason: one line; is_consequence: another rank may be the cause, see `may_follow`."""

    reason: str
    trace: str
    is_consequence: bool

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(one_line(error), "".join(traceback.format_exception(error)), may_follow(error))


Message = Beat | Progress | Built | Digests | Failed


class Link:
    """The end of a rank other than 0."""

    def __init__(self, connection: Connection, ended: Callable[[], None]) -> None:
        """ended: called by a thread when rank 0 closes the connection or ends. Calls are read ahead, so that this is
        noticed while a collective waits for rank 0."""
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._ended = ended
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def calls(self) -> Iterator[Call]:
        """The calls of rank 0, until it closes the connection."""
        return iter(self._calls.get, None)

    def send(self, message: Message) -> None:
        """Nothing happens if rank 0 has ended."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            pass

    def _read(self) -> None:
        try:
            while True:
                self._calls.put(self._connection.recv())
        except (EOFError, OSError):
            self._calls.put(None)
            self._ended()

    def _beat(self) -> None:
        pause = threading.Event()
        try:
            while True:
                self._send_beat()
                pause.wait(BEAT_S)
        except OSError:  # rank 0 has ended
            pass

    def _send_beat(self) -> None:
        with self._lock:
            self._connection.send(Beat())


def may_follow(error: BaseException) -> bool:
    """Whether an error may be a consequence of one on another rank, whose end a collective may notice first."""
    return isinstance(error, (RuntimeError, OSError)) and not isinstance(error, torch.OutOfMemoryError)
