"""GEMM of each head with a matrix of its own, as multi-head latent attention has before and after attention."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.gemm.deterministic.fixed_rows import gemm_in_blocks


def head_gemm_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, heads, K] @ weight [heads, K, N], head by head -> [T, heads, N]. Both may be views."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def head_gemm_in_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`head_gemm_ref`, deterministic: in blocks of a fixed number of tokens, with all of their heads."""
    heads = len(weight)

    def gemm(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = head_gemm_ref(rows.unflatten(1, (heads, -1)), weight).flatten(1)
        return out

    y = gemm_in_blocks(gemm, x.flatten(1), (*weight.shape, *weight.stride()))
    return y.view(len(x), heads, -1)


head_gemm = op(
    head_gemm_ref,
    "specbatch.kernels.gemm.head_gemm:head_gemm_ref",  # cuBLAS
    deterministic="specbatch.kernels.gemm.head_gemm:head_gemm_in_blocks",
    deterministic_kernel="specbatch.kernels.gemm.head_gemm_triton:head_gemm",
)
