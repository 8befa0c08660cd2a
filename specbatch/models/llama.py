"""Llama, SmolLM2, Qwen2/2.5 and Qwen3 (dense): pre-norm decoders that differ in biases and q/k norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.context import Context
from specbatch.kernels.heads import Heads
from specbatch.kernels.linear import Linear, Norm
from specbatch.kernels.norm import rms_norm
from specbatch.kernels.rope import rope_table
from specbatch.models.config import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One decoder layer. q, k, v and gate, up are one matrix each: fewer, larger products."""

    attention_norm: Norm
    qkv: Linear
    heads: Heads
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Features(NamedTuple):
    """What a forward pass over T tokens leaves for others.

    last [T, hidden_size], or [rows, hidden_size] where some were asked for: hidden states after the final norm; aux
    [T, n * hidden_size]: the residual stream behind each of the model's n auxiliary layers, side by side, or None
    without any.
    """

    last: torch.Tensor
    aux: torch.Tensor | None


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
                attention_norm=Norm(fetch(f"{stem}.input_layernorm.weight"), eps),
                qkv=project(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                heads=Heads(
                    count=config.num_heads,
                    kv=config.num_kv_heads,
                    dim=config.head_dim,
                    q_norm=fetch(f"{attention}.q_norm.weight") if config.qk_norm else None,
                    k_norm=fetch(f"{attention}.k_norm.weight") if config.qk_norm else None,
                    eps=eps,
                    cos=cos,
                    sin=sin,
                ),
                out=project(attention, ("o_proj",), config.o_bias),
                mlp_norm=Norm(fetch(f"{stem}.post_attention_layernorm.weight"), eps),
                gate_up=project(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
                down=project(mlp, ("down_proj",), config.mlp_bias),
            )

        self.config = config
        self.aux: tuple[int, ...] = ()
        self.dtype = dtype
        self.device = device
        eps = config.rms_norm_eps
        cos, sin = rope_tables(config, max_positions, dtype, device)
        self.embedding = fetch("model.embed_tokens.weight")
        with ThreadPoolExecutor(max_workers=8) as pool:  # reading and converting overlap; nothing is held twice
            self.layers: tuple[Layer, ...] = tuple(pool.map(layer, range(config.num_layers)))
        self.norm = Norm(fetch("model.norm.weight"), eps)
        self.head = Linear(self.embedding if config.tie_embeddings else fetch("lm_head.weight"))

    def with_positions(self, count: int) -> Llama:
        """The same model for positions 0..count-1, sharing every weight."""
        view = self._view()
        cos, sin = rope_tables(self.config, count, self.dtype, self.device)
        view.layers = tuple(replace(layer, heads=replace(layer.heads, cos=cos, sin=sin)) for layer in self.layers)
        return view

    def without(self, skipped: Iterable[int]) -> Llama:
        """The same model with layers left out, sharing every weight: a draft that costs no memory but its KV."""
        gone = set(skipped)
        view = self._view()
        view.layers = tuple(layer for index, layer in enumerate(self.layers) if index not in gone)
        return view

    def with_aux(self, layers: tuple[int, ...]) -> Llama:
        """The same model, whose forward pass also hands over the residual stream behind these layers."""
        view = self._view()
        view.aux = layers
        return view

    def _view(self) -> Llama:
        view = object.__new__(Llama)
        view.__dict__.update(self.__dict__)
        return view

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: Context, rows: torch.Tensor | None = None
    ) -> Features:
        """tokens and positions int64 [T]. rows int64 [n]: the tokens whose last features are wanted, in their order;
        None is all. With auxiliary layers all are."""
        assert rows is None or not self.aux, "auxiliary features are those of all tokens"
        x, qkv = self.enter(tokens)
        aux = x.new_empty(len(x), len(self.aux) * x.shape[1]) if self.aux else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers[:-1]):
            x, qkv = self.advance(index, x, context.attend(index, qkv, layer.heads, positions), aux=aux)
        attended = context.attend(last, qkv, self.layers[last].heads, positions)
        return Features(self.finish(x, attended, rows, aux), aux)

    # A forward pass in pieces, cut where layers attend: what lies between needs no context.

    def enter(self, tokens: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [T] -> residual stream [T, hidden_size] and the first layer's qkv (in `out`, if given)."""
        x = F.embedding(tokens, self.embedding)
        first = self.layers[0]
        return x, first.qkv(x, norm=first.attention_norm, out=out)

    def advance(
        self,
        index: int,
        x: torch.Tensor,
        attended: torch.Tensor,
        out: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From layer `index`'s attention [T, heads * head_dim] to the residual stream behind it and the next layer's
        qkv (in `out`, if given). `aux` gets its share of the features."""
        x = self._leave(index, x, attended, aux)
        following = self.layers[index + 1]
        return x, following.qkv(x, norm=following.attention_norm, out=out)

    def finish(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        rows: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From the last layer's attention to the hidden states after the final norm, of `rows` only if given."""
        if rows is not None:
            x, attended = x[rows], attended[rows]
        if not len(x):
            return x
        return rms_norm(self._leave(len(self.layers) - 1, x, attended, aux), *self.norm)

    def _leave(self, index: int, x: torch.Tensor, attended: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The residual stream behind layer `index`."""
        layer = self.layers[index]
        x = layer.out(attended, residual=x)
        x = layer.down(layer.gate_up.gated(x, layer.mlp_norm), residual=x)
        if aux is not None and index in self.aux:
            aux.unflatten(1, (-1, x.shape[1]))[:, self.aux.index(index)].copy_(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] -> [T, vocab_size], in the model's type."""
        return self.head(hidden)


def rope_tables(
    config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim] in the model's type; pairs of channels beyond rotary_dim stand still."""
    rope = config.rope
    still = (config.head_dim - rope.rotary_dim) // 2
    assert not still or rope.attention_factor == 1, "channels that stand still are not scaled"
    cos, sin = rope_table(F.pad(rope.inverse_frequencies(), (0, still)), positions, rope.attention_factor)
    return cos.to(device=device, dtype=dtype), sin.to(device=device, dtype=dtype)


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Most that one token's activations take at a time in a forward pass: the residual stream twice, its norm, and
    the MLP's products or the attention's."""
    mlp = 3 * config.intermediate_size
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (3 * config.hidden_size + max(mlp, attention)) * dtype.itemsize
