"""Values of the tensors in a GGUF file: dequantized, and in the order of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.errors import refuse

if TYPE_CHECKING:
    import torch

    from specbatch.weights.gguf_header import GgufTensor


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a q or k matrix [heads * head_dim, in] or bias from interleaved pairs to halves, per head."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dequantize_tensor(tensor: GgufTensor, permuted_heads: int | None = None) -> torch.Tensor:
    """One tensor in its own dtype or dequantized to float32, with rows in the order of the checkpoint."""
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, values = tensor.kind, tensor.data
    if kind == GGMLQuantizationType.BF16:
        values = values.view(np.uint16)  # numpy has no bfloat16; torch reinterprets the bits below
    elif kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        try:
            with np.errstate(all="ignore"):  # of scales that are not finite
                values = dequantize(values, kind)
        except NotImplementedError:
            raise refuse(tensor.name, kind.name, "use a file in Q4_K_M, Q8_0, F16 or another") from None
    if permuted_heads is not None:
        values = unpermute(values, permuted_heads)
    stored = torch.from_numpy(np.array(values))  # a copy, as the memory-mapped file must not be written to
    return stored.view(torch.bfloat16) if kind == GGMLQuantizationType.BF16 else stored
