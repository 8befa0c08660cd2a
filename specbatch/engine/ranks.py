"""Tensor parallelism over processes: rank 0 runs the engine and sends every launch to the other ranks.

The user's process is rank 0. It keeps the scheduler, all requests and all results. The other ranks are processes of
`specbatch.engine.follower` with a worker of their own over their part of the model, and repeat the calls of rank 0's
worker in the same order. No result is sent back: collectives within the models keep the ranks together, and a call is
sent before rank 0 makes it, so that ranks launch at the same time.

Where one rank fails, the others would wait for it forever. A group therefore fails as a whole: rank 0 ends the other
processes at once and raises one error, which names the rank and what happened to it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import torch

from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.engine.rank_link import BEAT_S, Built, Call, Digests, Failed, Message, may_follow, one_line
from specbatch.engine.token_check import first_difference
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.memory.planner import MemoryShare
from specbatch.runtime.device import find_device
from specbatch.runtime.pipe import hang_up

if TYPE_CHECKING:
    from specbatch.engine.builder import EngineParts

EXIT_S = 5.0
EXPLAIN_S = 1.0  # to learn which rank failed first
SILENT_BEATS = 20  # after so many a rank counts as stopped
FOLLOWER = "specbatch.engine.follower"
Build = Callable[..., "EngineParts"]
BUILD, CLOSE = "build", "close"


class RankGroup:
    """The ranks of a group, as rank 0 sees them. Engines share it: each has a number of its own.

    failure   why the group cannot be used any more; None if it can
    """

    def __init__(
        self,
        connections: list[Connection],
        processes: list[subprocess.Popen[bytes]],
        join: Callable[[], Communicator],
    ) -> None:
        """connections, processes: of ranks 1, 2, ...; join: waits for them, and returns this rank's end of the group.
        Raises SpecbatchError if one of them fails meanwhile."""
        self.failure: str | None = None
        self._details = ""
        self._communicator: Communicator | None = None
        self._connections = connections
        self._processes = processes
        self._engines = 0
        self._built: dict[int, int] = {}  # engine -> number of ranks that have built it
        self._digests: dict[
            tuple[int, int], dict[int, list[int]]
        ] = {}  # engine and number of a copy -> rank -> history
        self._changed = threading.Condition()
        for rank, connection in enumerate(connections, start=1):
            threading.Thread(target=self._watch, args=(rank, connection), daemon=True).start()
        try:
            self._join(join)
        except BaseException:
            self.close()
            raise

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None
        return self._communicator

    def _join(self, join: Callable[[], Communicator]) -> None:
        """In a thread: it waits for the other ranks, and one may have failed."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                found = join()
            except Exception as error:
                errors.append(error)
            with self._changed:
                self._communicator = None if errors else found
                self._changed.notify_all()

        threading.Thread(target=run, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._communicator or errors or self.failure)
        if errors:
            self.fail(f"rank 0 failed: {one_line(errors[0])}", patience=2 * EXPLAIN_S)
        self.check()

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
            self.fail(f"a rank does not answer ({error})", patience=2 * EXPLAIN_S)
            self.check()

    def wait_until_built(self, engine: int) -> None:
        """Wait until all ranks have built this engine. Raises SpecbatchError if one of them has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._built.get(engine) == len(self._connections))
        self.check()

    def compare(self, rank: int, digests: Digests) -> None:
        """Compare digests of a rank with those of the others. The group fails if they differ."""
        key = digests.engine, digests.number
        with self._changed:
            found = self._digests.setdefault(key, {})
            found[rank] = digests.history
            if len(found) <= len(self._connections):
                return
            difference = first_difference([found[rank] for rank in sorted(found)])
            if difference is None:
                del self._digests[key]
                self._changed.notify_all()
        if difference is not None:
            step, ranks = difference
            names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            self.fail(
                f"{names} did not choose the tokens of rank 0 in decode step {step}, which is an error of specbatch"
            )

    def wait_until_compared(self) -> None:
        """Wait until all digests are found equal. Raises SpecbatchError if they are not, or a rank fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or not self._digests)
        self.check()

    def check(self) -> None:
        """Raise SpecbatchError if a rank has failed."""
        if self._communicator is not None and self._communicator.is_late:
            self.fail("a rank did not answer in time")
        if self.failure is not None:
            error = SpecbatchError(f"tensor parallel: {self.failure}; what was finished is kept: build a new engine")
            if self._details:
                error.add_note(self._details)
            raise error

    def fail(self, reason: str, details: str = "", *, patience: float = 0.0) -> None:
        """The group cannot be used any more, and its processes are ended. The first reason counts. patience: seconds to
        wait for one before this, which may be its consequence."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, patience)
            if self.failure is not None:
                return
            self.failure, self._details = reason, details
            self._changed.notify_all()
        self._end()
        if self._communicator is not None:
            self._communicator.abort()

    def close(self) -> None:
        """End the other ranks."""
        with self._changed:
            self.failure = self.failure or "the group is closed"
        self._end()
        for connection in self._connections:
            hang_up(connection)
        if self._communicator is not None:
            self._communicator.close()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()  # they keep nothing, and one that is stopped ends by no other signal
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)

    def _watch(self, rank: int, connection: Connection) -> None:
        """Read what a rank sends until it fails, ends, or falls silent for some time after its first message."""
        silent, wait = 0, None
        while silent < SILENT_BEATS:
            try:
                message = connection.recv() if connection.poll(wait) else None
            except (EOFError, OSError):
                self.fail(f"the process of rank {rank} ended{self._ending(rank)}")
                return
            # Beats are counted one by one: a wait of many seconds would end at once after this process was stopped.
            silent, wait = silent + 1 if message is None else 0, BEAT_S
            if message is not None:
                self._receive(rank, message)
        self.fail(f"rank {rank} has not answered for {SILENT_BEATS * BEAT_S:g} s, as if its process were stopped")

    def _receive(self, rank: int, message: Message) -> None:
        if isinstance(message, Failed):
            patience = EXPLAIN_S if message.is_consequence else 0.0
            self.fail(f"rank {rank} failed: {message.reason}", message.trace, patience=patience)
        elif isinstance(message, Digests):
            self.compare(rank, message)
        elif isinstance(message, Built):
            with self._changed:
                self._built[message.engine] = self._built.get(message.engine, 0) + 1
                self._changed.notify_all()

    def _ending(self, rank: int) -> str:
        """How the process of a rank ended, as it appears in a message."""
        if not self._processes or self.failure is not None:
            return ""
        try:
            status = self._processes[rank - 1].wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return ""
        if status >= 0:
            return f" with status {status}"
        hint = ", which the kernel sends when memory runs out" if status == -signal.SIGKILL else ""
        return f" by {signal.Signals(-status).name}{hint}"


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

    def report(self, number: int, history: list[int]) -> None:
        self._group.compare(0, Digests(self._number, number, history))

    def wait_until_compared(self) -> None:
        self._group.wait_until_compared()

    def wait_until_built(self) -> None:
        self._group.wait_until_built(self._number)

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._group.send(self._number, name, arguments)

    def check(self) -> None:
        self._group.check()

    def fail(self, error: BaseException) -> None:
        self._group.fail(f"rank 0 failed: {one_line(error)}", patience=2 * EXPLAIN_S if may_follow(error) else 0.0)
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        failure = self._group.failure
        own = failure in (None, f"rank 0 failed: {one_line(error)}")
        if not own and isinstance(error, Exception) and not isinstance(error, SpecbatchError):
            self._group.check()

    def close(self) -> None:
        """Free the memory of the other ranks."""
        if self._started is not None and self._started.failure is None:
            self.send(CLOSE, ())


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


def follow(calls: Iterable[Call], build: Build, send: Callable[[Message], None]) -> None:
    """Make the calls of rank 0, in their order, and tell it which engines are built."""
    engines: dict[int, EngineParts] = {}
    for engine, name, arguments in calls:
        if name == BUILD:
            engines[engine] = parts = build(engines, *arguments)
            if parts.worker.token_check is not None:
                parts.worker.token_check.report = lambda *copied, engine=engine: send(Digests(engine, *copied))
            send(Built(engine))
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
        command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno()), str(rank), str(size), str(store.port), device]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes.append(
            subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # rank 0 decides what Ctrl-C ends
            )
        )
        theirs.close()
        connections.append(ours)
    return RankGroup(connections, processes, lambda: join_group(store, 0, size, device))
