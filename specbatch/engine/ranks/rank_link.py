"""How ranks find each other, and a rank's connection to rank 0: calls arrive, and progress, failures and a beat every
second go back."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from specbatch.errors import ShortOfMemoryError, one_line
from specbatch.kernels.collectives.communicator import Communicator, DeviceCommunicator, GroupCommunicator
from specbatch.runtime.device import is_out_of_memory

Call = tuple[int, str, tuple[Any, ...]]  # number of an engine, method of its worker, arguments
BUILD, CLOSE = "build", "close"  # calls that are not methods of a worker
BEAT_S = 1.0
HOST = "127.0.0.1"
CONNECT = timedelta(seconds=120)  # for all ranks to start
EXCHANGE = timedelta(days=30)  # of a collective: rank 0 watches the processes, and all of them may be suspended


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
    """The rank ends. reason: one line; is_consequence: another rank may be the cause, see `may_follow`; short: the
    error, if it is that of a lack of memory."""

    reason: str
    trace: str
    is_consequence: bool
    short: ShortOfMemoryError | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        short = error if isinstance(error, ShortOfMemoryError) else None
        return cls(one_line(error), "".join(traceback.format_exception(error)), may_follow(error), short)


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
    return isinstance(error, (RuntimeError, OSError)) and not is_out_of_memory(error)


def listen(size: int) -> TCPStore:
    """A store through which the ranks of a group find each other, on a free port."""
    return TCPStore(HOST, 0, size, is_master=True, timeout=CONNECT, wait_for_workers=False)


def connect(port: int, size: int) -> TCPStore:
    """The store of another process that listens on this port."""
    return TCPStore(HOST, port, size, is_master=False, timeout=CONNECT)


def join_group(store: TCPStore, rank: int, size: int, device: str) -> Communicator:
    """This rank's end of the group; returns once all ranks have joined."""
    if device == "cpu":
        group = ProcessGroupGloo(store, rank, size, CONNECT)
        group._set_default_timeout(EXCHANGE)
        return GroupCommunicator(group)
    place = torch.device("cuda", rank)
    torch.cuda.set_device(place)
    return DeviceCommunicator(store, rank, size, place)
