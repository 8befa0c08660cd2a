"""Which of an operation's twins runs: its Triton kernel or its plain torch reference; and whether activations are
rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_rounds = ContextVar("rounds", default=False)


def runs_kernels(x: torch.Tensor) -> bool:
    """Do kernels run on this tensor? The one place that decides; tests make it say yes to the interpreter."""
    return x.is_cuda


@contextmanager
def activations(*, float8: bool) -> Iterator[None]:
    """In here products with float8 weights round their activations, too, if `float8`.

    It is a matter of the engine and of nothing that changes: a verify computes what plain decoding computes, and a
    prompt the same in whatever chunks it comes. Engines that share weights need not agree on it.
    """
    token = _rounds.set(float8)
    try:
        yield
    finally:
        _rounds.reset(token)


def rounds(x: torch.Tensor) -> bool:
    """Is x, of 16 bits, to be rounded before a product with float8 weights? float32 stays exact."""
    return _rounds.get() and x.element_size() == 2


def pdl(x: torch.Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: programs start while the kernel before ends, and wait for what it writes."""
    return {"PDL": x.is_cuda, "launch_pdl": x.is_cuda}
