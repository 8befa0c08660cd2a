"""Quantized matrices of GGUF files as a `GroupedWeight`: values, scales and offsets without loss.

A row is blocks of 32 values, or of 256 in groups of 32 or 16. Their layout is that of ggml
(https://github.com/ggml-org/ggml, `src/ggml-common.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from specbatch.kernels.gemm.quantized.grouped import GroupedWeight, shortest
from specbatch.weights.gguf_tensors import unpermute

if TYPE_CHECKING:
    from specbatch.weights.gguf_header import GgufTensor

Array = np.ndarray[Any, Any]
Groups = tuple[Array, Array, Array]  # of blocks [n, bytes]: values uint8 or int8 [n, m], scales and offsets [n, groups]


def has_groups(tensor: GgufTensor) -> bool:
    """Whether `grouped_weight` reads it."""
    return tensor.kind.name in _READERS and len(tensor.shape) == 2


def grouped_bytes(tensor: GgufTensor) -> int:
    """Bytes that a CPU keeps of it: values of 4 or 8 bits; of each group one or two numbers of 16 or 32 bits."""
    kind = tensor.kind.name
    scale = (1 if kind in ("Q8_0", "NVFP4") else 2) * (4 if kind.endswith("_K") or tensor.scale is not None else 2)
    group = 16 if kind in ("Q6_K", "NVFP4") else 32
    return tensor.size // (2 if kind.startswith("Q4") else 1) + tensor.size // group * scale


def grouped_weight(tensor: GgufTensor, permuted_heads: int | None = None) -> GroupedWeight:
    """A matrix [out, in] that has groups, with rows in the order of the checkpoint."""
    import torch
    from gguf.constants import GGML_QUANT_SIZES

    read = _READERS[tensor.kind.name]
    rows = tensor.data if permuted_heads is None else unpermute(tensor.data, permuted_heads)
    with np.errstate(all="ignore"):  # of scales that are not finite
        found = read(rows.reshape(-1, GGML_QUANT_SIZES[tensor.kind][1]))
    values, scales, offsets = (torch.from_numpy(part.reshape(len(rows), -1)) for part in found)
    if tensor.scale is not None:
        scales *= torch.from_numpy(tensor.scale.copy())
    return GroupedWeight(values.view(torch.int8), *shortest(scales, offsets))


def _floats(blocks: Array, first: int) -> Array:
    """float32 [n, 1] of the float16 at byte `first`."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)


def _halves(packed: Array, run: int) -> Array:
    """[n, m] -> the low and the high 4 bits [n, 2 m]: those of a run of bytes one after the other."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], 2).reshape(len(packed), -1)


def _q4(blocks: Array, has_minimum: bool) -> Groups:
    scales = _floats(blocks, 0)
    return _halves(blocks[:, 2 + 2 * has_minimum :], 16), scales, _floats(blocks, 2) if has_minimum else scales * -8


def _q5(blocks: Array, has_minimum: bool) -> Groups:
    scales, first = _floats(blocks, 0), 2 + 2 * has_minimum
    high = np.unpackbits(blocks[:, first : first + 4], axis=-1, bitorder="little") << 4
    values = _halves(blocks[:, first + 4 :], 16) | high
    return values, scales, _floats(blocks, 2) if has_minimum else scales * -16


def _q8_0(blocks: Array) -> Groups:
    scales = _floats(blocks, 0)
    return np.ascontiguousarray(blocks[:, 2:]), scales, np.zeros_like(scales)


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets of Q4_K and Q5_K."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _floats(blocks, 0) * scales.astype(np.float32), -_floats(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: Array) -> Groups:
    return _halves(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Array) -> Groups:
    high = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # [n, 32, groups]
    return _halves(blocks[:, 48:], 32) | high.swapaxes(1, 2).reshape(len(blocks), -1) << 4, *_k_scales(blocks)


def _q6_k(blocks: Array) -> Groups:
    low = _halves(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = _floats(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return low | pairs.reshape(len(blocks), -1) << 4, scales, scales * -32


def _nvfp4(blocks: Array) -> Groups:
    """Groups of 16 in pairs of 4-bit floats; values are twice these, scales half of those in the file."""
    from gguf.quants import NVFP4

    scales: Array = NVFP4.ue4m3_to_fp32(blocks[:, :4]).astype(np.float32)
    values = np.array(NVFP4.kvalues, np.int8)[_halves(blocks[:, 4:], 8)]
    return values, scales, np.zeros_like(scales)


_READERS: dict[str, Callable[[Array], Groups]] = {
    "Q4_0": lambda blocks: _q4(blocks, False),
    "Q4_1": lambda blocks: _q4(blocks, True),
    "Q5_0": lambda blocks: _q5(blocks, False),
    "Q5_1": lambda blocks: _q5(blocks, True),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "NVFP4": _nvfp4,
}
