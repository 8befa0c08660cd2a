"""Llama, SmolLM2, Qwen2/2.5 and Qwen3 (dense): pre-norm decoders that differ in biases and q/k norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specbatch.context import Context
from specbatch.kernels.linear import Linear
from specbatch.kernels.norm import rms_norm_ref
from specbatch.kernels.rope import apply_rope_ref, rope_table
from specbatch.models.config import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One decoder layer. q, k, v and gate, up are one matrix each: fewer, larger products."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """`read` gives a tensor of the checkpoint by its Hugging Face name, on the CPU; several threads call it."""

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        def fetch(*names: str) -> torch.Tensor:
            parts = [read(name).to(device=device, dtype=dtype) for name in names]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        def project(stem: str, parts: tuple[str, ...], bias: bool) -> Linear:
            return Linear(
                fetch(*(f"{stem}.{part}.weight" for part in parts)),
                fetch(*(f"{stem}.{part}.bias" for part in parts)) if bias else None,
            )

        def layer(index: int) -> Layer:
            stem = f"model.layers.{index}"
            attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
            return Layer(
                attention_norm=fetch(f"{stem}.input_layernorm.weight"),
                qkv=project(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                q_norm=fetch(f"{attention}.q_norm.weight") if config.qk_norm else None,
                k_norm=fetch(f"{attention}.k_norm.weight") if config.qk_norm else None,
                out=project(attention, ("o_proj",), config.o_bias),
                mlp_norm=fetch(f"{stem}.post_attention_layernorm.weight"),
                gate_up=project(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
                down=project(mlp, ("down_proj",), config.mlp_bias),
            )

        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = fetch("model.embed_tokens.weight")
        with ThreadPoolExecutor(max_workers=8) as pool:  # reading and converting overlap; nothing is held twice
            self.layers: tuple[Layer, ...] = tuple(pool.map(layer, range(config.num_layers)))
        self.norm = fetch("model.norm.weight")
        self.head = Linear(self.embedding if config.tie_embeddings else fetch("lm_head.weight"))
        self._cos, self._sin = self._rope_tables(max_positions)

    def _rope_tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.config.rope
        cos, sin = rope_table(rope.inverse_frequencies(), positions, rope.attention_factor)
        return cos.to(device=self.device, dtype=self.dtype), sin.to(device=self.device, dtype=self.dtype)

    def with_positions(self, count: int) -> Llama:
        """The same model for positions 0..count-1, sharing every weight."""
        view = self._view()
        view._cos, view._sin = self._rope_tables(count)
        return view

    def without(self, skipped: Iterable[int]) -> Llama:
        """The same model with layers left out, sharing every weight: a draft that costs no memory but its KV."""
        gone = set(skipped)
        view = self._view()
        view.layers = tuple(layer for index, layer in enumerate(self.layers) if index not in gone)
        return view

    def _view(self) -> Llama:
        view = object.__new__(Llama)
        view.__dict__.update(self.__dict__)
        return view

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """tokens and positions int64 [T] -> hidden states after the final norm [T, hidden_size]."""
        config = self.config
        eps = config.rms_norm_eps
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm_ref(x, layer.attention_norm, eps)).view(-1, heads + 2 * kv_heads, dim)
            qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat(
                    [rms_norm_ref(qk[:, :heads], layer.q_norm, eps), rms_norm_ref(qk[:, heads:], layer.k_norm, eps)], 1
                )
            qk = apply_rope_ref(qk, cos, sin)
            x = x + layer.out(context.attend(index, qk[:, :heads], qk[:, heads:], v))
            gate, up = layer.gate_up(rms_norm_ref(x, layer.mlp_norm, eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return rms_norm_ref(x, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size], in the model's type."""
        return self.head(hidden)
