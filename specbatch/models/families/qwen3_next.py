"""Qwen3-Next and Qwen3.5 (dense and mixture of experts): three gated delta nets per layer of gated attention.

All norms except that of the delta net multiply by 1 + weight, which is kept in float32, as bfloat16 cannot represent
it. Rope rotates a quarter of a head's channels: the channels of queries and keys are permuted so that the rope of whole
heads pairs them correctly (`paired`), which does not change their dot products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, names_of, table_of
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.weight import ConcatLinear, Weight, concat_outputs
from specbatch.kernels.recurrent.inputs import DeltaHeads, chunk_bytes
from specbatch.memory.recurrent_state import StateShape
from specbatch.models.config import Ends, ModelConfig, shared_out, without_windows
from specbatch.models.layer_types import attending
from specbatch.models.layers.blocks import Attention, Layer, Mixer, Mlp, SwiGlu
from specbatch.models.layers.moe import Mixture, MoeMlp, Shapes, mixture_of, read_experts, sparse_layers
from specbatch.models.layers.partial_rope import paired, turning, without_factor
from specbatch.models.layers.recurrent import GatedDelta, tap_major, taps_of, window_shapes
from specbatch.models.weight_reader import Reader, Tables

_PARTIAL = 0.25  # share of rotated channels, if a config has none
_INTERVAL = 4
_KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net: heads of keys and of values, their dimensions, taps of the convolution. grouped: a
    file stores q, k, v and z of each key head together, and likewise b and a (Qwen3-Next)."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(ModelConfig):
    """attends: which layers are attention; delta: sizes of the other layers, None if there are none; mixture: None for
    a dense MLP in all layers; sparse: which layers have the mixture; prefix: prefix of the names of layers."""

    module: ClassVar[str] = __name__

    attends: tuple[bool, ...]
    delta: DeltaSizes | None
    mixture: Mixture | None
    sparse: tuple[bool, ...]
    prefix: str = "model."

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Qwen3NextConfig:
        """Read a config.json of either family. Qwen3.5 configs contain the text model as a nested table."""
        text = table_of(config, "text_config") or None
        # The outer value takes precedence: the false of the text part is written by default.
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        inner = config if text is None else text | tied
        kind = str(inner.get("model_type", ""))
        if kind not in _KINDS:
            raise refuse("model_type", kind or None, f"supported are {', '.join(_KINDS)}")
        if not flag_of(inner, "attn_output_gate", True):
            raise refuse("attn_output_gate", False, "these families' attention has an output gate")
        if inner.get("output_gate_type", "silu") not in ("silu", "swish"):
            raise refuse("output_gate_type", inner["output_gate_type"], "the delta net's norm is gated by 'silu' here")
        plain = without_windows(ModelConfig.from_dict(_as_qwen3(inner)), "the attention layers of this family")
        rope = replace(plain.rope, rotary_dim=turning(inner, plain.head_dim, _PARTIAL))
        moe = kind in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
        normalise = kind != "qwen3_next" or flag_of(inner, "norm_topk_prob", True)
        layers = plain.num_layers
        return cls(
            **vars(plain) | {"rope": rope},
            attends=_attends(inner, layers),
            delta=_delta_sizes(inner, grouped=kind == "qwen3_next"),
            mixture=mixture_of(inner, normalise=normalise) if moe else None,
            sparse=sparse_layers(inner, layers) if moe else (False,) * layers,
            prefix="model." if text is None else "model.language_model.",
        )

    def divided(self, ranks: int) -> Self:
        delta, mixture, step = self.delta, self.mixture, self.input_step
        if delta is not None:
            keys = shared_out("linear_num_key_heads", delta.keys, ranks)
            delta = replace(delta, keys=keys, values=delta.values // delta.keys * keys)
        mixture = mixture and mixture.divided(ranks, step)
        return replace(super().divided(ranks), delta=delta, mixture=mixture)

    def sections(self, name: str) -> tuple[int, ...]:
        if name.endswith("experts.gate_up_proj"):
            assert self.mixture is not None
            return (self.mixture.inner,) * 2
        if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            assert self.delta is not None
            keys, values = self.delta.keys * self.delta.key_dim, self.delta.values * self.delta.value_dim
            return keys, keys, values
        return ()

    @property
    def names(self) -> Ends:
        return Ends(f"{self.prefix}embed_tokens.weight", f"{self.prefix}norm")

    @property
    def has_kv(self) -> tuple[bool, ...]:
        return self.attends

    @property
    def mixer_widths(self) -> tuple[int, int]:
        delta, (projected, mixed) = self.delta, super().mixer_widths
        if delta is None:
            return projected, mixed
        inner = delta.values * delta.value_dim
        return max(projected, delta.channels + inner + 2 * delta.values), max(mixed, inner)

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        gate, delta = 2 * self.num_heads * self.head_dim * dtype.itemsize, self.delta
        recurrent = 0
        if delta is not None:  # what the convolution returns, q and k again, normalized, and the matrices of chunks
            columns = delta.channels + 2 * delta.keys * delta.key_dim
            recurrent = columns * dtype.itemsize + delta.values * chunk_bytes(dtype)
        return max(super().mixing_bytes(dtype), gate, recurrent)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        dense = 0 if all(self.sparse) else super().mlp_bytes(dtype)
        return max(dense, self.mixture.token_bytes(self.hidden_size, dtype) if self.mixture else 0)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        delta = self.delta
        if delta is None:
            return ()
        return (
            *window_shapes(delta.channels, delta.taps),
            StateShape("matrix", (delta.values, delta.key_dim, delta.value_dim), "state"),
            # In float32, so that a state does not depend on how many tokens each verify accepted.
            StateShape("k", (delta.keys, delta.key_dim), "float32", pending=True),
            StateShape("u", (delta.values, delta.value_dim), "float32", pending=True),
            StateShape("g", (delta.values,), "float32", pending=True),
        )

    def is_spare(self, name: str) -> bool:
        return name.startswith("model.visual.")

    def fit(self, found: Shapes) -> Self:
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        mixture = self.mixture and replace(self.mixture, fused=fused)
        return replace(super().fit(found), mixture=mixture)

    def may_dequantize(self, name: str, shape: tuple[int, ...]) -> bool:
        """Rows of queries and keys are permuted, and values are in the same matrix."""
        return super().may_dequantize(name, shape) or name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))

    def stacked(self) -> Self:
        return replace(self, mixture=self.mixture and replace(self.mixture, fused=True))


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    config = read.config
    assert isinstance(config, Qwen3NextConfig)
    stem = f"{config.prefix}layers.{index}"
    norm = centred(read, f"{stem}.post_attention_layernorm")
    mixer: Mixer = _attention(read, stem, tables) if config.attends[index] else _delta(read, stem, config)
    mlp: Mlp
    if config.mixture is not None and config.sparse[index]:
        mlp = MoeMlp(norm, read_experts(read, f"{stem}.mlp", config.mixture))
    else:
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = read.linear({f"{stem}.mlp.gate_proj": inner, f"{stem}.mlp.up_proj": inner}, hidden)
        mlp = SwiGlu(norm, gate_up, read.linear({f"{stem}.mlp.down_proj": hidden}, inner))
    return Layer(mixer, (mlp,))


def final_norm(read: Reader, stem: str) -> Norm:
    return centred(read, stem)


def centred(read: Reader, stem: str, size: int | None = None) -> Norm:
    """A norm of this size (None: the hidden size) that multiplies by 1 + weight."""
    weight = read(f"{stem}.weight", size or read.config.hidden_size, dtype=torch.float32)
    return Norm(1 + weight, read.config.rms_norm_eps)


def _attention(read: Reader, stem: str, tables: Tables) -> Attention:
    config, inner = read.config, f"{stem}.self_attn"
    dim, order = config.head_dim, paired(config.head_dim, config.rope.rotary_dim)
    # The permutation of rows does not respect the blocks of scales.
    rows = {"q": 2 * config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    names = [f"{inner}.{part}_proj.weight" for part in rows]
    q, k, v = (read(name, count, config.hidden_size) for name, count in zip(names, rows.values(), strict=True))
    order = order.to(q.device)
    qkv, gates = _ordered(config, (q, k, v), order)
    qkv_bias, gate_bias = None, None
    if config.qkv_bias:
        q, k, v = (read(f"{inner}.{part}_proj.bias", count) for part, count in rows.items())
        qkv_bias, gate_bias = (part[:, 0] for part in _ordered(config, (q[:, None], k[:, None], v[:, None]), order))
    q_norm, k_norm = (centred(read, f"{inner}.{part}_norm", dim).weight[order].contiguous() for part in "qk")
    return Attention(
        norm=centred(read, f"{stem}.input_layernorm"),
        qkv=read.in_fp8(Weight(qkv), *names).linear(qkv_bias),
        heads=QKVLayout(config.num_heads, config.num_kv_heads, dim, q_norm, k_norm, config.rms_norm_eps, *tables),
        out=read.linear({f"{inner}.o_proj": config.hidden_size}, config.num_heads * dim, config.o_bias),
        gate=read.in_fp8(Weight(gates), *names).linear(gate_bias),
    )


def _ordered(
    config: ModelConfig, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of q, k and v as they are stored -> those of q, k and v as one, the channels of q and k in this order; and
    those of the gates, which alternate with the queries per head."""
    q, k, v = qkv
    queries, gates = q.view(config.num_heads, 2, config.head_dim, -1).unbind(1)
    parts = (queries, k.view(config.num_kv_heads, config.head_dim, -1))
    return torch.cat([*(x[:, order].flatten(0, 1) for x in parts), v]), gates.flatten(0, 1).contiguous()


