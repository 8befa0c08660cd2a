"""Worker process of a tensor-parallel engine, for ranks other than 0 (see `specbatch.engine.ranks`).

python -m specbatch.engine.follower FD RANK SIZE PORT DEVICE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.engine.builder import EngineParts, build
from specbatch.engine.ranks import Build, Call, follow, one_line
from specbatch.kernels.collectives.communicator import Communicator, DeviceCommunicator, GroupCommunicator
from specbatch.memory.planner import MemoryShare

HOST = "127.0.0.1"
CONNECT = timedelta(seconds=120)  # for all ranks to start


def listen(size: int) -> TCPStore:
    """A store through which the ranks of a group find each other, on a free port."""
    return TCPStore(HOST, 0, size, is_master=True, timeout=CONNECT, wait_for_workers=False)


def join_group(store: TCPStore, rank: int, size: int, device: str) -> Communicator:
    """This rank's end of the group; returns once all ranks have joined."""
    if device == "cpu":
        return GroupCommunicator(ProcessGroupGloo(store, rank, size, CONNECT))
    place = torch.device("cuda", rank)
    torch.cuda.set_device(place)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=place)
    return DeviceCommunicator(place)


def main() -> None:
    """Join the group and make the calls of rank 0. An exception is sent to it, as one line; the end of the connection
    ends this process, wherever it is."""
    connection = Connection(int(sys.argv[1]))
    rank, size, port, device = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C ends
    store = TCPStore(HOST, port, size, is_master=False, timeout=CONNECT)
    communicator = join_group(store, rank, size, device)
    try:
        follow(received(connection), builder(communicator, f"cuda:{rank}" if device == "cuda" else device))
    except Exception as error:
        connection.send(one_line(error))
        raise


def builder(ranks: Communicator, device: str) -> Build:
    """Builds this rank's part of an engine."""

    def build_part(
        engines: dict[int, EngineParts], config: EngineConfig, share: MemoryShare, shared: int | None
    ) -> EngineParts:
        model = None if shared is None else engines[shared].model
        with on_device(torch.device(device)):
            return build(replace(config, device=device), _silent, _silent, shared=model, share=share, ranks=ranks)

    return build_part


def received(connection: Connection) -> Iterator[Call]:
    """The calls of rank 0. They are read ahead, so that its end is noticed while a collective waits for it."""
    calls: SimpleQueue[Call] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield calls.get()


def _silent(*_: object) -> None:
    """In place of a log and a progress report: rank 0 has them."""


if __name__ == "__main__":
    main()
