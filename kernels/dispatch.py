"""Which implementation of an operation runs: its Triton kernel or its torch reference."""

from __future__ import annotations

import torch


def runs_kernels(x: torch.Tensor) -> bool:
    """Do kernels run on this tensor? The one place that decides; tests make it say yes to the interpreter."""
    return x.is_cuda


def pdl(x: torch.Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: programs start while the kernel before ends, and wait for what it writes."""
    return {"PDL": x.is_cuda, "launch_pdl": x.is_cuda}
