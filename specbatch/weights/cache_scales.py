"""Reads and checks the scales of an FP8 KV cache that a checkpoint brings, per tensor or per KV head."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from specbatch.errors import SpecbatchError, refuse
from specbatch.models.config import ModelConfig
from specbatch.models.formats.cache_scales import Part, scale_of, zero_points
from specbatch.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

_WITHOUT = "use kv_dtype='model', whose cache needs none"


class CacheScales(NamedTuple):
    """Scales of keys and values, float32 [layers with a KV cache, KV heads] each, on the CPU; see `stored_kv`."""

    k: torch.Tensor
    v: torch.Tensor


def read_cache_scales(checkpoint: Checkpoint) -> CacheScales | None:
    """The scales in the files of a checkpoint; None if there are none. Raises SpecbatchError for some that cannot be
    used: of another shape, not finite or not positive, or missing for a layer.

    With latent attention the scale of keys is that of all that is cached, as in vLLM 0.33."""
    import torch

    config, names = checkpoint.config, _names(checkpoint.config, checkpoint.cache)
    if not names:
        return None
    for zero_point in zero_points(checkpoint.cache):
        if (value := checkpoint.tensor(zero_point).float()).any():
            largest = value.flatten()[value.abs().argmax()]
            raise _refuse(zero_point, f"a zero point is {largest:g}, and a KV cache has none; it must be 0")
    rows: dict[Part, list[torch.Tensor]] = {"k": [], "v": []}
    for (place, layer), part in product(enumerate(config.kv_layers), rows):
        if (name := names.get((place, "k" if config.has_latents else part))) is None:
            kind = {"k": "keys", "v": "values"}[part]
            works = f"there is no scale of the {kind} of layer {layer} beside it; every layer needs both"
            raise _refuse(min(names.values()), works)
        rows[part].append(_checked(name, checkpoint.tensor(name), config.num_kv_heads))
    return CacheScales(*map(torch.stack, rows.values()))


def _names(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, Part], str]:
    """(place among the layers with a cache, "k" or "v") -> the name of its scale. One for both gives way to others."""
    places = {part: place for place, layer in enumerate(config.kv_layers) for part in config.published(layer)}
    names: dict[tuple[int, Part], str] = {}
    for name in sorted(found, key=lambda name: (not name.endswith(".kv_scale"), name)):
        at = scale_of(name)
        if at is not None and at[0] in places:
            names |= {(places[at[0]], part): name for part in at[1]}
    return names


def _checked(name: str, scale: torch.Tensor, heads: int) -> torch.Tensor:
    """float32 [heads]."""
    import torch

    values = scale.float().flatten()
    if len(values) != 1 and (len(values) != heads or scale.shape[0] != heads):
        shapes = f"one scale, or {heads} for the KV heads"
        raise _refuse(name, f"its shape is {list(scale.shape)}; it must hold {shapes}")
    for value in values.tolist():
        if not torch.finfo(torch.float32).tiny <= value < float("inf"):  # GPUs take smaller ones for 0
            raise _refuse(name, f"its value is {value:g}; scales of a KV cache are positive and finite")
    return values.expand(heads)


def _refuse(name: str, why: str) -> SpecbatchError:
    return refuse("model", name, f"{why}; {_WITHOUT}")
