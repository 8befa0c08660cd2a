"""How a device communicator cuts tensors for its kernels, which are replaced by ranks that all hold the same tensor,
and how it joins a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from specbatch.kernels.collectives.communicator import DeviceCommunicator, RendezvousStore

RANKS = 2


class EqualRanks:
    """Kernels that take whole vectors of 16 bytes, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = 0

    def check(self, x: torch.Tensor) -> None:
        self.calls += 1
        size = x.numel() * x.element_size()
        assert 0 < size <= self.most
        assert size % 16 == 0
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        self.check(x)
        out.copy_(RANKS * x + (0 if residual is None else residual))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.check(x)
        assert out.stride(0) * out.element_size() % 16 == 0
        out.copy_(x.expand(RANKS, -1))


@pytest.fixture
def ranks() -> Any:
    found: Any = object.__new__(DeviceCommunicator)
    found.size, found.most_one_shot = RANKS, 64
    found.one_shot, found.two_shot = EqualRanks(64), EqualRanks(256)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (2, 4), (3, 7), (5, 2, 8), (9, 33), (0, 4)])
def test_every_size_is_exchanged_in_whole_vectors(ranks: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    assert ranks.all_reduce(x).equal(RANKS * x)
    assert ranks.all_reduce(x, x).equal((RANKS + 1) * x)
    across = x.transpose(0, -1)
    assert ranks.all_reduce(across, across).equal((RANKS + 1) * across)
    assert ranks.all_gather(x).equal(torch.stack([x] * RANKS))
    assert ranks.all_gather(across).equal(torch.stack([across] * RANKS))
    inner = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)  # begins between two vectors
    assert ranks.all_reduce(inner, inner).equal((RANKS + 1) * x)
    assert ranks.all_gather(inner).equal(torch.stack([x] * RANKS))


def test_kernel_follows_from_the_size(ranks: Any) -> None:
    ranks.all_reduce(torch.ones(16))
    assert (ranks.one_shot.calls, ranks.two_shot.calls) == (1, 0)
    ranks.all_reduce(torch.ones(17))
    assert (ranks.one_shot.calls, ranks.two_shot.calls) == (1, 1)
    ranks.all_reduce(torch.ones(129))  # in three parts, the last of which is small
    assert (ranks.one_shot.calls, ranks.two_shot.calls) == (2, 3)


def test_exchanges_of_every_group_are_counted_from_zero() -> None:
    """As torch does it, by a count of the process: that of rank 0 is in its second group, that of rank 1 is new."""
    exchanges = [7, 0]
    for _ in range(2):
        shared = HashStore()
        shared.set_timeout(timedelta(seconds=5))
        stores = [RendezvousStore(shared) for _ in range(RANKS)]
        for _ in range(3):
            for rank, store in enumerate(stores):
                PrefixStore("torch", store).set(f"memory/{exchanges[rank]}/{rank}", b"\xff%d" % rank)
            for rank, store in enumerate(stores):
                other = f"memory/{exchanges[rank]}/{1 - rank}"
                PrefixStore("torch", store).wait([other])
                assert PrefixStore("torch", store).get(other) == b"\xff%d" % (1 - rank)
                exchanges[rank] += 1
        exchanges[1] = 0


def test_exchanges_of_every_name_are_counted_apart() -> None:
    """Rank 0 has made other numbers of exchanges of the two names than rank 1, which makes none of a group before."""
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=5))
    stores = [RendezvousStore(shared) for _ in range(RANKS)]
    for name, numbers in (("memory", (7, 0)), ("signals", (3, 0)), ("memory", (8, 1))):
        for rank, store in enumerate(stores):
            store.set(f"{name}/{numbers[rank]}/{rank}", f"{name} {rank}".encode())
        for rank, store in enumerate(stores):
            assert store.get(f"{name}/{numbers[rank]}/{1 - rank}") == f"{name} {1 - rank}".encode()
