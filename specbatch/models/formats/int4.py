"""INT4 checkpoints: AWQ, GPTQ, compressed-tensors and ModelOpt; most have eight values in an int32.

* awq: `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]
* gptq, gptq_v2: `qweight` [in / 8, out], `qzeros` [groups, out / 8], `scales` [groups, out]
* pack-quantized (compressed-tensors): `weight_packed` [out, in / 8], `weight_scale` [out, groups]; `weight_zero_point`
  [out / 8, groups] where the zero points are not all 8
* int-quantized (compressed-tensors, of FP8 activations): `weight` int8 [out, in], `weight_scale` [out, groups];
  `weight_zero_point` int8, as many; both less 8
* modelopt (its AWQ): `weight` uint8 [out / 2, in], outputs 2 j and 2 j + 1 in the low and high bits of row j, less 8 in
  two's complement; `weight_scale` [out, groups]; `pre_quant_scale` [in] of layers after no norm

The first of eight values is in the lowest bits, but AWQ (AutoAWQ's "gemm") has the outputs 0, 2, 4, 6, 1, 3, 5, 7 in
this order. GPTQ stores zero points less 1, "gptq_v2" as they are (AutoGPTQ, GPTQModel).

GPTQ with `desc_act` quantizes inputs in the order of their importance: `g_idx` has the group of each. Where this is not
the order of the inputs, and with `pre_quant_scale`, weights are dequantized at load (`Format.irregular`).

Symmetric weights have the zero point 8. GPTQ's `qzeros` then hold 7, 8 or another number, or are missing, and do not
count, as in kernels of the Marlin kind; they must all be the same (`qzeros`). Scales may be negative: half of those of
auto-round's symmetric weights are.

AWQ: casper-hansen/AutoAWQ. GPTQ: AutoGPTQ, ModelCloud/GPTQModel. auto-round: intel/auto-round, whose files hold tensors
of GPTQ or AWQ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specbatch.errors import refuse
from specbatch.files.config_values import flag_of, table_of
from specbatch.kernels.common.block_sizes import INT4_GROUPS
from specbatch.models.formats.format import (
    FLOATS,
    Format,
    Group,
    Shape,
    Shapes,
    Source,
    check_scales,
    in_order,
    is_zero_bias,
)
from specbatch.models.formats.input_scales import INPUT_SCALES, at_inputs, with_input_scales
from specbatch.models.formats.qzeros import QZEROS, check_symmetric, plus_ones
from specbatch.models.formats.settings import activations_of, expect, packing_of, unquantized

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.int4 import Int4Weight
    from specbatch.kernels.gemm.quantized.weight import Weight

Packing = Literal["awq", "gptq", "gptq_v2", "pack-quantized", "int-quantized", "modelopt"]
_GPTQ: tuple[Packing, ...] = ("gptq", "gptq_v2")
_NAMED: tuple[Packing, ...] = ("pack-quantized", "int-quantized", "modelopt")  # whose scales are `weight_scale`
PACKED = 8  # values in an int32
WHOLE = -1  # a group of all inputs
_WHOLE_STEP = 128  # the groups that such a group becomes here
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs are: the inverse of 0, 2, 4, 6, 1, 3, 5, 7
_ZERO = 8  # of symmetric weights
_PARTS = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx", INPUT_SCALES),
)
_ORDERS = (".g_idx", ".weight_g_idx")  # the group of each input
_UNUSED = (*_ORDERS, ".weight_shape")
_ZERO_POINTS = (QZEROS, ".weight_zero_point")
_WORDS = (".qweight", ".weight_packed", *_ZERO_POINTS)  # how names of packed values end
_RMS = 4.64  # of whole numbers from -8 to 7
_EIGHTS = -0x77777778  # eight times the zero point 8, in an int32


@dataclass(frozen=True)
class Int4Weights(Format):
    """group: inputs that share a scale, or `WHOLE`; has_zeros: whether stored zero points count, else all are 8;
    has_order: whether each weight must have its `g_idx`."""

    name: ClassVar[str] = "INT4"
    file_types: ClassVar[tuple[str, ...]] = ("I8", "U8")
    dequantizes_for_gemm: ClassVar[bool] = True
    has_stacks: ClassVar[bool] = False

    packing: Packing = "awq"
    group: int = 128
    has_zeros: bool = True
    has_order: bool = False

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {}  # see `gptq`

    @classmethod
    def groups(cls) -> dict[tuple[str, int], Callable[[Group], Format]]:
        return {("int", 4): _packed}

    @classmethod
    def algorithms(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {"W4A16_AWQ": _modelopt}

    @property
    def input_step(self) -> int:
        return _WHOLE_STEP if self.group == WHOLE else self.group

    def parts(self, name: str, shape: Shape) -> Shapes:
        if len(shape) > 2:
            raise refuse("quantization_config", self.name, f"{name} stacks matrices, which have no INT4 packing")
        stem, (out, inner) = name.removesuffix(".weight"), shape
        if inner % self.input_step:
            works = f"{name} has {inner} inputs; they must be a multiple of {self.input_step}"
            raise refuse("quantization_config.group_size", self.group, works)
        if out % PACKED:
            raise refuse(name, list(shape), f"INT4 weights need a multiple of {PACKED} outputs")
        groups = 1 if self.group == WHOLE else inner // self.group
        found: Shapes
        if self.packing in _NAMED:
            is_packed, rows = self.packing == "pack-quantized", out // 2 if self.packing == "modelopt" else out
            found = {f"{name}_packed": (out, inner // PACKED)} if is_packed else {name: (rows, inner)}
            found |= {f"{name}_zero_point": (out // PACKED if is_packed else out, groups)} if self.has_zeros else {}
            found |= {stem + INPUT_SCALES: (inner,)} if name in self.irregular else {}
            return found | {f"{name}_scale": (out, groups)}
        packed = (inner, out // PACKED) if self.packing == "awq" else (inner // PACKED, out)
        found = {f"{stem}.qweight": packed, f"{stem}.scales": (groups, out)}
        found |= {f"{stem}.qzeros": (groups, out // PACKED)} if self.has_zeros else {}
        return found | ({f"{stem}.g_idx": (inner,)} if name in self.irregular else {})

    def weight_of(self, name: str) -> str | None:
        for part in _PARTS:
            if name.endswith(part):
                return name.removesuffix(part) + ".weight"
        return None

    @classmethod
    def types_of_part(cls, name: str) -> tuple[tuple[str, ...], str] | None:
        if not name.endswith((*_WORDS, *_UNUSED)):
            return None
        return ("I32",) if name.endswith(_WORDS) else ("I32", "I64"), "packed INT4 values are in I32"

    def types_of(self, name: str) -> tuple[str, ...] | None:
        if name.endswith(".weight"):
            return ("U8",) if self.packing == "modelopt" else ("I8",)
        if name.endswith(_ORDERS):
            return "I32", "I64"
        if self.packing == "int-quantized" and name.endswith(_ZERO_POINTS):
            return ("I8",)
        return ("I32",) if name.endswith(_WORDS) else FLOATS

    def is_unused(self, name: str) -> bool:
        is_unread = self.packing in _GPTQ and not self.has_zeros and name.endswith(QZEROS)
        is_unread |= name.endswith(_UNUSED) and self.weight_of(name) not in self.irregular
        return super().is_unused(name) or is_unread

    def fit(self, found: Shapes) -> Self:
        """AWQ's zero points count wherever the files have some: gptqmodel and auto-round write them (8) with
        `zero_point: false`, too."""
        has_zeros = self.has_zeros or (self.packing == "awq" and any(name.endswith(QZEROS) for name in found))
        return replace(super().fit(found), has_zeros=has_zeros)

    def is_idle(self, name: str, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> bool:
        return is_zero_bias(name, found, tensor)

    def for_values(self, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> Self:
        """An order that is missing or has another shape than the inputs counts as irregular: that has it checked."""
        if self.packing in _GPTQ and not self.has_zeros:
            check_symmetric(found, tensor)
        stems = (name.removesuffix(".qweight") for name in found if name.endswith(".qweight") and self.has_order)
        irregular = [f"{stem}.weight" for stem in stems if f"{stem}.g_idx" not in found]
        for name in found:
            if not name.endswith(_ORDERS):
                continue
            groups = tensor(name).flatten()
            size = len(groups) if self.group == WHOLE else self.group
            weight = str(self.weight_of(name))
            packed = found.get(weight.removesuffix(".weight") + ".qweight", (0,))
            is_regular = in_order(groups, size)
            if self.packing not in _GPTQ and not is_regular:
                raise refuse("model", name, f"{self.packing} weights must have their groups in the order of the inputs")
            if not is_regular or (self.packing in _GPTQ and found[name] != (PACKED * packed[0],)):
                irregular.append(weight)
        return with_input_scales(replace(self, irregular=frozenset(irregular)), found)

    def load(self, name: str, shape: Shape, source: Source) -> Weight:
        """It is unpacked whole, also where this rank has a part."""
        from specbatch.kernels.gemm.quantized.int4 import Int4Weight, pack_int4
        from specbatch.kernels.gemm.quantized.weight import Weight

        if name in self.irregular:
            dense = self._dequantized(name, source).to(source.dtype)
            return Weight(dense if dense.shape == shape else source.cut(name, [(dense, shape)])[0])
        whole = self.weight(name, source)
        if self.runs_on(source.device):
            whole = self._with_short_scales(name, whole, source)
        check_scales(whole.scales, name, source, signed=True)
        if whole.shape == shape:
            return whole
        assert source.ranks is not None, f"{name} is {whole.shape}, not {shape}"
        if shape[1] % self.input_step:
            works = f"{name} has {shape[1]} inputs on each, and its groups of {self.input_step} are not cut; use fewer"
            raise refuse("tensor_parallel", source.ranks.size, works)
        groups = (shape[0], shape[1] // self.input_step)
        values = (whole.unpacked(), shape)
        parts = source.cut(name, [values, (whole.scales, groups), (whole.zeros, groups)])
        return Int4Weight(pack_int4(parts[0]), *parts[1:])

    def _with_short_scales(self, name: str, weight: Int4Weight, source: Source) -> Int4Weight:
        """The weight with scales of 16 bits."""
        from specbatch.kernels.gemm.quantized.int4 import LARGEST_INT4_SCALE, with_short_scales

        short = with_short_scales(weight, source.dtype)
        stored, found = weight.scales.double(), short.scales.double()
        largest = stored.abs().max()
        if largest.isfinite() and not (found.abs() < LARGEST_INT4_SCALE).all():
            works = f"its largest scale is {largest:g}; on a GPU use less than {LARGEST_INT4_SCALE}"
            raise source.unusable(name, works)
        if (found - stored).abs().max() > largest / 128:
            raise source.unusable(name, f"its scales, up to {largest:g}, are too small for float16; use bfloat16")
        return short

    def weight(self, name: str, source: Source) -> Int4Weight:
        """The whole weight `name` [out, in] from the tensors on disk, on their device."""
        from specbatch.kernels.gemm.quantized.int4 import Int4Weight, pack_int4

        values, scales, zeros = self._stored(name, source)
        if self.group == WHOLE:
            count = values.shape[1] // _WHOLE_STEP
            scales, zeros = scales.expand(-1, count), zeros.expand(-1, count)
        return Int4Weight(pack_int4(values), scales.contiguous(), zeros.contiguous())

    def _dequantized(self, name: str, source: Source) -> torch.Tensor:
        """A whole weight whose inputs are in another order or have scales, float32 [out, in]."""
        import torch

        values, scales, zeros = self._stored(name, source)
        groups = torch.arange(values.shape[1], device=values.device) * scales.shape[1] // values.shape[1]
        if self.packing in _GPTQ:
            groups = source.whole(name.removesuffix(".weight") + _ORDERS[0]).long()
            count = scales.shape[1]
            is_known = groups.ge(0).logical_and(groups < count).all()
            if not is_known or not groups.bincount().eq(len(groups) // count).all():
                works = f"its g_idx must have {len(groups) // count} inputs in each of the groups 0 to {count - 1}"
                raise source.unusable(name, works)
        check_scales(scales, name, source, signed=True)
        found = (values.float() - zeros.float()[:, groups]) * scales.float()[:, groups]
        return found if self.packing in _GPTQ else at_inputs(found, name, source)

    def _stored(self, name: str, source: Source) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [out, in], scales and zero points [out, groups] of a whole weight."""
        import torch

        def plus_8(name: str) -> torch.Tensor:
            """int8 from -8 to 7 -> uint8 from 0 to 15."""
            stored = read(name)
            if (stored < -8).any() or (stored > 7).any():
                raise source.unusable(name, "it has values of more than 4 bits, and the config has num_bits 4")
            return (stored + 8).byte()

        read, stem = source.whole, name.removesuffix(".weight")
        if self.packing == "pack-quantized":
            values, scales = _unpacked(read(f"{name}_packed")), read(f"{name}_scale")
            zeros = _unpacked(read(f"{name}_zero_point").t()).t() if self.has_zeros else None
        elif self.packing in _NAMED:
            scales = read(f"{name}_scale")
            if self.packing == "modelopt":
                pairs = read(name)
                values = torch.stack([pairs & 15, pairs >> 4], 1).flatten(0, 1) ^ 8
            else:
                values = plus_8(name)
            zeros = plus_8(f"{name}_zero_point") if self.has_zeros else None
        else:
            packed, scales = read(f"{stem}.qweight"), read(f"{stem}.scales").t()
            is_awq, zeros = self.packing == "awq", None
            values = _ordered(_unpacked(packed)).t() if is_awq else _unpacked(packed.t())
            if self.has_zeros:
                stored = read(stem + QZEROS)
                zeros = _unpacked(plus_ones(stored, 4) if self.packing == "gptq" else stored)
                zeros = (_ordered(zeros) if is_awq else zeros).t()
        if zeros is None:
            zeros = torch.full_like(scales, _ZERO, dtype=torch.uint8)
        return values, scales, zeros

    def memory(self, shape: Shape) -> int:
        values = math.prod(shape)
        return values // 2 + 4 * values // self.input_step  # a word of a scale and a zero point

    @property
    def kind(self) -> str:
        return f"INT4 in groups of {self.input_step}"

    def group_memory(self, shape: Shape) -> int | None:
        values = math.prod(shape)
        return values // 2 + 8 * values // self.input_step  # scale and offset, in float16 where that is exact

    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        if name.endswith(".weight") or (name.endswith(_ZERO_POINTS) and self.packing == "int-quantized"):
            least, most = (-8, 8) if name.endswith(".weight") else (0, 1)
            kind, least, most = (torch.uint8, 0, 256) if self.packing == "modelopt" else (torch.int8, least, most)
            numbers = torch.empty(shape, dtype=kind, device=generator.device)
            return numbers.random_(least, most, generator=generator)
        if name.endswith(_ZERO_POINTS):
            return torch.full(shape, _EIGHTS, dtype=torch.int32, device=generator.device)
        if name.endswith(_WORDS):
            words = torch.empty(shape, dtype=torch.int32, device=generator.device)
            return words.random_(-(1 << 31), 1 << 31, generator=generator)
        scales = torch.empty(shape, device=generator.device).uniform_(0.8, 1.2, generator=generator)
        return scales.mul_(1 / (_RMS * math.sqrt(inputs))).half()

    def random_item(self, name: str) -> int:
        is_byte = name.endswith(".weight") or (self.packing == "int-quantized" and name.endswith(_ZERO_POINTS))
        return 1 if is_byte else 4 if name.endswith(_WORDS) else 2


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> the eight values in each, the lowest bits first: uint8 [n, 8 m]."""
    import torch

    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Values in AWQ's order in that of the outputs, [n, out]."""
    ordered: torch.Tensor = values.unflatten(1, (-1, PACKED))[..., list(_AWQ_PLACES)]
    return ordered.flatten(1)


def _packed(group: Group) -> Format:
    """A group of compressed-tensors."""
    weights, inside = table_of(group.settings, "weights"), f"{group.where}.weights"
    packing: Packing = "int-quantized" if packing_of(group, *_NAMED[:2]) == "int-quantized" else "pack-quantized"
    expect(weights, "strategy", "group", "channel", where=inside)
    expect(weights, "actorder", "static", "weight", False, default=False, where=inside)
    if weights["strategy"] == "group":
        expect(weights, "group_size", *INT4_GROUPS, WHOLE, where=inside)
    size = WHOLE if weights["strategy"] == "channel" else int(weights["group_size"])
    has_zeros = not flag_of(weights, "symmetric", True)
    inputs = activations_of(group)
    return Int4Weights(*group.modules, inputs=inputs, packing=packing, group=size, has_zeros=has_zeros)


def _modelopt(found: dict[str, Any]) -> Format:
    expect(found, "has_zero_point", False, default=False)
    expect(found, "group_size", *INT4_GROUPS, default=128)
    size = int(found.get("group_size") or 128)
    plain = unquantized(found, "ignore", "exclude_modules")
    return Int4Weights(*plain, packing="modelopt", group=size, has_zeros=False)
