"""FP4 checkpoints: NVFP4 and MXFP4 matrices of compressed-tensors and ModelOpt, 4-bit floats (E2M1) in groups.

* NVFP4: groups of 16 with a scale in e4m3 and one more scale for the whole matrix. compressed-tensors: `weight_packed`,
  `weight_scale`, and `weight_global_scale` [1], by which is divided; ModelOpt: `weight`, `weight_scale`, and
  `weight_scale_2` [], which is multiplied
* MXFP4: groups of 32 with a power of two, its exponent plus 127 in uint8. compressed-tensors: `weight_packed`,
  `weight_scale`; ModelOpt: `weight`, `weight_scale`

Values are uint8 [out, in / 2], value 2 j in the low bits of byte j. Activations are not quantized here, whatever the
checkpoint was made for. Experts of gpt-oss are in `mxfp4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specbatch.files.config_values import table_of
from specbatch.kernels.common.block_sizes import MX_BLOCK, NV_BLOCK
from specbatch.models.formats.format import Format, Group
from specbatch.models.formats.settings import activations_of, expect, packing_of, unquantized
from specbatch.models.formats.whole_numbers import Groups, Packing, Part, WholeNumbers

if TYPE_CHECKING:
    import torch

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # what the bits mean
_SCALE, _DIVISOR, _FACTOR = ".weight_scale", ".weight_global_scale", ".weight_scale_2"
_TYPICAL = 128.0  # scales in e4m3 of random weights
_Tensors = Mapping[str, "torch.Tensor"]


def _values(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] -> twice the values, int8 [out, in]."""
    import torch

    meanings = torch.tensor(_TWICE, dtype=torch.int8, device=packed.device)
    return meanings[torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()]


def _nvfp4(values: str, second: str) -> Callable[[_Tensors], Groups]:
    def read(found: _Tensors) -> Groups:
        whole = found[second].float().view(1, 1)
        scales = found[_SCALE].float()
        return Groups(_values(found[values]), (scales / whole if second == _DIVISOR else scales * whole) / 2)

    return read


def _mxfp4(values: str) -> Callable[[_Tensors], Groups]:
    def read(found: _Tensors) -> Groups:
        import torch

        from specbatch.kernels.gemm.quantized.mxfp4 import LARGEST_SCALE

        exponents = found[_SCALE].int()
        scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents - 128)
        return Groups(_values(found[values]), scales.where(exponents <= LARGEST_SCALE, torch.nan))

    return read


_BITS = Part(("U8",), lambda out, inner, groups: (out, inner // 2))
_E4M3 = Part(("F8_E4M3",), lambda out, inner, groups: (out, groups), lambda size: (0.8 * _TYPICAL, 1.2 * _TYPICAL))
_E8M0 = Part(("U8",), lambda out, inner, groups: (out, groups), lambda size: (_exponent(size), _exponent(size) + 1))


def _exponent(size: float) -> float:
    return 127 + math.log2(2 * size) - 0.5


@dataclass(frozen=True)
class Nvfp4Weights(WholeNumbers):
    name: ClassVar[str] = "NVFP4"
    file_types: ClassVar[tuple[str, ...]] = ("U8",)
    rms: ClassVar[float] = 5.86  # of twice the values
    packings: ClassVar[Mapping[str, Packing]] = {
        "compressed-tensors": Packing(
            {
                ".weight_packed": _BITS,
                _SCALE: _E4M3,
                _DIVISOR: Part(("F32",), lambda *sizes: (1,), lambda size: (_TYPICAL / 2 / size,) * 2),
            },
            _nvfp4(".weight_packed", _DIVISOR),
        ),
        "modelopt": Packing(
            {
                ".weight": _BITS,
                _SCALE: _E4M3,
                _FACTOR: Part(("F32",), lambda *sizes: (), lambda size: (2 * size / _TYPICAL,) * 2),
            },
            _nvfp4(".weight", _FACTOR),
        ),
    }

    packing: str = "compressed-tensors"
    group: int = NV_BLOCK

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {}

    @classmethod
    def groups(cls) -> dict[tuple[str, int], Callable[[Group], Format]]:
        return {("float", 4): _group}

    @classmethod
    def algorithms(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {"NVFP4": _modelopt, "NVFP4_AWQ": _modelopt, "W4A16_NVFP4": _modelopt}


@dataclass(frozen=True)
class Mxfp4Matrices(WholeNumbers):
    name: ClassVar[str] = "MXFP4"
    rms: ClassVar[float] = Nvfp4Weights.rms
    packings: ClassVar[Mapping[str, Packing]] = {
        "compressed-tensors": Packing({".weight_packed": _BITS, _SCALE: _E8M0}, _mxfp4(".weight_packed")),
        "modelopt": Packing({".weight": _BITS, _SCALE: _E8M0}, _mxfp4(".weight")),
    }

    packing: str = "compressed-tensors"
    group: int = MX_BLOCK

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {}

    @classmethod
    def algorithms(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {"MXFP4": _modelopt}


def _group(group: Group) -> Format:
    """A group of compressed-tensors."""
    kinds = {"nvfp4-pack-quantized": Nvfp4Weights, "mxfp4-pack-quantized": Mxfp4Matrices}
    form = kinds[packing_of(group, *kinds)](*group.modules, inputs=activations_of(group))
    weights, where = table_of(group.settings, "weights"), f"{group.where}.weights"
    expect(weights, "group_size", form.group, where=where)
    expect(weights, "symmetric", True, default=True, where=where)
    return form


def _modelopt(found: dict[str, Any]) -> Format:
    algorithm, plain = found["quant_algo"], unquantized(found, "ignore", "exclude_modules")
    form: type[WholeNumbers] = Mxfp4Matrices if algorithm == "MXFP4" else Nvfp4Weights
    inputs = None if algorithm == "W4A16_NVFP4" else form.name
    stored = form(*plain, inputs=inputs, packing="modelopt")
    expect(found, "group_size", stored.group, default=stored.group)
    return stored
