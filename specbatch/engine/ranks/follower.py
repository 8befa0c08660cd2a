"""Worker process of a tensor-parallel engine, for ranks other than 0 (see `specbatch.engine.ranks.ranks`).

python -m specbatch.engine.ranks.follower FD RANK SIZE PORT DEVICE
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from specbatch.config.engine_config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.engine.ranks.rank_link import Failed, Link
from specbatch.engine.ranks.ranks import Build, follow
from specbatch.engine.setup.builder import EngineParts, build
from specbatch.kernels.collectives.communicator import Communicator, DeviceCommunicator, GroupCommunicator
from specbatch.memory.planner import MemoryShare
from specbatch.progress.bars import Report

HOST = "127.0.0.1"
CONNECT = timedelta(seconds=120)  # for all ranks to start
EXCHANGE = timedelta(days=30)  # of a collective: rank 0 watches the processes, and all of them may be suspended


def listen(size: int) -> TCPStore:
    """A store through which the ranks of a group find each other, on a free port."""
    return TCPStore(HOST, 0, size, is_master=True, timeout=CONNECT, wait_for_workers=False)


def join_group(store: TCPStore, rank: int, size: int, device: str) -> Communicator:
    """This rank's end of the group; returns once all ranks have joined."""
    if device == "cpu":
        group = ProcessGroupGloo(store, rank, size, CONNECT)
        group._set_default_timeout(EXCHANGE)
        return GroupCommunicator(group)
    place = torch.device("cuda", rank)
    torch.cuda.set_device(place)
    return DeviceCommunicator(store, rank, size, place)


def main() -> None:
    """Join the group and make the calls of rank 0, which reports an exception. The end of the connection ends this
    process, wherever it is."""
    rank, size, port, device = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    link = Link(Connection(int(sys.argv[1])), lambda: os._exit(0))
    try:
        store = TCPStore(HOST, port, size, is_master=False, timeout=CONNECT)
        communicator = join_group(store, rank, size, device)
        follow(link.calls(), builder(communicator, f"cuda:{rank}" if device == "cuda" else device), link.send)
    except Exception as error:
        link.send(Failed.of(error))
    os._exit(1)  # at once: a collective of this rank may be under way


def builder(ranks: Communicator, device: str) -> Build:
    """Builds this rank's part of an engine."""

    def build_part(
        engines: dict[int, EngineParts], report: Report, config: EngineConfig, share: MemoryShare, shared: int | None
    ) -> EngineParts:
        lender = None if shared is None else engines[shared].worker.decode_step
        with on_device(torch.device(device)):
            return build(replace(config, device=device), _silent, report, lender=lender, share=share, ranks=ranks)

    return build_part


def _silent(line: str) -> None:
    """In place of a log: that of rank 0 says the same."""


if __name__ == "__main__":
    main()
