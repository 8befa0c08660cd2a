"""Replicas as processes of this machine, each with GPUs of its own.

python -m specbatch.replicas.process FD
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import torch

from specbatch.config import EngineConfig
from specbatch.errors import refuse
from specbatch.replicas.messages import Command, Ended, Message
from specbatch.runtime.device import find_device
from specbatch.runtime.pipe import hang_up

EXIT_S = 5.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalProcesses:
    """Starts the replicas of an engine. Raises SpecbatchError if this machine has too few GPUs for them."""

    def __init__(self, config: EngineConfig) -> None:
        self.least = self.most = count = config.data_parallel
        device = find_device(config.device)
        if device.type == "cpu":
            threads = str(max(1, len(os.sched_getaffinity(0)) // count))
            self._settings = [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads}] * count
            return
        each, present = config.tensor_parallel, torch.cuda.device_count()
        if device.index or count * each > present:
            groups = f" of tensor_parallel={each}" if each > 1 else ""
            works = f"{count} replicas{groups} use CUDA devices 0 to {count * each - 1} and this machine has {present}"
            raise refuse("data_parallel", count, f"{works}; use device cuda and at most {present // each}")
        names = (os.environ.get(VISIBLE) or ",".join(map(str, range(present)))).split(",")
        self._settings = [{VISIBLE: ",".join(names[at * each : (at + 1) * each])} for at in range(count)]

    def start(self, place: int, deliver: Callable[[Message], None]) -> ReplicaProcess:
        """Start the replica in a place from 0 to `most` - 1. deliver: called with its messages, in another thread."""
        return ReplicaProcess(self._settings[place], deliver)


class ReplicaProcess:
    """A replica in a process, which ends with the connection to this one."""

    def __init__(self, settings: dict[str, str], deliver: Callable[[Message], None]) -> None:
        """settings: of its environment."""
        self._connection, theirs = Pipe()
        self._sending = threading.Lock()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | settings
        command = [sys.executable, "-m", "specbatch.replicas.process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        threading.Thread(target=self._read, args=(deliver,), daemon=True).start()

    def send(self, command: Command) -> None:
        """Pass on a command. A replica that has ended ignores it: its last message says so."""
        data = pickle.dumps(command)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # half a message would be the last
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def close(self) -> None:
        """End the process."""
        hang_up(self._connection)
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, deliver: Callable[[Message], None]) -> None:
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                deliver(message)
                if isinstance(message, Ended):
                    return
        except (EOFError, OSError):
            deliver(Ended(_ending(self._process.wait())))
        finally:
            self._connection.close()


def _ending(status: int) -> str:
    return f"its process was killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def main() -> None:
    """Carry out what comes through the connection. Its end ends this process, whatever it does."""
    from specbatch.replicas.replica import Replica

    connection, sending = Connection(int(sys.argv[1])), threading.Lock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that leads decides what Ctrl-C ends

    def send(message: Message) -> None:
        with sending:
            connection.send_bytes(pickle.dumps(message))

    replica = Replica(send)

    def read() -> None:
        try:
            while True:
                replica.receive(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    replica.run()


if __name__ == "__main__":
    main()
