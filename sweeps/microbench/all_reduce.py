"""All-reduce over the GPUs of a machine, in a CUDA graph: ours over peer memory, torch's symmetric memory, and NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from specbatch.errors import refuse
from specbatch.kernels.collectives.communicator import DeviceCommunicator
from specbatch.sweeps.machine.devices import run_on_devices
from specbatch.sweeps.machine.timing import captured
from specbatch.sweeps.microbench.runner import Row, Table, in_a_row

KIB = (2, 8, 32, 64, 128, 256, 1024, 2048, 4096, 16384, 32768)
CALLS, REPEATS = 100, 9  # calls of a graph; replays


def tables() -> Iterator[Table]:
    count = torch.cuda.device_count()
    if count < 2:
        raise refuse("devices", count, "an all-reduce needs two CUDA devices")
    with mp.get_context("spawn").Manager() as manager:
        rows = manager.list()
        run_on_devices(_measure, rows)
        yield Table(list(rows), f"All-reduce of BF16 over {count} GPUs, us: median (range)")


def _measure(ranks: DeviceCommunicator, rows: Any) -> None:
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", ranks.rank)
    store = PrefixStore("nccl", ranks.store)
    torch.distributed.init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.size, device_id=device)
    group = torch.distributed.group.WORLD
    assert group is not None
    for size in KIB:
        x = torch.randn(size * 512, dtype=torch.bfloat16, device=device)
        residual = torch.randn_like(x)
        shared = symmetric.empty(len(x), dtype=x.dtype, device=device)
        symmetric.rendezvous(shared, group)
        shared.copy_(x)

        calls: dict[str, Callable[[], object]] = {
            "specbatch": partial(ranks.all_reduce, x),
            "specbatch + residual": partial(ranks.all_reduce, x, residual),
            "specbatch two-shot": partial(ranks.two_shot.all_reduce, x, None, torch.empty_like(x)),
            "torch one-shot": partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", group.group_name),
            "torch two-shot": partial(torch.ops.symm_mem.two_shot_all_reduce_, shared, "sum", group.group_name),
            "NCCL": partial(torch.distributed.all_reduce, x),
        }
        row: Row = {"KiB": size}
        for name, call in calls.items():
            times = _times(captured(in_a_row([call] * CALLS)))
            row[name] = f"{median(times):.1f} ({min(times):.1f}-{max(times):.1f})"
        if ranks.rank == 0:
            rows.append(row)
    torch.distributed.destroy_process_group()


def _times(run: Callable[[], object]) -> list[float]:
    """Microseconds of a call, per replay."""
    found = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return found
