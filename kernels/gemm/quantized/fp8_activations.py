"""Chooses W8A8 or W8A16 for GEMMs with FP8 weights: whether activations are quantized to FP8, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_enabled = ContextVar("fp8_activations", default=False)


@contextmanager
def use_fp8_activations(enabled: bool) -> Iterator[None]:
    """Within this context GEMMs with FP8 weights also quantize their activations, if `enabled`.

    An engine sets it once for all of its passes, so that a verify computes what the baseline computes, and a prompt the
    same in whatever chunks it comes. Engines that share weights may differ in it.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def quantizes(x: torch.Tensor) -> bool:
    """Whether x is quantized before a GEMM with FP8 weights: BF16 and FP16 only, float32 stays exact."""
    return _enabled.get() and x.element_size() == 2