def _delta(read: Reader, stem: str, config: Qwen3NextConfig) -> GatedDelta:
    inner, sizes = f"{stem}.linear_attn", config.delta
    assert sizes is not None
    return GatedDelta(
        norm=centred(read, f"{stem}.input_layernorm"),
        inputs=_delta_inputs(read, inner, sizes),
        out=read.linear({f"{inner}.out_proj": config.hidden_size}, sizes.values * sizes.value_dim),
        conv=tap_major(read(f"{inner}.conv1d.weight", sizes.channels, 1, sizes.taps)),
        heads=DeltaHeads(
            sizes.keys,
            sizes.values,
            sizes.key_dim,
            sizes.value_dim,
            a_log=read(f"{inner}.A_log", sizes.values, dtype=torch.float32),
            dt_bias=read(f"{inner}.dt_bias", sizes.values, dtype=torch.float32),
            norm=read(f"{inner}.norm.weight", sizes.value_dim),
            eps=config.rms_norm_eps,
        ),
    )


def _delta_inputs(read: Reader, stem: str, sizes: DeltaSizes) -> Linear:
    """q, k, v, z, b and a, each of all heads. FP8 files do not quantize b and a."""
    hidden, inner = read.config.hidden_size, sizes.values * sizes.value_dim
    if not sizes.grouped:
        first = read.weight({f"{stem}.in_proj_qkv.weight": sizes.channels, f"{stem}.in_proj_z.weight": inner}, hidden)
        second = read.weight({f"{stem}.in_proj_{part}.weight": sizes.values for part in "ba"}, hidden)
    else:
        share = sizes.values // sizes.keys
        wide = [sizes.key_dim, sizes.key_dim, share * sizes.value_dim, share * sizes.value_dim]
        first = _ungrouped(read, f"{stem}.in_proj_qkvz.weight", sizes.keys, wide)
        second = _ungrouped(read, f"{stem}.in_proj_ba.weight", sizes.keys, [share, share])
    whole = concat_outputs([first, second])
    return ConcatLinear(first.linear(), second.linear()) if whole is None else whole.linear()


