"""Which implementation of an operation runs: its Triton kernel on a CUDA device, its torch reference elsewhere.

An operation is declared once, next to its reference:

    rms_norm = op(rms_norm_ref, "specbatch.kernels.elementwise.elementwise_triton:rms_norm")

Callers only know `rms_norm`. Triton is imported with the first call that needs the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_forced: bool | None = None


class OnDevice(Protocol):
    """A tensor, or tensors of one device."""

    @property
    def is_cuda(self) -> bool: ...


def runs_kernels(x: OnDevice) -> bool:
    """Whether operations on x run their Triton kernels."""
    return x.is_cuda if _forced is None else _forced


@contextmanager
def force_kernels(enabled: bool = True) -> Iterator[None]:
    """Within this context every operation runs its kernel, or if not `enabled` its reference, on any device. For tests:
    on a CPU kernels run in Triton's interpreter."""
    global _forced
    before, _forced = _forced, enabled
    try:
        yield
    finally:
        _forced = before


def op(reference: Callable[P, T], kernel: str) -> Callable[P, T]:
    """The operation with this torch reference and the Triton implementation `kernel`, "module:function".

    Both take the same arguments, of which the first one, a tensor or a named tuple with `is_cuda`, decides. The kernel
    may have more optional arguments: tests and microbenchmarks call it directly.
    """
    path, _, name = kernel.partition(":")
    module: ModuleType | None = None

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal module
        first: Any = args[0]
        if not runs_kernels(first):
            return reference(*args, **kwargs)
        if module is None:
            module = import_module(path)
        result: T = getattr(module, name)(*args, **kwargs)
        return result

    return run
