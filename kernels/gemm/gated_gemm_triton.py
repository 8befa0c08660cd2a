"""SwiGLU GEMM of many rows: silu(x @ gate.T) * (x @ up.T) in one persistent kernel, which reads tiles by TMA.

The gate and up tiles of a program multiply the same rows of x, so that the activation needs no memory and no kernel of
its own. With few rows see `skinny_gemm_triton`.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.gemm.split_k_triton import MULTIPROCESSORS

_ROWS, _OUTPUTS, _COLUMNS = 128, 128, 64  # of a tile: rows of x, columns of y, and columns of a step
_WARPS, _STAGES = 8, 4
_MOST_ROWS = 1024
_LEAST_USE = 0.7  # of the multiprocessors, in all rounds of tiles together


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this kernel supports x [T, K] and weight [2 N, K], and was faster than cuBLAS and a separate activation
    (`results/h200/experiments.md`)."""
    is_half = x.element_size() == 2 and bias is None and _has_tma(x.device)
    is_aligned = x.data_ptr() % 16 == 0 == weight.data_ptr() % 16 and x.is_contiguous() and weight.is_contiguous()
    n, k = weight.shape[0] // 2, weight.shape[1]
    rounds = cdiv(len(x), _ROWS) * cdiv(n, _OUTPUTS) / MULTIPROCESSORS
    fills = rounds / math.ceil(rounds) >= _LEAST_USE
    return is_half and is_aligned and n % 8 == 0 == k % _COLUMNS and len(x) <= _MOST_ROWS and fills


@cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def gated_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [2 N, K], gate first -> [T, N]. Sums and the activation are float32, and cast once."""
    rows, n = len(x), weight.shape[0] // 2
    y = torch.empty(rows, n, device=x.device, dtype=x.dtype)
    blocks = cdiv(rows, _ROWS)
    tiles = blocks * cdiv(n, _OUTPUTS)
    _gated_gemm_kernel[(min(tiles, MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x, [_ROWS, _COLUMNS]),
        TensorDescriptor.from_tensor(weight, [_OUTPUTS, _COLUMNS]),
        TensorDescriptor.from_tensor(y, [_ROWS, _OUTPUTS]),
        n, blocks, tiles, K=x.shape[1], BM=_ROWS, BN=_OUTPUTS, BK=_COLUMNS, num_warps=_WARPS, num_stages=_STAGES,
        **pdl(x),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["blocks", "tiles"])
def _gated_gemm_kernel(
    x, weight, y, N, blocks, tiles, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tiles that share rows of the weight are neighbours. Rows past the last are zeros, and are not stored."""
    wait_for_previous_kernel(PDL)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile % blocks * BM, tile // blocks * BN
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            a = x.load([row, k])
            gate = tl.dot(a, weight.load([column, k]).T, gate, input_precision="ieee")
            up = tl.dot(a, weight.load([N + column, k]).T, up, input_precision="ieee")
        y.store([row, column], (gate * tl.sigmoid(gate) * up).to(y.dtype))
