"""Scales of inputs that ModelOpt stores beside a weight (`pre_quant_scale`, of AWQ), where no norm could take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from specbatch.models.formats.format import Format, Source, check_scales

if TYPE_CHECKING:
    import torch

INPUT_SCALES = ".pre_quant_scale"  # [in]: the layer multiplies its inputs by it
F = TypeVar("F", bound=Format)


def with_input_scales(form: F, names: Iterable[str]) -> F:
    """A format, whose weights with such scales among the tensors `names` are `Format.irregular`."""
    stems = (name.removesuffix(INPUT_SCALES) for name in names if name.endswith(INPUT_SCALES))
    return replace(form, irregular=form.irregular | {f"{stem}.weight" for stem in stems})


def at_inputs(weight: torch.Tensor, name: str, source: Source) -> torch.Tensor:
    """weight float32 [out, in], dequantized, times its scales."""
    scales = source.whole(name.removesuffix(".weight") + INPUT_SCALES).float()
    check_scales(scales, name, source)
    return weight * scales
