"""Ranks of a tensor-parallel engine as threads of one process, for tests: no processes to start, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from specbatch.engine.ranks import ranks
from specbatch.engine.ranks.follower import follow
from specbatch.engine.ranks.rank_group import RankGroup
from specbatch.engine.ranks.rank_link import Failed, Link
from specbatch.kernels.collectives.communicator import sum_ref


@dataclass
class Shared:
    """What the ranks of a group have in common."""

    size: int
    parts: list[torch.Tensor | None] = field(default_factory=list)
    reductions: int = 0

    def __post_init__(self) -> None:
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass
class ThreadCommunicator:
    shared: Shared
    rank: int
    is_late = False

    def __post_init__(self) -> None:
        # Of this group, while another one may begin.
        self.barrier, self.parts = self.shared.barrier, self.shared.parts

    @property
    def size(self) -> int:
        return self.shared.size

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self.shared.reductions += self.rank == 0
        return sum_ref(self.all_gather(x).unbind(), residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.parts[self.rank] = x.clone()
        self.barrier.wait()
        found = torch.stack([part for part in self.parts if part is not None])
        self.barrier.wait()
        return found

    def abort(self) -> None:
        self.barrier.abort()

    def close(self) -> None:
        pass


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What `work` returns on each rank."""
    shared = Shared(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadCommunicator(shared, rank)), range(size)))


def thread_group(patch: pytest.MonkeyPatch) -> Shared:
    """Let engines use threads as their other ranks. Returns what they share, once an engine is built."""

    patch.setattr(ranks, "groups", {})
    found = Shared(2)

    def start(size: int, device: str) -> RankGroup:
        found.__init__(size)  # type: ignore[misc]
        connections = []
        for rank in range(1, size):
            ours, theirs = Pipe()
            threading.Thread(target=_follow, args=(ThreadCommunicator(found, rank), theirs), daemon=True).start()
            connections.append(ours)
        return RankGroup(connections, [], lambda: ThreadCommunicator(found, 0))

    patch.setattr(ranks, "start_group", start)
    return found


def _follow(communicator: ThreadCommunicator, connection: Connection) -> None:
    link = Link(connection, lambda: None)
    try:
        follow(link.calls(), link.send, communicator, "cpu")
    except Exception as error:
        link.send(Failed.of(error))
        communicator.abort()
