"""Tensors of GGUF files as those of a checkpoint: dequantized, in its order, with stacked experts.

A file has the experts of a layer in `ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps`, [experts, out, in] each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbatch.errors import refuse
from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.models.formats import mxfp4
from specbatch.models.gguf_layout import has_mxfp4
from specbatch.weights.gguf_file import layout_of

if TYPE_CHECKING:
    import torch

    from specbatch.weights.gguf_file import GgufFile
    from specbatch.weights.gguf_header import GgufTensor

_MXFP4_BYTES = 17  # of a block: the scale, then values j and j + 16 in byte j


class Stored(NamedTuple):
    """A tensor of the converted checkpoint: its shape, the tensors of the file it consists of, and what makes it."""

    shape: tuple[int, ...]
    parts: tuple[GgufTensor, ...]
    make: Callable[..., torch.Tensor]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(part.size for part in self.parts)

    def tensor(self) -> torch.Tensor:
        return self.make(*self.parts)


def join_experts(file: GgufFile, tensors: dict[str, GgufTensor]) -> dict[str, Stored]:
    """The tensors of a file by their checkpoint names, with gate and up of all experts of a layer as one."""
    found: dict[str, Stored] = {}
    is_interleaved = layout_of(file).interleaved_experts
    quantized = is_interleaved and has_mxfp4(file)
    for name, tensor in tensors.items():
        stem, is_expert, part = name.partition(".experts.")
        projection, _, kind = part.partition(".")
        if name.endswith(".conv.conv.weight"):  # LFM2: files have no dimension of size 1
            found[name] = Stored((tensor.shape[0], 1, *tensor.shape[1:]), (tensor,), _with_second)
        elif not is_expert:
            found[name] = Stored(tensor.shape, (tensor,), dequantize_tensor)
        elif projection != "up_proj":  # it comes with the gate
            parts: tuple[GgufTensor, ...] = (tensor,)
            target = f"{stem}.experts.{projection}"
            if projection == "gate_proj":
                up = tensors.get(f"{stem}.experts.up_proj.{kind}")
                if up is None or up.shape != tensor.shape:
                    raise file.refusal(f"tensor {tensor.name} has no ffn_up_exps of its shape, {list(tensor.shape)}")
                parts, target = (tensor, up), f"{stem}.experts.gate_up_proj"
            if len(tensor.shape) != (3 if kind == "weight" else 2):
                raise file.refusal(f"tensor {tensor.name} is {list(tensor.shape)}; experts are stacks of matrices")
            count, rows = tensor.shape[0], len(parts) * tensor.shape[1]
            if kind == "bias":
                found[f"{target}_bias"] = Stored((count, rows), parts, _interleaved)
            elif quantized:
                groups = count, rows, tensor.shape[2] // MX_BLOCK
                found[target + mxfp4.BLOCKS] = Stored((*groups, MX_BLOCK // 2), parts, _blocks)
                found[target + mxfp4.SCALES] = Stored(groups, parts, _scales)
            elif is_interleaved:
                found[target] = Stored((count, tensor.shape[2], rows), parts, _transposed)
            else:
                found[target] = Stored((count, rows, tensor.shape[2]), parts, _stacked)
    return found


def _with_second(tensor: GgufTensor) -> torch.Tensor:
    """[n, k] -> [n, 1, k]."""
    return dequantize_tensor(tensor)[:, None]


def _stacked(*parts: GgufTensor) -> torch.Tensor:
    """All rows of the first part before those of the second."""
    import torch

    return torch.cat([dequantize_tensor(part) for part in parts], 1)


def _interleaved(*parts: GgufTensor) -> torch.Tensor:
    """gpt-oss: interleaved rows of the parts, of [experts, rows, ...]."""
    import torch

    return torch.stack([dequantize_tensor(part) for part in parts], 2).flatten(1, 2)


def _transposed(*parts: GgufTensor) -> torch.Tensor:
    return _interleaved(*parts).transpose(1, 2).contiguous()


def _mx_blocks(*parts: GgufTensor) -> np.ndarray[Any, Any]:
    """Bytes of the parts' blocks, [experts, rows, blocks, 17], rows interleaved."""
    blocks = [part.data.reshape(*part.data.shape[:-1], -1, _MXFP4_BYTES) for part in parts]
    return np.stack(blocks, 2).reshape(blocks[0].shape[0], -1, *blocks[0].shape[2:])


def _blocks(*parts: GgufTensor) -> torch.Tensor:
    """With values 2 j and 2 j + 1 in byte j."""
    import torch

    packed = _mx_blocks(*parts)[..., 1:]
    values = np.concatenate([packed & 15, packed >> 4], -1)
    return torch.from_numpy(values[..., ::2] | values[..., 1::2] << 4)


def _scales(*parts: GgufTensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(_mx_blocks(*parts)[..., 0]))


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
                if tensor.scale is not None:
                    values = values * tensor.scale.reshape(-1, *[1] * (values.ndim - 1))
        except NotImplementedError:
            raise refuse(tensor.name, kind.name, "use a file in Q4_K_M, Q8_0, F16 or another") from None
    if permuted_heads is not None:
        values = unpermute(values, permuted_heads)
    stored = torch.from_numpy(np.array(values))  # a copy, as the memory-mapped file must not be written to
    return stored.view(torch.bfloat16) if kind == GGMLQuantizationType.BF16 else stored
