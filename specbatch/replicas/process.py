"""Replicas as processes of this machine, each with GPUs of its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import SimpleQueue

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse
from specbatch.replicas.messages import Command, Ended, Message, Output
from specbatch.runtime.device import find_device
from specbatch.runtime.pipe import hang_up

EXIT_S = 5.0
LEAST_ON_CPU = 2  # replicas that any machine may have
VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalProcesses:
    """Starts the replicas of an engine. Raises SpecbatchError if this machine has too few GPUs for them."""

    def __init__(self, config: EngineConfig) -> None:
        self.least = self.most = count = config.data_parallel
        device = find_device(config.device)
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            if count > max(cores, LEAST_ON_CPU):
                works = f"each replica needs a core and this process has {cores}"
                raise refuse("data_parallel", count, f"{works}; use at most {max(cores, LEAST_ON_CPU)}")
            threads = str(max(1, cores // (count * config.tensor_parallel)))
            self.settings = [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads}] * count
            return
        each, present = config.tensor_parallel, torch.cuda.device_count()
        if device.index or count * each > present:
            groups = f" of tensor_parallel={each}" if each > 1 else ""
            works = f"{count} replicas{groups} use CUDA devices 0 to {count * each - 1} and this machine has {present}"
            raise refuse("data_parallel", count, f"{works}; use device cuda and at most {present // each}")
        names = (os.environ.get(VISIBLE) or ",".join(map(str, range(present)))).split(",")
        self.settings = [{VISIBLE: ",".join(names[at * each : (at + 1) * each])} for at in range(count)]

    def start(self, place: int, deliver: Callable[[Message], None]) -> ReplicaProcess:
        """Start the replica in a place from 0 to `most` - 1. deliver: called with its messages, in another thread."""
        return ReplicaProcess(self.settings[place], deliver)


class ReplicaProcess:
    """A replica in a process, which ends with the connection to this one."""

    def __init__(self, settings: dict[str, str], deliver: Callable[[Message], None]) -> None:
        """settings: of its environment."""
        self._connection, theirs = Pipe()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specbatch.replicas", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path} | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for this process alone
        )
        theirs.close()
        self._printed = threading.Thread(target=self._read_output, args=(deliver,), daemon=True)
        for thread in (
            self._printed,
            threading.Thread(target=self._write, daemon=True),
            threading.Thread(target=self._read, args=(deliver,), daemon=True),
        ):
            thread.start()

    def send(self, command: Command) -> None:
        """Pass on a command, without waiting for the replica to read it. One that has ended ignores it."""
        self._outgoing.put(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """End the process. One that does not end by itself is killed."""
        self._outgoing.put(None)
        hang_up(self._connection)
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in a call of a driver that hangs, it ends after this process
                self._process.wait(EXIT_S)

    def _write(self) -> None:
        with suppress(OSError):  # its end is noticed by who reads
            while (data := self._outgoing.get()) is not None:
                self._connection.send_bytes(data)

    def _read(self, deliver: Callable[[Message], None]) -> None:
        try:
            while True:
                for message in pickle.loads(self._connection.recv_bytes()):
                    deliver(message)
                    if isinstance(message, Ended):
                        return
        except (EOFError, OSError):
            status = self._process.wait()
            self._printed.join(EXIT_S)  # what it printed last may say why
            deliver(Ended(_ending(status), lost=status < 0))

    def _read_output(self, deliver: Callable[[Message], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                deliver(Output(line.decode(errors="replace").rstrip()))


def _ending(status: int) -> str:
    return f"its process was killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