def _ungrouped(read: Reader, name: str, groups: int, rows: list[int]) -> Weight:
    """Reorder a matrix whose rows are grouped by key head (per group: parts of `rows` rows) to one part after the
    other."""

    def regrouped(matrix: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([part.flatten(0, 1) for part in matrix.unflatten(0, (groups, -1)).split(sizes, 1)])

    weight = read.weight({name: groups * sum(rows)}, read.config.hidden_size)
    if any(count % weight.block[0] for count in rows):
        weight = Weight(read.dequantize(name, weight))
    return weight.map_outputs(lambda part, step: regrouped(part, [count // step for count in rows]))


def _as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """The config as that of a Qwen3, to read the settings that the families share."""
    plain = {key: value for key, value in without_factor(config).items() if key != "layer_types"}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(plain.get(key), dict):
            plain[key] = {
                name: "default" if (name, value) in (("rope_type", "mrope"), ("type", "mrope")) else value
                for name, value in plain[key].items()
                # For text the three positions of mrope are equal.
                if not name.startswith("mrope")
            }
    # Layers with a mixture have no intermediate_size.
    width = config.get("intermediate_size") or config.get("moe_intermediate_size")
    return plain | {"architectures": None, "model_type": "qwen3", "intermediate_size": width}


def _delta_sizes(config: dict[str, Any], *, grouped: bool) -> DeltaSizes:
    keys, values = count_of(config, "linear_num_key_heads"), count_of(config, "linear_num_value_heads")
    if values % keys:
        raise refuse("linear_num_value_heads", values, f"use a multiple of linear_num_key_heads={keys}")
    return DeltaSizes(
        keys=keys,
        values=values,
        key_dim=count_of(config, "linear_key_head_dim"),
        value_dim=count_of(config, "linear_value_head_dim"),
        taps=taps_of(config, "linear_conv_kernel_dim"),
        grouped=grouped,
    )


def _attends(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = names_of(config, "layer_types")
    if kinds is None:
        every = count_of(config, "full_attention_interval", _INTERVAL)
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    return attending(kinds, layers, ("linear_attention", "full_attention"), "these families have")
