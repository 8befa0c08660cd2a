"""Tensor parallelism over processes: rank 0 runs the engine and sends every launch to the other ranks.

The user's process is rank 0. It keeps the scheduler, all requests and all results. The other ranks are processes of
`engine.ranks.follower` with a worker of their own over their part of the model, and repeat the calls of rank 0's
worker in the same order. No result is sent back: collectives within the models keep the ranks together, and a call is
sent before rank 0 makes it, so that ranks launch at the same time.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.engine.ranks.rank_group import EXPLAIN_S, RankGroup
from specbatch.engine.ranks.rank_link import BUILD, CLOSE, Digests, Progress, join_group, listen, may_follow
from specbatch.engine.setup.prepare import Prepared, prepare
from specbatch.errors import SpecbatchError, one_line, refuse
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.progress.bars import Instead, Report
from specbatch.runtime.device import far_device, find_device

FOLLOWER = "specbatch.engine.ranks.follower"


class EngineRanks:
    """The ranks of one engine: its number in a group, and its calls. The group is started with `build`."""

    def __init__(self, config: EngineConfig, share: MemoryShare, shared: EngineRanks | None) -> None:
        """shared: of the engine whose weights it uses."""
        self._config, self._share, self._shared = config, share, shared
        self._device = device = find_device(config.device)
        self._started: RankGroup | None = None
        self._number = 0
        self._report: Report = lambda done, total: None
        size = config.tensor_parallel
        if device.type == "cuda" and device.index:
            works = f"tensor_parallel={size} uses devices 0 to {size - 1}; use cuda, and CUDA_VISIBLE_DEVICES to choose"
            raise refuse("device", config.device, works)
        if device.type == "cuda" and size > torch.cuda.device_count():
            works = f"this machine has {torch.cuda.device_count()} CUDA devices; use at most that"
            raise refuse("tensor_parallel", size, works)
        if device.type == "cuda" and (far := far_device(size)):
            works = f"{far}; use GPUs that are connected by NVLink, or data_parallel"
            raise refuse("tensor_parallel", size, works)

    @property
    def _group(self) -> RankGroup:
        assert self._started is not None
        return self._started

    def build(self) -> Communicator:
        if self._device.type == "cpu":
            _undivided[:] = _undivided or [torch.get_num_threads()]
            _divided.append(self)
            divide_cores(self._config.tensor_parallel)
        self._started = running_group(self._config.tensor_parallel, self._device.type)
        self._number = self._group.next_engine()
        shared = None if self._shared is None else self._shared._number
        self.send(BUILD, (self._config, self._share, shared))
        return self._group.communicator

    def report(self, number: int, history: list[int]) -> None:
        self._group.compare(0, Digests(self._number, number, history))

    def wait_until_compared(self) -> None:
        self._group.wait_until_compared()

    def with_theirs(self, report: Report) -> Report:
        self._report = report

        def with_own(done: int, total: int) -> None:
            report(*self._group.note_progress(0, Progress(self._number, done, total)))

        return Instead(report, with_own)

    def wait_until_built(self) -> None:
        self._group.wait_until_built(self._number, self._report)

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._group.send(self._number, name, arguments)

    def check(self) -> None:
        self._group.check()

    def fail(self, error: BaseException) -> None:
        _restore_cores(self)
        self._group.fail(f"rank 0 failed: {one_line(error)}", patience=2 * EXPLAIN_S if may_follow(error) else 0.0)
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        failure = self._group.failure
        own = failure in (None, f"rank 0 failed: {one_line(error)}")
        if not own and isinstance(error, Exception) and not isinstance(error, SpecbatchError):
            self._group.check()

    def close(self) -> None:
        """Free the memory of the other ranks."""
        _restore_cores(self)
        if self._started is not None and self._started.failure is None:
            self.send(CLOSE, ())


def running_group(size: int, device: str) -> RankGroup:
    """The running group of this size, or a new one: processes are started once."""
    group = groups.pop((size, device), None)
    if group is not None and group.failure is not None:
        group.close()
        group = None
    groups[size, device] = group = group or start_group(size, device)
    return group


groups: dict[tuple[int, str], RankGroup] = {}
_divided: list[EngineRanks] = []  # open engines on a CPU, among whose ranks the cores are divided
_undivided: list[int] = []  # the number of threads of this process before


@atexit.register
def close_groups() -> None:
    while groups:
        groups.popitem()[1].close()


def divide_cores(size: int) -> int:
    """Limit the threads of this process to its share of the cores among `size` ranks, unless OMP_NUM_THREADS is set.
    Returns the number of threads of each rank.

    Ranks whose threads share a core wait for each other for much longer than they compute. All ranks have the same
    number, because a sum can have other bits with another number of threads. The limit ends with the last engine.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        share = max(1, len(os.sched_getaffinity(0)) // size)
        torch.set_num_threads(min(torch.get_num_threads(), share))
    return torch.get_num_threads()


def _restore_cores(ranks: EngineRanks) -> None:
    """Give this process all its threads back after the last engine whose ranks share the cores."""
    if ranks in _divided:
        _divided.remove(ranks)
    if not _divided and _undivided:
        torch.set_num_threads(_undivided.pop())


def checked(config: EngineConfig, log: Callable[[str], None]) -> Prepared:
    """`prepare`, which refuses what cannot run before anything is loaded, with the devices that all ranks need."""
    if config.tensor_parallel > 1:
        EngineRanks(config, EXCLUSIVE, None)
    return prepare(config, log)


def start_group(size: int, device: str) -> RankGroup:
    """Start the other ranks of a group of `size`, on a CPU or on CUDA devices 0 to size - 1."""
    threads = {"OMP_NUM_THREADS": str(divide_cores(size))} if device == "cpu" else {}
    store = listen(size)
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    for rank in range(1, size):
        ours, theirs = Pipe()
        command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno()), str(rank), str(size), str(store.port), device]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | threads
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
