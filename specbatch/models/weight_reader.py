"""`Reader`: reads a checkpoint's tensors and builds linear layers, norms and matrices of them, on one rank or all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.fp8_linear import quantize_fp8_weight
from specbatch.kernels.gemm.quantized.grouped import GroupedWeight
from specbatch.kernels.gemm.quantized.weight import Weight, concat_outputs, stack_experts
from specbatch.models.config import ModelConfig
from specbatch.models.formats.format import PLAIN, SCALES, Format, Shape
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.formats.grouped import GroupedSource
from specbatch.models.partition import RowParallelLinear, VocabParallelHead, part_of, vocabulary_part

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin [positions, head_dim] of rope


class Reader:
    """Reads a checkpoint's tensors, converts them to a dtype and device, and builds linear layers, norms and the like
    of them. Several threads may read at the same time.

    A family names each tensor with its shape where it reads it, and nowhere else: `weight_shapes` runs the same
    code with a `ShapeRecorder` to get the shapes of a checkpoint, which are checked before anything is read.

    Quantized weights consist of several tensors, which their format loads (`formats.Format`) from the reader, as a
    `formats.Source`. dequantized: names of those that could not stay quantized, because they are part of a matrix whose
    blocks of scales they would cut.
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
        grouped: GroupedSource | None = None,
    ) -> None:
        """config: of one rank, if the model is divided over `ranks`. of_draft: refuse every tensor with values that are
        not finite, because verification would hide the error. With a target the logits show it, except for small
        tensors that select or weight (decays, routing of experts) and for quantized weights; these are always checked.
        to_fp8: quantize to FP8 those matrices that the files have unquantized (see `in_fp8`). grouped: matrices that
        are kept as they are there, and not read as tensors."""
        self.config = config
        self.ranks = ranks
        self.to_fp8 = to_fp8
        self.grouped = grouped
        self.dtype = dtype
        self.device = device
        self.read = read
        self.dequantized: set[str] = set()
        self._of_draft = of_draft
        self._row_parallel: set[str] = set()  # weights of which this rank has some of the input columns

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in `dtype` (default: the reader's). shape: see the class; tensors that are not part of a family's
        layers need none."""
        return self._upcast(name, shape, dtype or self.dtype)

    def weight(self, rows: Mapping[str, int], columns: int) -> Weight:
        """Matrices (name -> number of rows) concatenated by rows: quantized if all of them are and the device supports
        it, else in the reader's dtype."""
        parts = [self._stored(name, (count, columns)) for name, count in rows.items()]
        whole = concat_outputs(parts)
        whole = whole or Weight(torch.cat([self.dequantize(*part) for part in zip(rows, parts, strict=True)]))
        return self.in_fp8(whole, *rows)

    def fused(self, name: str, *shape: int, order: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Weight:
        """A stack of matrices that is one tensor. order: applied to the outputs."""
        return self.in_fp8(self._stored(name, shape, order), name)

    def stack(self, groups: Sequence[Mapping[str, int]], columns: int) -> Weight:
        """A stack of such matrices, one per group of names, as `weight` reads them."""
        parts = [self.weight(rows, columns) for rows in groups]
        whole = stack_experts(parts)
        names = ("; ".join(group) for group in groups)
        return whole or Weight(torch.stack([self.dequantize(*part) for part in zip(names, parts, strict=True)]))

    def norm(self, stem: str, size: int | None = None) -> Norm:
        """size: the hidden size if None."""
        return Norm(self(f"{stem}.weight", size or self.config.hidden_size), self.config.rms_norm_eps)

    def linear(self, rows: Mapping[str, int], columns: int, bias: bool = False) -> Linear:
        """Linear layers (name without ".weight" -> number of outputs) as one."""
        weight = self.weight({f"{stem}.weight": count for stem, count in rows.items()}, columns)
        biases = [self(f"{stem}.bias", count) for stem, count in rows.items() if bias]
        if self.ranks is None or not any(f"{stem}.weight" in self._row_parallel for stem in rows):
            return weight.linear(torch.cat(biases) if biases else None)
        once = torch.cat(biases) if biases and self.ranks.rank == 0 else None
        return RowParallelLinear(weight.linear(once), self.ranks)

    def output_matrix(self, name: str, tokens: int, tied: torch.Tensor | None = None) -> Linear:
        """An output matrix [tokens, hidden_size], divided over the ranks by rows. tied: the embedding, if it is one."""
        if self.grouped is not None:
            kept = self._in_groups(name if tied is None else self.config.names.embedding)
            if kept is not None:
                return kept.linear()
        if self.ranks is None:
            return Linear(self(name, tokens, self.config.hidden_size) if tied is None else tied)
        part = vocabulary_part(self.read(name) if tied is None else tied, self.ranks.rank, self.ranks.size)
        weight = self.finite(name, part.to(device=self.device, dtype=self.dtype))
        return VocabParallelHead(Linear(weight), tokens, self.ranks)

    def head(self, matrix: Linear) -> Linear:
        """An output matrix of a draft, which may be the target's: a copy in FP8 if this reader quantizes."""
        if not self.to_fp8:
            return matrix
        if isinstance(matrix, VocabParallelHead):
            assert self.ranks is not None
            return VocabParallelHead(self.head(matrix.part), matrix.shape[0], self.ranks)
        return self.in_fp8(Weight(matrix.weight)).linear(matrix.bias)

    def in_fp8(self, weight: Weight, *names: str) -> Weight:
        """A weight, made of the tensors `names`, in FP8 if this reader quantizes and none of them is stored quantized;
        dequantized again if the device has no FP8 GEMM."""
        if not self.to_fp8 or weight.is_quantized or any(self._is_quantized(name, weight.shape) for name in names):
            return weight
        found = quantize_fp8_weight(weight.values)
        return found if FP8Weights.runs_on(self.device) else Weight(found.dequantize(self.dtype))

    def dequantize(self, name: str, weight: Weight) -> torch.Tensor:
        """The weight that was read as `name`, in the reader's dtype."""
        if weight.is_quantized:
            self.dequantized.add(name)
        return weight.dequantize(self.dtype)

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

    def finite(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """These values of an unquantized tensor, once they are checked (see `of_draft`)."""
        is_checked = self._of_draft or values.dim() == 1 or name.endswith((*PLAIN, *SCALES))
        self.require_finite(name, not is_checked or bool(values.isfinite().all()), values.dtype)
        return values

    # As a `formats.Source`.

    def whole(self, name: str) -> torch.Tensor:
        return self.read(name).to(self.device)

    def part(self, name: str, shape: Shape, *, of: str | None = None, rows: int = 1) -> torch.Tensor:
        stored = self.read(name)
        if self.ranks is None or not shape:
            return stored.to(self.device)
        if of is None and len(shape) > 1 and stored.shape[-1] != shape[-1]:
            self._row_parallel.add(name)
        sections = tuple(size // rows for size in self.config.sections(of or name))
        return part_of(stored, shape, self.ranks.rank, self.ranks.size, sections).contiguous().to(self.device)

    def cut(self, name: str, tensors: Iterable[tuple[torch.Tensor, Shape]]) -> list[torch.Tensor]:
        assert self.ranks is not None, f"one rank has all of {name}"
        found, sections = [], self.config.sections(name)
        for tensor, shape in tensors:
            if tensor.shape[-1] != shape[-1]:
                self._row_parallel.add(name)
            found.append(part_of(tensor, shape, self.ranks.rank, self.ranks.size, sections).contiguous())
        return found

    def require_finite(self, name: str, finite: bool, kind: object) -> None:
        if not finite:
            raise self.unusable(name, f"the tensor holds values that are not finite in {kind}; the file is damaged")

    def unusable(self, name: str, why: str) -> SpecbatchError:
        return refuse("draft" if self._of_draft else "model", name, why)

    @cached_property
    def _format(self) -> Format | None:
        return self.config.format_except_ends

    def _is_quantized(self, name: str, shape: Shape) -> bool:
        return self._format is not None and self._format.is_quantized(name, shape)

    def _stored(self, name: str, shape: Shape, order: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Weight:
        """A tensor on the device: quantized if it is stored so and the device supports it, else in the reader's
        dtype."""
        if (kept := self._in_groups(name)) is not None:
            return kept if order is None else kept.map_outputs(lambda part, rows: order(part))
        if self._format is None or not self._format.is_quantized(name, shape):
            found = Weight(self._plain(name, shape, self.dtype))
        else:
            found = self._format.load(name, shape, self)
        if order is not None:
            found = found.map_outputs(lambda part, rows: order(part))
        if found.is_quantized and not (self._format and self._format.keeps(name, self.device)):
            grouped = found.grouped() if self._format and self._format.keeps_groups(name, self.device) else None
            return grouped or Weight(found.dequantize(self.dtype))
        return found

    def _in_groups(self, name: str) -> GroupedWeight | None:
        """The matrix `name`, if it is kept in groups."""
        if self.grouped is None or name not in self.grouped.bytes:
            return None
        found = self.grouped(name)
        for part in (found.scales, found.offsets):
            self.require_finite(name, bool(part.isfinite().all()), part.dtype)
        return found

    def _plain(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        values = self.part(name, shape)
        assert values.dtype != torch.float8_e4m3fn, f"{name} is FP8, and the config does not say how it is scaled"
        return self.finite(name, values.to(dtype))

    def _upcast(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if self._is_quantized(name, shape):
            return self.dequantize(name, self._stored(name, shape)).to(dtype)
        return self._plain(name, shape, dtype)
