"""Which implementation of an operation runs: its Triton kernel on a CUDA device, its torch reference elsewhere.

An operation is declared once, next to its reference:

    rms_norm = op(rms_norm_ref, "specbatch.kernels.elementwise.elementwise_triton:rms_norm")

Callers only know `rms_norm`. Triton is imported with the first call that needs the kernel.

In deterministic mode (`use_deterministic`) the bits of a row do not depend on the rows that are computed with it. Most
references have this property once their sums, exponentials and GEMMs do, see `common/rowwise` and
`gemm/deterministic/fixed_rows`. An operation whose algorithm depends on the number of rows declares implementations of
its own for this mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_forced: bool | None = None
_deterministic = ContextVar("deterministic", default=False)


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


def is_deterministic() -> bool:
    """Whether the bits of a row must not depend on the rows beside it."""
    return _deterministic.get()


@contextmanager
def use_deterministic(enabled: bool = True) -> Iterator[None]:
    """Within this context operations are deterministic, if `enabled`. An engine sets it for all of its passes
    or for none."""
    token = _deterministic.set(enabled)
    try:
        yield
    finally:
        _deterministic.reset(token)


def op(
    reference: Callable[P, T], kernel: str, deterministic: str | None = None, deterministic_kernel: str | None = None
) -> Callable[P, T]:
    """The operation with this torch reference and the Triton implementation `kernel`, "module:function".

    All take the same arguments, of which the first one, a tensor or a named tuple with `is_cuda`, decides. The kernel
    may have more optional arguments: tests and microbenchmarks call it directly. deterministic, deterministic_kernel:
    what runs in place of the reference and of the kernel in deterministic mode; None: the same.
    """
    find_kernel = _lazily(kernel)
    find_deterministic = _lazily(deterministic) if deterministic else lambda: reference
    find_deterministic_kernel = _lazily(deterministic_kernel) if deterministic_kernel else find_kernel

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0]
        if runs_kernels(first):
            result: T = (find_deterministic_kernel() if is_deterministic() else find_kernel())(*args, **kwargs)
            return result
        return (find_deterministic() if is_deterministic() else reference)(*args, **kwargs)

    return run


def _lazily(place: str) -> Callable[[], Callable[..., Any]]:
    """The function at "module:function", imported when it is first asked for."""
    path, _, name = place.partition(":")
    load = cache(import_module)
    return lambda: getattr(load(path), name)
