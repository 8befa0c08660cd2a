"""GEMMs on a CPU in blocks of a fixed number of rows: the bits of a row depend on that row and the weight alone.

Libraries (oneDNN, MKL, torch's own loops) choose kernels, and with them the order of additions, by the number of rows.
So the number of rows never changes here: 16, the last block filled up with zeros, or 256 where those give the same
bits. That a row's bits do not depend on its place in the block either is no promise of any library: it was found wrong
for float32 rows of 33 elements, which are not aligned alike. So the first GEMM of a shape in a process checks both, and
where a row's place matters, rows are multiplied one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROWS = 16
MANY = 256

Gemm = Callable[[torch.Tensor], torch.Tensor]
_block_sizes: dict[tuple[object, ...], tuple[int, ...]] = {}


def gemm_in_blocks(gemm: Gemm, x: torch.Tensor, shape: tuple[object, ...]) -> torch.Tensor:
    """gemm(x) of x [T, K] -> [T, N], block by block. shape: of the weight, and whatever else decides which kernel a
    library takes besides rows, type and threads."""
    key = (*shape, x.dtype, torch.get_num_threads())
    sizes = _block_sizes.get(key)
    if sizes is None:
        sizes = _block_sizes[key] = find_block_sizes(gemm, x.shape[1], x.dtype)
    rows, done, outputs = len(x), 0, []
    for size in sizes:
        while rows - done >= size:
            outputs.append(gemm(x[done : done + size].clone()))  # a copy: rows are aligned alike
            done += size
    if done < rows:
        outputs.append(gemm(F.pad(x[done:], (0, 0, 0, sizes[-1] - (rows - done))))[: rows - done])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else gemm(x)


def linear_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] @ weight.T + bias for weight [N, K]."""
    return gemm_in_blocks(lambda rows: F.linear(rows, weight, bias), x, (*weight.shape, bias is None))


def find_block_sizes(gemm: Gemm, width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of rows, descending, in which the GEMM of x [T, width] may be computed: (256, 16), (16,) or (1,)."""
    x = torch.randn(MANY, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    block = gemm(x[:ROWS].clone())
    if not torch.equal(gemm(x[:ROWS].roll(1, 0)), block.roll(1, 0)):  # each row one place further
        return (1,)
    blocks = torch.cat([gemm(part.clone()) for part in x.split(ROWS)])
    return (MANY, ROWS) if torch.equal(gemm(x), blocks) else (ROWS,)
