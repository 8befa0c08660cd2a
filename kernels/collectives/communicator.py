"""Collectives over the ranks of a tensor-parallel group: all-reduce with residual, and all-gather.

Every rank gets the same bits: sums are taken in the order of the ranks, in float32, and rounded once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import torch
import torch.nn.functional as F
from torch.distributed import Store  # type: ignore[attr-defined]

MOST_ONE_SHOT = 1 << 20  # bytes, on two ranks; on more a two-shot, which sends less, is faster from smaller sizes on
MOST_TWO_SHOT = 1 << 25  # bytes; larger ones are summed in parts
# torch takes symmetric memory from one pool of a device, and raises an error if two threads use it at once: the thread
# that joins a group may outlive it if another rank fails, and the next group has its own.
_ALLOCATION = threading.Lock()


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


class RendezvousStore(Store):
    """The store of one group, for `torch.distributed._symmetric_memory.rendezvous`.

    torch writes to keys "NAME/NUMBER/RANK", where NUMBER counts the exchanges of this name in the process, over all
    groups (class `StoreExchange` in PyTorch's `c10d/symm_mem`). Rank 0 in its second group would therefore wait for
    keys that the other ranks, whose processes are new, never write. Here each group counts its exchanges from 0.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, dict[str, int]] = {}  # by name: number in the process -> number in the group

    def _own(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        numbers = self._numbers.setdefault(name, {})
        return f"{name}/{numbers.setdefault(number, len(numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._own(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(self._own(key))
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._own(key) for key in keys], *(() if timeout is None else (timeout,)))


class DeviceCommunicator:
    """Collectives of CUDA devices of one host, by kernels that write into the memory of the other devices: a one-shot
    of small tensors (`push_triton`), a two-shot of larger ones (`two_shot_triton`). Sums have the bits of `sum_ref`.

    NCCL is not used: it is slower at all sizes here, and a process that leaves an NCCL group whose other processes have
    been killed can end with SIGABRT. Tensors are of bfloat16, float16 or float32.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """store: connects the ranks of this group only. Returns once all ranks have joined."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group

        from specbatch.kernels.collectives.push_triton import OneShot
        from specbatch.kernels.collectives.two_shot_triton import TwoShot

        self.store, self.rank, self.size = store, rank, size
        # torch finds the other ranks through a process group of this name, which needs a store and no backend. It
        # keeps what it knows of a name for good, so that each group has a name of its own: that of the first rank here.
        name: Any = store.compare_set("specbatch-peer-memory", "", uuid4().hex).decode()
        # torch holds no reference to the group, and calls methods of the store that are in Python.
        self._name, self._rendezvous_store = name, RendezvousStore(store)
        self._group = ProcessGroup(self._rendezvous_store, rank, size)
        _register_process_group(name, self._group)
        # Else torch would make an object for multicast, which is not used here and not allowed on all machines.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        small = OneShot.bytes_for(MOST_ONE_SHOT, size)
        with _ALLOCATION:
            memory = symmetric.empty(
                (small + TwoShot.bytes_for(MOST_TWO_SHOT, size)) // 4, dtype=torch.int32, device=device
            )
        self._wait_for_all("memory")  # torch's own wait for the other ranks would hold the GIL
        peers = list(symmetric.rendezvous(memory, name).buffer_ptrs)
        self.one_shot = OneShot(memory[: small // 4], peers, rank, MOST_ONE_SHOT)
        self.two_shot = TwoShot(
            memory[small // 4 :],
            [address + small for address in peers],
            rank,
            MOST_TWO_SHOT,
            self.one_shot.abort,
            self.one_shot.late,
        )
        self.most_one_shot = 2 * MOST_ONE_SHOT // size
        torch.cuda.synchronize(device)
        self._wait_for_all("mailboxes")

    def _wait_for_all(self, point: str) -> None:
        """Return once every rank has called this for the same point of the construction."""
        everyone = f"{self._name}-{point}"
        if self.store.add(f"{everyone}-count", 1) == self.size:
            self.store.set(everyone, "")
        self.store.wait([everyone])

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        flat = _vectors(x)
        added = None if residual is None else _vectors(residual)
        total, step = torch.empty_like(flat), self.two_shot.most // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = slice(start, start + step)
            kernel = self.one_shot if flat[part].nbytes <= self.most_one_shot else self.two_shot
            kernel.all_reduce(flat[part], None if added is None else added[part], total[part])
        return total[: x.numel()].view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        flat = _vectors(x)
        out = flat.new_empty(self.size, flat.numel())
        step = self.one_shot.most // flat.element_size()
        for start in range(0, flat.numel(), step):
            self.one_shot.all_gather(flat[start : start + step], out[:, start : start + step])
        return out[:, : x.numel()].reshape(self.size, *x.shape)

    @property
    def is_late(self) -> bool:
        return bool(self.one_shot.late)

    def abort(self) -> None:
        self.one_shot.abort.fill_(1)

    def close(self) -> None:
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """x as one contiguous dimension of whole vectors of 16 bytes, which begins at one: padded or copied if needed."""
    flat = x.contiguous().view(-1)
    missing = -flat.numel() % (16 // flat.element_size())
    if missing:
        return F.pad(flat, (0, missing))
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()
