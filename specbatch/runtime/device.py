"""Finds torch devices and dtypes by their names in the configuration."""

from __future__ import annotations

import itertools

import torch

from specbatch.errors import refuse

_NO_MEMORY = (
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def find_device(name: str) -> torch.device:
    """The device that `name` (auto, cpu, cuda, cuda:N) selects on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise refuse("device", name, "torch sees no CUDA device here; use cpu or auto")
        index = int(name[5:] or 0) if ":" in name else 0
        if index >= torch.cuda.device_count():
            raise refuse("device", name, f"there are {torch.cuda.device_count()} CUDA devices; count from 0")
        return torch.device("cuda", index)
    return torch.device(name)


def far_device(count: int) -> str:
    """Which of the first `count` CUDA devices cannot access the memory of which, for a message; empty if all can."""
    for first, second in itertools.permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(first, second):
            return f"cuda:{first} cannot access the memory of cuda:{second}"
    return ""


def device_type(name: str) -> str:
    """cpu or cuda, also of a CUDA device that this machine does not have."""
    return "cuda" if name.startswith("cuda") else find_device(name).type


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. Only torch's allocator of a GPU raises OutOfMemoryError; the driver
    (graphs, pinned memory), Triton (kernels), cuBLAS (workspaces) and the allocator of a CPU have messages."""
    known = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return known or isinstance(error, torch.OutOfMemoryError)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The type that `name` selects for a checkpoint published in `stored`: auto is float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored or "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
