"""GEMMs on a GPU whose order of additions does not depend on the number of rows: the counterpart of `fixed_rows`.

An element is one sum over the columns from the first to the last, which a tensor core adds 16 at a time. On Hopper the
bits of such a sum are the same for every instruction, `mma.sync` or `wgmma` of any width, with the weight as either
operand, and so for every tile. Products of float32 are added one by one in any tile, without TF32. What changes bits is
dividing the columns among programs whose sums are added later (split-K, stream-K). So no kernel here divides them:

* up to 16 rows: the kernels of `skinny_gemm_triton`, undivided;
* more rows: the library (cuBLAS), which is fastest. It may divide columns, and by which rule is not documented. So the
  first GEMM of each shape and number of rows is compared with the kernel below, bit for bit;
* `fixed_order_gemm_triton` where the library's bits differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.kernels.common.rehearsal import is_rehearsing
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.gemm.dense import skinny_gemm_triton
from specbatch.kernels.gemm.dense.skinny_gemm_configs import undivided_tile_for
from specbatch.kernels.gemm.deterministic.fixed_order_gemm_triton import fixed_order_gemm

_MOST = 512  # rows: of more, only multiples of _STEP are compared, as the sizes of recorded passes are
_STEP = 64
_LEAST_WEIGHTS = 1 << 20  # of a matrix for which the library is worth a comparison
_ROWS = 64  # that the comparison computes at once
# Results that it compares. Where the library divides the columns, one in some 10,000 differs after rounding.
RESULTS = 1 << 21
agreed: dict[tuple[object, ...], bool] = {}


def takes(weight: torch.Tensor) -> bool:
    """Can it multiply by this weight? Bulk copies need rows of multiples of 16 bytes."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] * weight.element_size() % 16 == 0


def fixed_order_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight.T + bias + residual for weight [N, K], bias [N], residual [T, N] -> [T, N]. Summed in float32,
    and rounded before the residual is added, too, as cuBLAS does. The memory of `out` or `residual` may hold the
    result."""
    n, k = weight.shape
    if is_few(x, weight):
        tile = undivided_tile_for(n, k, gated=False, item=weight.element_size())
        return skinny_gemm_triton.skinny_linear(x, weight, bias, residual=residual, rounded=True, tile=tile)
    if _library_agrees(x, weight, bias, residual, out):
        return library(x, weight, bias, residual, out)
    return fixed_order_gemm(x, weight, bias, residual, out)


def fixed_order_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(g) * u for [g | u] = x @ weight.T + bias, rounded to the type of x: x [T, K], weight [2 I, K], bias [2 I] ->
    [T, I]."""
    n, k = weight.shape
    if not is_few(x, weight):
        return silu_and_mul(fixed_order_linear(x, weight, bias))
    tile = undivided_tile_for(n // 2, k, gated=True, item=weight.element_size())
    return skinny_gemm_triton.skinny_gated(x, weight, bias, rounded=True, tile=tile)


def is_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Is x multiplied by the kernels of `skinny_gemm_triton`? Of more rows the library's bits are tried first."""
    return len(x) <= skinny_gemm_triton.FEW and skinny_gemm_triton.is_skinny(len(x), weight)


def library(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if residual is not None:
        return residual.addmm_(x, weight.t())
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _library_agrees(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> bool:
    """Whether the library gives the bits of `fixed_order_gemm` for these shapes; found by trying once."""
    rows = len(x)
    is_tried = weight.numel() >= _LEAST_WEIGHTS and (rows <= _MOST or rows % _STEP == 0)
    is_packed = all(part is None or (part.is_contiguous() and part.data_ptr() % 16 == 0) for part in (x, residual, out))
    if not x.is_cuda or not is_tried or not is_packed or (bias is not None and residual is not None):
        return False
    key = rows, weight.shape, x.dtype, x.device, bias is None, residual is None
    found = agreed.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing() or is_rehearsing():
            return False
        found = agreed[key] = compare(x, weight, bias, residual)
    return found


def compare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    other: Callable[..., torch.Tensor] | None = None,
    results: int = RESULTS,
) -> bool:
    """Whether `other`, which is `library` if None, and `fixed_order_gemm` give equal results for random tensors like x
    and residual, `results` at least."""
    other = other or library
    generator = torch.Generator(x.device).manual_seed(0)
    is_equal = torch.ones((), dtype=torch.bool, device=x.device)
    for _ in range(max(1, results // (len(x) * len(weight)))):
        x = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        if residual is not None:
            residual = torch.randn(residual.shape, generator=generator, device=x.device, dtype=x.dtype)
        expected = torch.cat(
            [
                fixed_order_gemm(part, weight, bias, None if residual is None else residual[start : start + _ROWS])
                for start, part in zip(range(0, len(x), _ROWS), x.split(_ROWS), strict=True)
            ]
        )
        is_equal &= (other(x, weight, bias, residual, None) == expected).all() & expected.any()
    return bool(is_equal)
