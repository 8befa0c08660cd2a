"""Building blocks of decoder layers: mixers (attention, recurrence), MLPs, and the reader of their weights.

All blocks are pre-norm and add to the residual stream. A mixer consists of an input projection, attention or recurrence
over the context, and an output projection. Piecewise CUDA graphs of prompt passes are split at the middle part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specbatch.core.attention_metadata import AttentionContext, RecurrentOp
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.elementwise.activations import mul_sigmoid
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.fp8_linear import linear
from specbatch.kernels.gemm.quantized.int4 import LARGEST_INT4_SCALE, pack_int4, unpack_int4, with_short_scales
from specbatch.kernels.gemm.quantized.mxfp4 import LARGEST_PACKED_SCALE, LARGEST_SCALE, keeps_mxfp4, pack_mxfp4
from specbatch.kernels.gemm.quantized.weight import (
    MX_BLOCK,
    SCALE_BLOCK,
    Weight,
    concat_outputs,
    contains_nan,
    keeps_quantized,
    quantize_fp8_weight,
)
from specbatch.models.config import ModelConfig
from specbatch.models.formats import mxfp4
from specbatch.models.formats.fp8 import SCALES, FP8Weights
from specbatch.models.formats.int4 import Int4Weights
from specbatch.models.formats.quantization import PLAIN
from specbatch.models.layers.partition import RowParallelLinear, VocabParallelHead, part_of, vocabulary_part

Tensors = dict[str, torch.Tensor]
Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin [positions, head_dim] of rope


class Mixer(Protocol):
    """A block that combines tokens. norm: applied to its input; width: columns of the projected input; mixed: columns
    of the attention or recurrence output."""

    @property
    def norm(self) -> Norm: ...

    @property
    def width(self) -> int: ...

    @property
    def mixed(self) -> int: ...

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Residual stream x [T, hidden_size] -> [T, width], in `out` if given."""
        ...

    def mix(
        self, context: AttentionContext, place: int, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[T, width] -> [T, mixed]. place: index of the layer among those of its kind."""
        ...

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Project the output and add it to the residual stream x, possibly in place."""
        ...


class Recurrent(Mixer, RecurrentOp, Protocol):
    """A mixer with a state of fixed size in place of keys and values."""


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output to the residual stream x, possibly in place."""
        ...


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. q, k and v are one matrix; gate: sigmoid(gate(norm(x))) multiplies the attention
    output."""

    norm: Norm
    qkv: Linear
    heads: QKVLayout
    out: Linear
    gate: Linear | None = None

    @property
    def width(self) -> int:
        return self.qkv.shape[0]

    @property
    def mixed(self) -> int:
        return self.heads.count * self.heads.dim

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.qkv(x, norm=self.norm, out=out)

    def mix(
        self, context: AttentionContext, place: int, projected: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return context.attend(place, projected, self.heads, positions)

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            mixed = mul_sigmoid(mixed, self.gate(x, norm=self.norm))
        return self.out(mixed, residual=x)


@dataclass(frozen=True)
class SwiGlu:
    """A dense MLP: down(silu(gate) * up). gate and up are one matrix."""

    norm: Norm
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.after_gate(self.gate_up, x, self.norm, residual=x)


@dataclass(frozen=True)
class Layer:
    """A mixer and the MLPs after it: usually one; in Nemotron-H none or several."""

    mixer: Mixer
    mlps: tuple[Mlp, ...]

    def leave(self, x: torch.Tensor, mixed: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """From the attention or recurrence output to the residual stream after the layer. inputs: see `streams`."""
        [x] = deque(self.streams(x, mixed, inputs), maxlen=1)
        return x

    def streams(
        self, x: torch.Tensor, mixed: torch.Tensor, inputs: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """The residual stream after the mixer, then after each MLP; each may overwrite the one before. inputs
        [T, ModelConfig.layer_inputs]: what layers get beside it, in models that have such inputs."""
        yield (x := self.mixer.leave(x, mixed))
        for mlp in self.mlps:
            yield (x := mlp(x))


class Reader:
    """Reads a checkpoint's tensors, converts them to a dtype and device, and builds linear layers, norms and the like
    of them. Several threads may read at the same time.

    A family names each tensor with its shape where it reads it, and nowhere else: `decoder.weight_shapes` runs the same
    code with a `ShapeRecorder` to get the shapes of a checkpoint, which are checked before anything is read.

    Quantized weights consist of several tensors (see `models.formats`). dequantized: names of those that could not stay
    quantized, because they are part of a matrix whose blocks of scales they would cut, or of a mixture in INT4.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        of_draft: bool = False,
        ranks: Communicator | None = None,
        to_fp8: bool = False,
    ) -> None:
        """config: of one rank, if the model is divided over `ranks`. of_draft: refuse every tensor with values that are
        not finite, because verification would hide the error. With a target the logits show it, except for small
        tensors that select or weight (decays, routing of experts) and for FP8 weights; these are always checked.
        to_fp8: quantize to FP8 those matrices that the files have unquantized (see `in_fp8`)."""
        self.config = config
        self.ranks = ranks
        self.to_fp8 = to_fp8
        self._of_draft = of_draft
        self.dequantized: set[str] = set()
        self._row_parallel: set[str] = set()  # weights of which this rank has some of the input columns
        self.read = read
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in `dtype` (default: the reader's). shape: see the class; tensors that are not part of a family's
        layers need none."""
        return self._upcast(name, shape, dtype or self._dtype)

    def weight(self, rows: Mapping[str, int], columns: int) -> Weight:
        """Matrices (name -> number of rows) concatenated by rows: quantized if all of them are and the device supports
        it, else in the reader's dtype."""
        parts = [self._stored(name, (count, columns)) for name, count in rows.items()]
        whole = concat_outputs(parts)
        whole = whole or Weight(torch.cat([self.dequantize(*part) for part in zip(rows, parts, strict=True)]))
        return self.in_fp8(whole, *rows)

    def fused(self, name: str, *shape: int) -> Weight:
        """A stack of matrices that is one tensor."""
        return self.in_fp8(self._stored(name, shape), name)

    def stack(self, groups: Sequence[Mapping[str, int]], columns: int) -> Weight:
        """A stack of such matrices, one per group of names, as `weight` reads them."""
        parts = [self.weight(rows, columns) for rows in groups]
        scales = [part.scales for part in parts if part.scales is not None]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        if len(zeros) == len(parts):
            return Weight(torch.stack([part.values for part in parts]), torch.stack(scales), torch.stack(zeros))
        if len(scales) == len(parts) and not zeros:
            values = torch.stack([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
            return Weight(values, torch.stack(scales))
        names = ("; ".join(group) for group in groups)
        return Weight(torch.stack([self.dequantize(*part) for part in zip(names, parts, strict=True)]))

    def mxfp4(self, name: str, count: int, outputs: int, inputs: int) -> Weight:
        """A stack of MXFP4 matrices [count, outputs, inputs], not yet `kept`."""
        groups = count, outputs, inputs // MX_BLOCK
        values = pack_mxfp4(self._part(name + mxfp4.BLOCKS, (*groups, MX_BLOCK // 2)).to(self._device))
        scales = self._checked(name + mxfp4.SCALES, self._part(name + mxfp4.SCALES, groups).to(self._device))
        if keeps_mxfp4(self._device) and (largest := int(scales.max())) > LARGEST_PACKED_SCALE:
            works = f"its scales go up to 2^{largest - 127}; MXFP4 GEMMs take at most 2; use device='cpu'"
            raise refuse("draft" if self._of_draft else "model", name, works)
        return Weight(values, scales)

    def kept(self, weight: Weight) -> Weight:
        """A weight as it stays in memory: MXFP4 if the device supports it, else dequantized."""
        if not weight.is_mxfp4 or keeps_mxfp4(self._device):
            return weight
        return Weight(weight.dequantize(self._dtype))

    def norm(self, stem: str, size: int | None = None) -> Norm:
        """size: the hidden size if None."""
        return Norm(self(f"{stem}.weight", size or self.config.hidden_size), self.config.rms_norm_eps)

    def linear(self, rows: Mapping[str, int], columns: int, bias: bool = False) -> Linear:
        """Linear layers (name without ".weight" -> number of outputs) as one."""
        weight = self.weight({f"{stem}.weight": count for stem, count in rows.items()}, columns)
        biases = [self(f"{stem}.bias", count) for stem, count in rows.items() if bias]
        if self.ranks is None or not any(f"{stem}.weight" in self._row_parallel for stem in rows):
            return linear(weight, torch.cat(biases) if biases else None)
        once = torch.cat(biases) if biases and self.ranks.rank == 0 else None
        return RowParallelLinear(linear(weight, once), self.ranks)

    def output_matrix(self, name: str, tokens: int, tied: torch.Tensor | None = None) -> Linear:
        """An output matrix [tokens, hidden_size], divided over the ranks by rows. tied: the embedding, if it is one."""
        if self.ranks is None:
            return Linear(self(name, tokens, self.config.hidden_size) if tied is None else tied)
        part = vocabulary_part(self.read(name) if tied is None else tied, self.ranks.rank, self.ranks.size)
        weight = self._checked(name, part.to(device=self._device, dtype=self._dtype))
        return VocabParallelHead(Linear(weight), tokens, self.ranks)

    def head(self, matrix: Linear) -> Linear:
        """An output matrix of a draft, which may be the target's: a copy in FP8 if this reader quantizes."""
        if not self.to_fp8:
            return matrix
        if isinstance(matrix, VocabParallelHead):
            assert self.ranks is not None
            return VocabParallelHead(self.head(matrix.part), matrix.shape[0], self.ranks)
        return linear(self.in_fp8(Weight(matrix.weight)), matrix.bias)

    def in_fp8(self, weight: Weight, *names: str) -> Weight:
        """A weight, made of the tensors `names`, in FP8 if this reader quantizes and none of them is stored quantized;
        dequantized again if the device has no FP8 GEMM."""
        if (
            not self.to_fp8
            or weight.scales is not None
            or any(self.config.is_stored_quantized(name, weight.shape) for name in names)
        ):
            return weight
        found = quantize_fp8_weight(weight.values)
        return found if keeps_quantized(self._device) else Weight(found.dequantize(self._dtype))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A tensor on the device: quantized if it is stored so and the device supports it, else in the reader's
        dtype."""
        if self._is_int4(name, shape):
            found = self._int4(name, shape)
            return found if keeps_quantized(self._device) else Weight(found.dequantize(self._dtype))
        values = self._part(name, shape).to(self._device)
        if values.dtype != torch.float8_e4m3fn:
            return Weight(self._checked(name, values.to(self._dtype)))
        stored = self.config.quantization
        assert isinstance(stored, FP8Weights), f"{name} is FP8, and the config does not say how it is scaled"
        scales = self._part(name, shape, stored).to(device=self._device, dtype=torch.float32)
        self._checked(name, values)
        found = Weight(values, self._checked(name + stored.suffix, scales))
        return found if keeps_quantized(self._device) else Weight(found.dequantize(self._dtype))

    def _is_int4(self, name: str, shape: tuple[int, ...]) -> bool:
        if len(shape) != 2 or not isinstance(self.config.quantization, Int4Weights):
            return False
        module, stored = name.removesuffix(".weight"), self.config.quantization
        return module not in self.config.unquantized_ends and stored.is_quantized(name, shape)

    def _int4(self, name: str, shape: tuple[int, ...]) -> Weight:
        """This rank's part of an INT4 weight, which is unpacked whole."""
        stored = self.config.quantization
        assert isinstance(stored, Int4Weights)
        whole = stored.weight(name, lambda part: self.read(part).to(self._device))
        if keeps_quantized(self._device):
            whole = self._with_short_scales(name, whole)
        assert whole.scales is not None
        assert whole.zeros is not None
        if not whole.scales.isfinite().all():
            raise self._unusable(name, "its scales hold values that are not finite; the file is damaged")
        if self.ranks is None:
            return whole
        if shape[1] % stored.input_step:
            works = (
                f"{name} has {shape[1]} inputs on each, and its groups of {stored.input_step} are not cut; use fewer"
            )
            raise refuse("tensor_parallel", self.ranks.size, works)
        if whole.shape[1] != shape[1]:
            self._row_parallel.add(name)
        sizes = (shape[1], *[shape[1] // stored.input_step] * 2)  # of the columns of each tensor
        sections, (rank, ranks) = self.config.sections(name), (self.ranks.rank, self.ranks.size)
        tensors = zip((unpack_int4(whole.values), whole.scales, whole.zeros), sizes, strict=True)
        parts = (part_of(one, (shape[0], size), rank, ranks, sections).contiguous() for one, size in tensors)
        return Weight(pack_int4(next(parts)), *parts)

    def _with_short_scales(self, name: str, weight: Weight) -> Weight:
        """An INT4 weight with scales of 16 bits."""
        short = with_short_scales(weight, self._dtype)
        assert weight.scales is not None
        assert short.scales is not None
        stored, found = weight.scales.double(), short.scales.double()
        largest = stored.abs().max()
        if largest.isfinite() and not (found.abs() < LARGEST_INT4_SCALE).all():
            raise self._unusable(name, f"its largest scale is {largest:g}; on a GPU use less than {LARGEST_INT4_SCALE}")
        if (found - stored).abs().max() > largest / 128:
            raise self._unusable(name, f"its scales, up to {largest:g}, are too small for float16; use bfloat16")
        return short

    def _unusable(self, name: str, why: str) -> SpecbatchError:
        return refuse("draft" if self._of_draft else "model", name, why)

    def _upcast(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._is_int4(name, shape):
            return self.dequantize(name, self._stored(name, shape)).to(dtype)
        stored = self._part(name, shape)
        if stored.dtype == torch.float8_e4m3fn:
            return self.dequantize(name, self._stored(name, shape)).to(dtype)
        return self._checked(name, stored.to(device=self._device, dtype=dtype))

    def _part(self, name: str, shape: tuple[int, ...], scales: FP8Weights | None = None) -> torch.Tensor:
        """This rank's part of a tensor, or of its `scales`."""
        stored = self.read(name if scales is None else name + scales.suffix)
        if self.ranks is None or not shape:
            return stored
        sections = self.config.sections(name)
        if scales is not None:
            rows = 1 if scales.per_channel else SCALE_BLOCK
            shape, sections = scales.scale_shape(shape), tuple(size // rows for size in sections)
        elif stored.shape[-1] != shape[-1] and len(shape) > 1:
            self._row_parallel.add(name)
        return part_of(stored, shape, self.ranks.rank, self.ranks.size, sections).contiguous()

    def _checked(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float8_e4m3fn:
            is_finite = not contains_nan(values)
        elif values.dtype == torch.uint8:  # scales of MXFP4
            is_finite = int(values.max()) <= LARGEST_SCALE
        else:
            is_checked = self._of_draft or values.dim() == 1 or name.endswith((*PLAIN, *SCALES))
            is_finite = not is_checked or bool(values.isfinite().all())
        if not is_finite:
            kind = "e8m0" if values.dtype == torch.uint8 else values.dtype
            raise self._unusable(name, f"the tensor holds values that are not finite in {kind}; the file is damaged")
        return values

    def dequantize(self, name: str, weight: Weight) -> torch.Tensor:
        """The weight that was read as `name`, in the reader's dtype."""
        if weight.scales is not None:
            self.dequantized.add(name)
        return weight.dequantize(self._dtype)

    def heads(self, stem: str, tables: Tables, norm: str = "norm", window: int | None = None) -> QKVLayout:
        """norm: how the norms of q and k are named; window: of the layer."""
        config = self.config
        q_norm, k_norm = (
            self(f"{stem}.{part}_{norm}.weight", config.head_dim) if config.qk_norm else None for part in "qk"
        )
        return QKVLayout(
            count=config.num_heads,
            kv=config.num_kv_heads,
            dim=config.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
            cos=tables[0],
            sin=tables[1],
            window=window,
        )
