"""Tensor parallelism over processes: rank 0 runs the engine and sends every launch to the other ranks.

The user's process is rank 0. It keeps the scheduler, all requests and all results. The other ranks are processes of
`specbatch.engine.follower` with a worker of their own over their part of the model, and repeat the calls of rank 0's
worker in the same order. Nothing is sent back: collectives within the models keep the ranks together, and a call is
sent before rank 0 makes it, so that ranks launch at the same time.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import torch

from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.memory.planner import MemoryShare
from specbatch.runtime.device import find_device
from specbatch.runtime.pipe import hang_up

if TYPE_CHECKING:
    from specbatch.engine.builder import EngineParts

EXIT_S = 5.0
EXPLAIN_S = 2.0  # to learn which rank failed
Call = tuple[int, str, tuple[Any, ...]]  # number of an engine, method of its worker, arguments
Build = Callable[..., "EngineParts"]
BUILD, CLOSE = "build", "close"


class RankGroup:
    """The ranks of a group, as rank 0 sees them. Engines share it: each has a number of its own.

    failure   why the group cannot be used any more; None if it can
    """

    def __init__(self, communicator: Communicator, connections: list[Connection], stop: Callable[[], None]) -> None:
        """connections: to ranks 1, 2, ...; stop: ends their processes."""
        self.communicator = communicator
        self.failure: str | None = None
        self._connections = connections
        self._stop = stop
        self._engines = 0
        for rank, connection in enumerate(connections, start=1):
            threading.Thread(target=self._watch, args=(rank, connection), daemon=True).start()

    def next_engine(self) -> int:
        """A number for another engine."""
        self._engines += 1
        return self._engines

    def send(self, engine: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Have the other ranks make this call. Raises SpecbatchError if one of them has failed."""
        self.check()
        try:
            for connection in self._connections:
                connection.send((engine, name, arguments))
        except OSError as error:
            self.fail(f"a rank does not answer ({error})")
            self.check()

    def check(self) -> None:
        """Raise SpecbatchError if a rank has failed."""
        if self.communicator.is_late:
            self.fail("a rank did not answer in time")
        if self.failure is not None:
            raise SpecbatchError(self._message())

    def _message(self) -> str:
        return f"tensor parallel: {self.failure}; what was finished is kept: build a new engine"

    def close(self) -> None:
        """End the other ranks."""
        self.failure = self.failure or "the group is closed"
        for connection in self._connections:
            hang_up(connection)
        self._stop()
        self.communicator.close()

    def _watch(self, rank: int, connection: Connection) -> None:
        """Wait for a rank to fail: only then it sends anything, the reason, or its connection ends."""
        try:
            self.fail(f"rank {rank} failed: {connection.recv()}")
        except (EOFError, OSError):
            self.fail(f"the process of rank {rank} ended")

    def fail(self, reason: str) -> None:
        """The group cannot be used any more. The first reason counts."""
        self.failure = self.failure or reason
        self.communicator.abort()


class EngineRanks:
    """The ranks of one engine: its number in a group, and its calls. The group is started with `build`."""

    def __init__(self, config: EngineConfig, share: MemoryShare, shared: EngineRanks | None) -> None:
        """shared: of the engine whose weights it uses."""
        self._config, self._share, self._shared = config, share, shared
        self._device = device = find_device(config.device)
        self._started: RankGroup | None = None
        self._number = 0
        size = config.tensor_parallel
        if device.type == "cuda" and (device.index or size > torch.cuda.device_count()):
            works = f"it uses CUDA devices 0 to {size - 1} and this machine has {torch.cuda.device_count()}"
            raise refuse("tensor_parallel", size, f"{works}; use device cuda and at most that many")

    @property
    def _group(self) -> RankGroup:
        assert self._started is not None
        return self._started

    def build(self) -> Communicator:
        self._started = group_of(self._config.tensor_parallel, self._device.type)
        self._number = self._group.next_engine()
        shared = None if self._shared is None else self._shared._number
        self.send(BUILD, (self._config, self._share, shared))
        return self._group.communicator

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._group.send(self._number, name, arguments)

    def check(self) -> None:
        self._group.check()

    def fail(self, error: BaseException) -> None:
        group, deadline = self._group, time.monotonic() + EXPLAIN_S
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            while group.failure is None and time.monotonic() < deadline:
                time.sleep(0.01)  # where another rank failed, a collective may notice first
        group.fail(one_line(error) if group.failure is None else group.failure)

    def explain(self, error: BaseException) -> None:
        """Raise what happened to another rank, if this error is a consequence of it."""
        if self._group.failure not in (None, one_line(error)) and not isinstance(error, SpecbatchError):
            self._group.check()

    def close(self) -> None:
        """Free the memory of the other ranks."""
        if self._started is not None and self._started.failure is None:
            self.send(CLOSE, ())


def one_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def group_of(size: int, device: str) -> RankGroup:
    """The running group of this size, or a new one: processes are started once."""
    group = _groups.pop((size, device), None)
    if group is not None and group.failure is not None:
        group.close()
        group = None
    _groups[size, device] = group = group or start_group(size, device)
    return group


_groups: dict[tuple[int, str], RankGroup] = {}


@atexit.register
def _close_groups() -> None:
    while _groups:
        _groups.popitem()[1].close()


def follow(calls: Iterable[Call], build: Build) -> None:
    """Make the calls of rank 0, in their order."""
    engines: dict[int, EngineParts] = {}
    for engine, name, arguments in calls:
        if name == BUILD:
            engines[engine] = build(engines, *arguments)
        elif name == CLOSE:
            engines.pop(engine).worker.close()
        else:
            worker = engines[engine].worker
            with torch.inference_mode(), on_device(worker.batch.device):
                getattr(worker, name)(*arguments)


def start_group(size: int, device: str) -> RankGroup:
    """Start the other ranks of a group of `size`, on a CPU or on CUDA devices 0 to size - 1."""
    from specbatch.engine.follower import join_group, listen

    store = listen(size)
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    for rank in range(1, size):
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "specbatch.engine.follower", str(theirs.fileno())]
        command += [str(rank), str(size), str(store.port), device]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes.append(
            subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        )
        theirs.close()
        connections.append(ours)

    def stop() -> None:
        for process in processes:
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    try:
        return RankGroup(join_group(store, 0, size, device), connections, stop)
    except BaseException:
        for process in processes:
            process.kill()
        raise
