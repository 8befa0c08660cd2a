"""Collectives over the ranks of a tensor-parallel group: all-reduce with residual, and all-gather.

Every rank gets the same bits: sums are taken in the order of the ranks, in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

import torch

MOST_ONE_SHOT = 1 << 20  # bytes, on two ranks; on more a two-shot, which sends less, is faster from smaller sizes on
MOST_TWO_SHOT = 1 << 25  # bytes; larger ones are summed by NCCL


class Communicator(Protocol):
    """This process's end of a group. All ranks call the same methods in the same order, with the same shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of x over all ranks, plus `residual`, which is the same on all of them: a tensor like x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors x [...] of all ranks: [size, ...]."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether a collective has given up waiting for another rank; its results are wrong."""
        ...

    def abort(self) -> None:
        """Let collectives that wait for another rank end, with wrong results or an error; other threads may be in one.
        The group cannot be used any more."""

    def close(self) -> None:
        """Leave the group."""


def sum_ref(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """The parts of ranks 0, 1, ... and then `residual`, added in this order in float32 and cast once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if residual is not None:
        total = total + residual.float()
    return total.to(parts[0].dtype)


class GroupCommunicator:
    """Collectives of a `torch.distributed` group, on CPUs through gloo. Slow: for tests, and to try things out."""

    def __init__(self, group: torch.distributed.ProcessGroupGloo) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return sum_ref(self.all_gather(x).unbind(), residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()  # type: ignore[attr-defined]
        return torch.stack(parts)

    is_late = False  # a collective raises RuntimeError instead

    def abort(self) -> None:
        """A rank whose process ended has closed its connections, which ends the collectives of the others."""

    def close(self) -> None:
        pass


class DeviceCommunicator:
    """Collectives of CUDA devices of one host, through peer memory: a one-shot of small tensors (`push_triton`), a
    two-shot of larger ones (`two_shot_triton`), both with the bits of `sum_ref`.

    Tensors that no mailbox holds, and those that are not whole vectors of 16 bytes, are NCCL's: their sums have the
    same bits on all ranks, too, but are rounded at each addition.
    """

    def __init__(self, device: torch.device) -> None:
        """The default group of `torch.distributed` must be initialized, with NCCL."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

        from specbatch.kernels.collectives.push_triton import OneShot
        from specbatch.kernels.collectives.two_shot_triton import TwoShot

        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # torch keeps the store of a group's name for good, and every default group has the same name. A group after
        # one whose process failed has another store, so it needs a name of its own: that of the first rank here.
        store = _get_default_store()
        name: Any = store.compare_set("specbatch-peer-memory", "", uuid4().hex).decode()
        _register_process_group(name, _get_default_group())
        _SymmetricMemory.set_group_info(name, self.rank, self.size, PrefixStore(name, store))
        small = OneShot.bytes_for(MOST_ONE_SHOT, self.size)
        total = small + TwoShot.bytes_for(MOST_TWO_SHOT, self.size)
        memory = symmetric.empty(total // 4, dtype=torch.int32, device=device)
        peers = list(symmetric.rendezvous(memory, name).buffer_ptrs)
        self.one_shot = OneShot(memory[: small // 4], peers, self.rank, MOST_ONE_SHOT)
        self.two_shot = TwoShot(
            memory[small // 4 :],
            [address + small for address in peers],
            self.rank,
            MOST_TWO_SHOT,
            self.one_shot.abort,
            self.one_shot.late,
        )
        self._most_one_shot = 2 * MOST_ONE_SHOT // self.size
        torch.cuda.synchronize(device)
        torch.distributed.barrier()

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        size = _sent_bytes(x)
        if 0 < size <= self._most_one_shot:
            return self.one_shot.all_reduce(x, residual)
        if 0 < size <= MOST_TWO_SHOT:
            return self.two_shot.all_reduce(x, residual)
        y = x.contiguous()  # of a GEMM or a mixture of experts, and used nowhere else
        torch.distributed.all_reduce(y)
        return y if residual is None else residual + y

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if 0 < _sent_bytes(x) <= MOST_ONE_SHOT:
            return self.one_shot.all_gather(x)
        parts = x.new_empty(self.size, *x.shape)
        torch.distributed.all_gather_into_tensor(parts, x.contiguous())
        return parts

    @property
    def is_late(self) -> bool:
        return bool(self.one_shot.late)

    def abort(self) -> None:
        from torch.distributed.distributed_c10d import _abort_process_group

        self.one_shot.abort.fill_(1)  # ends our kernels
        if torch.distributed.is_initialized():
            _abort_process_group()  # ends NCCL's, by `ncclCommAbort`, and forgets the group

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _sent_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor that the kernels can send, which is of floats and whole vectors; 0 of others."""
    from specbatch.kernels.collectives.peer_words_triton import KINDS, VECTOR

    size = x.numel() * x.element_size()
    return size if x.dtype in KINDS and size % VECTOR == 0 else 0
