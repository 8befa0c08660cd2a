"""Tables of rotary position embeddings: cos and sin of all positions, for each layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.elementwise.rope import rope_table
from specbatch.models.config import ModelConfig
from specbatch.models.rope import Rope
from specbatch.models.weight_reader import Tables


def layer_tables(config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> list[Tables]:
    """`rope_tables` of each layer; layers with the same rope share theirs."""
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    shared = {rope: rope_tables(config, positions, dtype, device, rope) for rope in dict.fromkeys(ropes)}
    return [shared[rope] for rope in ropes]


def rope_tables(
    config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device, rope: Rope | None = None
) -> Tables:
    """cos and sin [positions, head_dim] in the model's dtype. Channels beyond rotary_dim are neither rotated nor
    scaled."""
    rope = rope or config.rope
    turning, still = rope.inverse_frequencies(), (config.head_dim - rope.rotary_dim) // 2
    scale = F.pad(torch.full_like(turning, rope.attention_factor), (0, still), value=1.0)
    cos, sin = rope_table(F.pad(turning, (0, still)), positions, scale)
    return cos.to(device=device, dtype=dtype), sin.to(device=device, dtype=dtype)
