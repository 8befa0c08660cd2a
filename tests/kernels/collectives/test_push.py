"""All-reduce and all-gather over peer memory equal their references bit for bit, also from CUDA graphs."""

from __future__ import annotations

import time

import pytest
import torch

from specbatch.kernels.collectives.communicator import MOST_ONE_SHOT, MOST_TWO_SHOT, DeviceCommunicator, sum_ref
from specbatch.sweeps.machine.devices import run_on_devices

CALLS = 20_000
CALLS_OF_GRAPH, MOST_CALLS = 500, 1_000_000
needs_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def inputs(generators: list[torch.Generator], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    drawn = [torch.randn(count, generator=one, device=one.device) for one in generators]
    # Zeros of both signs, and the word that marks an empty place.
    return [(item * (item.abs() > 0.3)).to(dtype) for item in drawn]


def random_calls(ranks: DeviceCommunicator, calls: int) -> None:
    device = torch.device("cuda", ranks.rank)
    generators = [torch.Generator(device).manual_seed(rank) for rank in range(ranks.size)]
    sizes = torch.Generator().manual_seed(5)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for call in range(calls):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[call % 3]
        largest = (MOST_ONE_SHOT // 16 if call % 50 else 2 * MOST_TWO_SHOT) // dtype.itemsize
        count = int(torch.randint(1, largest + 1, (1,), generator=sizes))
        odd = call // 2 % 2  # then a tensor does not begin at a whole vector
        parts = [item[odd:] for item in inputs(generators, count + odd, dtype)]
        if call % 4:
            residual = parts[0] + 1 if call % 8 < 5 else None
            wrong += (ranks.all_reduce(parts[ranks.rank], residual) != sum_ref(parts, residual)).any()
        else:
            wrong += (ranks.all_gather(parts[ranks.rank]) != torch.stack(parts)).any()
    assert not wrong.item()
    assert not ranks.is_late


def replayed_random_calls(ranks: DeviceCommunicator, replays: int) -> None:
    """A graph of calls with random sizes that checks itself, with other inputs in each replay."""
    device = torch.device("cuda", ranks.rank)
    sizes = torch.rand(CALLS_OF_GRAPH, generator=torch.Generator().manual_seed(11)).tolist()
    seeds = torch.arange(MOST_TWO_SHOT // 2, dtype=torch.int32, device=device)
    replay = torch.zeros((), dtype=torch.int32, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)

    def part(rank: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        mixed = (seeds[:count] + (rank * 7919 + call)) * (replay * 2 + 2654435)
        return ((mixed >> 7) & 1023).sub(512).to(dtype) * 0.01

    def exchange() -> None:
        for call, size in enumerate(sizes):
            dtype = (torch.bfloat16, torch.float16, torch.float32)[call % 3]
            largest = (MOST_ONE_SHOT // 64 if call % 50 else MOST_TWO_SHOT) // dtype.itemsize
            count = (int(size * (largest // 8)) + 1) * 8
            parts = [part(rank, call, count, dtype) for rank in range(ranks.size)]
            if call % 4:
                wrong.add_((ranks.all_reduce(parts[ranks.rank]) != sum_ref(parts)).any())
            else:
                wrong.add_((ranks.all_gather(parts[ranks.rank]) != torch.stack(parts)).any())
        replay.add_(1)

    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    for _ in range(replays):
        graph.replay()
    assert not wrong.item()
    assert not ranks.is_late
    assert replay.item() == replays + 1


def replayed_calls(ranks: DeviceCommunicator) -> None:
    device = torch.device("cuda", ranks.rank)
    x, residual = (
        torch.zeros(6, 4096, dtype=torch.bfloat16, device=device),
        torch.ones(6, 4096, device=device).bfloat16(),
    )
    ranks.all_reduce(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(5):
            y = ranks.all_reduce(y * 0.5, residual)
        parts = ranks.all_gather(y)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for step in range(2_000):
        x.fill_(step % 7 + ranks.rank)
        graph.replay()
        expected = [torch.full_like(x, step % 7 + rank) for rank in range(ranks.size)]
        for _ in range(5):
            total = sum_ref([item * 0.5 for item in expected], residual)
            expected = [total] * ranks.size
        wrong += (parts != torch.stack(expected)).any()
    assert not wrong.item()


@pytest.mark.gpu
@needs_devices
def test_random_calls_equal_the_reference() -> None:
    run_on_devices(random_calls, CALLS)


@pytest.mark.gpu
@needs_devices
def test_replayed_calls_equal_the_reference() -> None:
    run_on_devices(replayed_calls)


@pytest.mark.gpu
@pytest.mark.slow
@needs_devices
def test_a_million_replayed_calls_of_random_sizes_equal_the_reference() -> None:
    run_on_devices(replayed_random_calls, MOST_CALLS // CALLS_OF_GRAPH)


def dead_rank(ranks: DeviceCommunicator) -> None:
    x = torch.ones(8, 64, device=torch.device("cuda", ranks.rank))
    ranks.all_reduce(x)
    torch.cuda.synchronize()
    if ranks.rank == 0:
        ranks.all_reduce(x)  # the others do not call it
        ranks.abort()
        start = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 1
        assert ranks.is_late


@pytest.mark.gpu
@needs_devices
def test_abort_ends_a_wait_for_another_rank() -> None:
    run_on_devices(dead_rank)
