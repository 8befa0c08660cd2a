"""Computes how a model's keys and values are stored in an FP8 KV cache, for checkpoints that bring no scales.

e4m3 is a floating-point format with a relative error of 1/16 at most from 2^-6 to 448, so scales matter only to heads
that leave this range. What costs accuracy are keys with a large constant part, such as those of Qwen2.5, whose bias is
up to 100 times as large as the rest: rounding takes a share of the whole, and what differs from key to key is lost in
it. A constant that is subtracted from all keys changes all scores of a query alike, and softmax does not see it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.qkv import split_latent_ref, split_qkv_ref
from specbatch.kernels.attention.queries import LatentLayout, QKVLayout
from specbatch.kernels.common.block_sizes import FP8_MAX
from specbatch.kernels.elementwise.rope import apply_rope_ref
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.models.rope import Rope
from specbatch.models.rope_tables import rope_tables

TOKENS = 512
_STRIDE = 2654435761  # prime, so that the tokens are spread over any vocabulary
_POSITIONS = 32768  # over which offsets are means, at most
_ROOM = 2.0  # other texts may have larger keys and values than the tokens here


class CacheCalibration(NamedTuple):
    """k_scales, v_scales: float32 [layers with a cache, KV heads]; k_offsets: by layer, see `QKVLayout`."""

    k_scales: torch.Tensor
    v_scales: torch.Tensor
    k_offsets: dict[int, torch.Tensor]


@torch.inference_mode()
def calibrate_cache(model: Decoder) -> CacheCalibration:
    """Runs one pass over fixed tokens: the result depends on the model alone, and on no setting of an engine."""
    view, positions = model.with_positions(TOKENS, model.config), torch.arange(TOKENS, device=model.device)
    context = _Statistics(view, 1, TOKENS)
    view.forward(positions * _STRIDE % model.config.vocab_size, positions, context)
    k, v = (torch.stack(largest) for largest in zip(*(context.largest[i] for i in range(model.kv_layers)), strict=True))
    return CacheCalibration(_scale(k), _scale(v), context.offsets)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """Powers of two, which change no bit of the significands: FP8 holds `largest`, and _ROOM times as much."""
    return (largest * _ROOM / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().exp2()


class _Statistics(UncachedContext):
    """Notes the largest absolute keys and values per head, and offsets of keys, by layer."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        super().__init__(model, rows, length)
        self.largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.offsets: dict[int, torch.Tensor] = {}
        self._config, self._device = model.config, model.device
        self._means: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        if isinstance(heads, LatentLayout):
            _, k, v = split_latent_ref(qkv, heads, positions)
            self.largest[layer] = _largest(k), _largest(v)
        elif not heads.shared:
            qk, v = split_qkv_ref(qkv, heads)
            k = qk[:, heads.count :].float()
            offset = k.new_zeros(k.shape[1:])
            if heads.sinks is None:  # a sink has a score of its own
                # Keys' mean over tokens, and then over positions, of channels that rope turns little.
                self.offsets[layer] = offset = apply_rope_ref(k.mean(0), *self._mean_tables(layer))
            turned = k.unflatten(-1, (2, -1)).norm(dim=-2)  # of each pair that rope turns, at any position
            self.largest[layer] = _largest(turned) + _largest(offset[None]), _largest(v)
        return super().attend(layer, qkv, heads, positions)

    def _mean_tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, dim] of rope, averaged over positions; 0 for pairs of channels that turn by more than a
        radian on the way. In those a constant would be further from some keys than 0 is: with them, the divergence of
        SmolLM2-135M was 3 times as large as without offsets."""
        config, count = self._config, min(self._config.max_position, _POSITIONS)
        rope = config.rope_of(config.kv_layers[layer])
        if rope not in self._means:
            angles = F.pad(rope.inverse_frequencies() * count, (0, (config.head_dim - rope.rotary_dim) // 2))
            slow = (angles <= 1).repeat(2).to(self._device)
            cos, sin = rope_tables(config, count, torch.float32, self._device, rope)
            self._means[rope] = cos.mean(0, keepdim=True) * slow, sin.mean(0, keepdim=True) * slow
        return self._means[rope]


def _largest(x: torch.Tensor) -> torch.Tensor:
    """[T, kv, dim] -> float32 [kv]."""
    return x.float().abs().amax((0, 2))
