"""Differentiable building blocks of draft heads as torch modules. Parameters are named as in checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.kernels.elementwise.rope import apply_rope_ref, rope_table
from specbatch.models.config import ModelConfig


class Norm(nn.Module):
    """RMSNorm that multiplies by `offset` + weight: 1 for the norms of Qwen3-Next, which are centred on zero."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self._eps = eps
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self._offset
        return F.rms_norm(x.float(), weight.shape, weight, self._eps).to(x.dtype)


class Rotary:
    """Rope for positions 0..length-1. Rotates x [..., L, heads, head_dim], or its first channels if the config has a
    smaller rotary_dim, to positions int64 [..., L]."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        tables = rope_table(config.rope.inverse_frequencies(), length, config.rope.attention_factor)
        self._cos, self._sin = (table.to(device) for table in tables)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)
        turning, still = x.float().tensor_split([cos.shape[-1]], -1)
        return torch.cat([apply_rope_ref(turning, cos, sin), still], -1).to(x.dtype)


class Attention(nn.Module):
    """The projections of an attention layer. Attention itself is computed by the training method.

    config: sizes, biases aside; inputs: hidden states side by side that q, k and v read; gated: q_proj also gives a
    gate for each channel of its output, query and gate alternating head by head (Qwen3-Next).
    """

    def __init__(self, config: ModelConfig, inputs: int = 1, *, gated: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        width, dim = inputs * config.hidden_size, config.head_dim
        self._split = (config.num_kv_heads, config.num_heads // config.num_kv_heads, dim)
        self._gated = gated
        self.q_proj = nn.Linear(width, (1 + gated) * config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = Norm(dim, config.rms_norm_eps, offset)
            self.k_norm = Norm(dim, config.rms_norm_eps, offset)
        self._normed = config.qk_norm

    def queries(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [..., L, inputs * H] -> rotated queries [..., L, kv heads, group, head_dim], and gates of that size."""
        parts = self.q_proj(x).unflatten(-1, (-1, (1 + self._gated) * self._split[2])).split(self._split[2], -1)
        q = self.q_norm(parts[0]) if self._normed else parts[0]
        q = rotary(q, positions).unflatten(-2, self._split[:2])
        return q, parts[1].unflatten(-2, self._split[:2]) if self._gated else None

    def keys_values(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values: each [..., L, kv heads, head_dim]."""
        k, v = (proj(x).unflatten(-1, (-1, self._split[2])) for proj in (self.k_proj, self.v_proj))
        return rotary(self.k_norm(k) if self._normed else k, positions), v

    def out(self, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """attended [..., L, kv heads, group, head_dim] -> [..., L, H]."""
        if gate is not None:
            attended = attended * gate.sigmoid()
        out: torch.Tensor = self.o_proj(attended.flatten(-3))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def initialize(module: nn.Module, seed: int) -> None:
    """Initialize matrices from a normal distribution with variance 1 / inputs, by the seed alone; norms are
    unchanged."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
