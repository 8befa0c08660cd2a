"""Forward pass over whole sequences without a cache, for training and diagnostics of drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.core.attention_metadata import RecurrentOp
from specbatch.kernels.attention.paged_attention import sink_attention
from specbatch.kernels.attention.qkv import split_latent_ref, split_qkv_rope_ref
from specbatch.kernels.attention.queries import LatentLayout, QKVLayout
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.decoder import Decoder
from specbatch.models.layers.blocks import Attention


class UncachedContext:
    """Attention and recurrence over `rows` sequences of `length` tokens each. Attention is causal, so padding at the
    end of a sequence does not affect its tokens."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        self._rows = rows
        # Keys and values that later layers share, by place.
        mixers = zip(model.places, (layer.mixer for layer in model.layers), strict=True)
        shared = {place for place, mixer in mixers if isinstance(mixer, Attention) and mixer.heads.shared}
        self._shared: dict[int, tuple[torch.Tensor, ...]] = dict.fromkeys(shared, ())
        device, slots = model.device, list(range(1, rows + 1))
        table = torch.zeros(rows + 1, 1, dtype=torch.int64, device=device)
        self._spans = RaggedBatch([0] * rows, [length] * rows, slots, table, length)
        # All sequences start from a zero state, so all layers share the memory of one.
        types = state_types(model.dtype, "fp32")
        [self._state] = RecurrentStates(model.config.state_shapes, 1, rows + 1, 1, types, device).layers

    def attend(self, layer: int, qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor) -> torch.Tensor:
        scale = None
        if isinstance(heads, LatentLayout):
            q, key, latent = split_latent_ref(qkv, heads, positions)
            parts, scale = (q, torch.cat([latent, key], -1), latent), heads.scale
        else:
            parts = split_qkv_rope_ref(qkv, heads, positions)
        q, k, v = (part.unflatten(0, (self._rows, -1)).transpose(1, 2) for part in parts)
        if heads.shared:
            k, v = self._shared[layer]
        elif layer in self._shared:
            self._shared[layer] = k, v
        mask, length = None, q.shape[2]
        if heads.window is not None or heads.sinks is not None:
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - (heads.window or length))
            )
        if heads.sinks is None:
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        else:
            assert mask is not None
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
            attended = sink_attention(q, k, v, bias, heads.sinks[:, None])
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    def recur(self, layer: int, projected: torch.Tensor, mixer: RecurrentOp) -> torch.Tensor:
        return mixer.prompt(projected, self._state, self._spans)
