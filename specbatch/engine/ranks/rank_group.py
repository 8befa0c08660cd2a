"""The ranks of a tensor-parallel group as rank 0 sees them: what they send, and what happens if one of them fails.

Where one rank fails, the others would wait for it forever. A group therefore fails as a whole: rank 0 ends the other
processes at once and raises one error, which names the rank and what happened to it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from specbatch.engine.device.token_check import first_difference
from specbatch.engine.ranks.rank_link import BEAT_S, Built, Digests, Failed, Message, Progress
from specbatch.errors import FailedError, ShortOfMemoryError, SpecbatchError, one_line
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.progress.bars import Report
from specbatch.runtime.pipe import hang_up

EXIT_S = 5.0
EXPLAIN_S = 1.0  # to learn which rank failed first
SILENT_BEATS = 30  # after so many a rank counts as stopped


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
        self._short: ShortOfMemoryError | None = None  # the reason, if it is a lack of memory and was not raised yet
        self._communicator: Communicator | None = None
        self._connections = connections
        self._processes = processes
        self._engines = 0
        self._built: dict[int, int] = {}  # engine -> number of ranks that have built it
        self._progress: dict[int, dict[int, Progress]] = {}  # engine -> rank
        self._digests: dict[
            tuple[int, int], dict[int, list[int]]
        ] = {}  # engine and number of a copy -> rank -> history
        self._changed = threading.Condition()
        self._ends = threading.RLock()  # held while the group ends, in whatever thread: another one begins after that
        self._watchers = [
            threading.Thread(target=self._watch, args=watched, daemon=True)
            for watched in enumerate(connections, start=1)
        ]
        for watcher in self._watchers:
            watcher.start()
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

    def note_progress(self, rank: int, progress: Progress) -> tuple[int, int]:
        """Note how far a rank is with building an engine. Returns (done, total) of all ranks."""
        with self._changed:
            self._progress.setdefault(progress.engine, {})[rank] = progress
            self._changed.notify_all()
            return self._progress_of(progress.engine)

    def _progress_of(self, engine: int) -> tuple[int, int]:
        found = self._progress.get(engine, {}).values()
        return sum(item.done for item in found), sum(item.total for item in found)

    def _has_ended(self, engine: int) -> bool:
        """Whether building it has come to an end, good or bad."""
        return self.failure is not None or self._built.get(engine) == len(self._connections)

    def wait_until_built(self, engine: int, report: Report) -> None:
        """Wait until all ranks have built this engine, and report their progress. Raises SpecbatchError if one of them
        has failed."""
        seen, ended = None, False
        while not ended:
            with self._changed:
                while not self._has_ended(engine) and self._progress_of(engine) == seen:
                    self._changed.wait()
                seen, ended = self._progress_of(engine), self._has_ended(engine)
            report(*seen)
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
        """Raise SpecbatchError if a rank has failed: the first time ShortOfMemoryError if it ran out of memory."""
        if self._communicator is not None and self._communicator.is_late:
            self.fail("a rank did not answer in time")
        if self.failure is not None:
            error: SpecbatchError = FailedError(f"tensor parallel: {self.failure}; a new engine starts new processes")
            if self._short is not None:
                error, self._short = self._short, None
            if self._details:
                error.add_note(self._details)
            raise error

    def fail(
        self, reason: str, details: str = "", *, patience: float = 0.0, short: ShortOfMemoryError | None = None
    ) -> None:
        """The group cannot be used any more, and its processes are ended. The first reason counts. patience: seconds to
        wait for one before this, which may be its consequence; short: the error, if a rank ran out of memory."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, patience)
        with self._ends:
            with self._changed:
                if self.failure is not None:
                    return
                self.failure, self._details, self._short = reason, details, short
                self._kill()
                self._changed.notify_all()
            if self._communicator is not None:
                self._communicator.abort()
            self._reap()

    def close(self) -> None:
        """End the other ranks."""
        with self._ends:
            with self._changed:
                self.failure = self.failure or "the group is closed"
                self._kill()
            self._reap()
            for connection in self._connections:
                hang_up(connection)
            if self._communicator is not None:
                self._communicator.close()
        # A thread that drops the last reference to a torch.distributed group while the interpreter ends aborts the
        # process: the group's destructor takes the GIL again, which ends such a thread inside of C++.
        for watcher in self._watchers:
            watcher.join(EXIT_S)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # they keep nothing, and one that is stopped ends by no other signal

    def _reap(self) -> None:
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
            self.fail(f"rank {rank} failed: {message.reason}", message.trace, patience=patience, short=message.short)
        elif isinstance(message, Digests):
            self.compare(rank, message)
        elif isinstance(message, Progress):
            self.note_progress(rank, message)
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
