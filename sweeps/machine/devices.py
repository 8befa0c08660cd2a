"""Runs a function on each CUDA device of the machine, in a process of its own, with a communicator between them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specbatch.kernels.collectives.communicator import DeviceCommunicator


def run_on_devices(work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(communicator, *arguments)` on every device. Raises what one of them raises."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = torch.cuda.device_count()
    mp.spawn(_run, (count, port, work, arguments), nprocs=count)  # type: ignore[attr-defined, no-untyped-call]


def _run(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, count, is_master=rank == 0)
    communicator = DeviceCommunicator(store, rank, count, device)
    try:
        work(communicator, *arguments)
        torch.cuda.synchronize()
    finally:
        communicator.close()
