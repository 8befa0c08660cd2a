"""LFM2: gated short convolutions and a few layers of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specbatch.config_values import count_of, flag_of, names_of, places_of, positive_of, spelled
from specbatch.kernels.attention.qkv import QKVLayout
from specbatch.kernels.gemm.linear import Norm
from specbatch.memory.recurrent_state import StateShape
from specbatch.models.config import Ends, ModelConfig, attending
from specbatch.models.layers import Attention, Layer, Mixer, Reader, SwiGlu, Tables
from specbatch.models.moe import Shapes
from specbatch.models.recurrent import ShortConv, taps_of, window_shapes
from specbatch.models.rope import Rope

_THETA = 1e6  # if a config has no theta


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """attends: which layers are attention; taps: of the convolutions; conv_bias: biases of convolutions and of their
    projections."""

    attends: tuple[bool, ...]
    taps: int
    conv_bias: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Lfm2Config:
        share = count_of(config, "hidden_size") // count_of(config, "num_attention_heads")
        plain = ModelConfig.from_dict(
            config
            | {
                "architectures": None,
                "model_type": "qwen3",
                "layer_types": None,
                "sliding_window": None,
                "rms_norm_eps": config.get("norm_eps"),
                "intermediate_size": _width(config),
                "tie_word_embeddings": flag_of(config, spelled(config, "tie_word_embeddings", "tie_embedding"), True),
                "head_dim": count_of(config, "head_dim", share),
            }
        )
        if plain.rope.source == "class default":
            plain = replace(plain, rope=Rope(theta=_THETA, rotary_dim=plain.head_dim, source="class default"))
        attends, taps = _attends(config, plain.num_layers), taps_of(config, "conv_L_cache", 3)
        return cls(**vars(plain), attends=attends, taps=taps, conv_bias=flag_of(config, "conv_bias"))

    @property
    def module(self) -> str:
        return __name__

    @property
    def names(self) -> Ends:
        return Ends(norm="model.embedding_norm")  # despite its name the final norm

    @property
    def attention_layers(self) -> int:
        return sum(self.attends)

    @property
    def mixer_widths(self) -> tuple[int, int]:
        projected, mixed = super().mixer_widths
        return max(projected, 3 * self.hidden_size), max(mixed, self.hidden_size)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return window_shapes(self.hidden_size, self.taps)

    def weight_shapes(self) -> Shapes:
        hidden, dim = self.hidden_size, self.head_dim
        shapes: Shapes = {self.names.embedding: (self.vocab_size, hidden)}
        for index, attends in enumerate(self.attends):
            stem = f"model.layers.{index}"
            shapes |= {f"{stem}.{norm}.weight": (hidden,) for norm in ("operator_norm", "ffn_norm")}
            if attends:
                queries, keys = self.num_heads * dim, self.num_kv_heads * dim
                sizes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
                sizes |= {"out_proj": (hidden, queries)}
                shapes |= {f"{stem}.self_attn.{name}.weight": size for name, size in sizes.items()}
                shapes |= {f"{stem}.self_attn.{part}_layernorm.weight": (dim,) for part in "qk"}
            else:
                shapes[f"{stem}.conv.in_proj.weight"] = (3 * hidden, hidden)
                shapes[f"{stem}.conv.conv.weight"] = (hidden, 1, self.taps)
                shapes[f"{stem}.conv.out_proj.weight"] = (hidden, hidden)
                if self.conv_bias:
                    biases = {"in_proj": 3 * hidden, "conv": hidden, "out_proj": hidden}
                    shapes |= {f"{stem}.conv.{name}.bias": (rows,) for name, rows in biases.items()}
            for name in ("w1", "w3"):
                shapes[f"{stem}.feed_forward.{name}.weight"] = (self.intermediate_size, hidden)
            shapes[f"{stem}.feed_forward.w2.weight"] = (hidden, self.intermediate_size)
        shapes[f"{self.names.norm}.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes[self.names.head] = (self.vocab_size, hidden)
        return shapes

    def fit(self, found: Shapes) -> Lfm2Config:
        """The width of MLPs is taken from their tensors, as configs state it in several ways."""
        width, _ = found.get("model.layers.0.feed_forward.w1.weight", (self.intermediate_size, 0))
        return replace(self, tie_embeddings=self.is_tied(found), float8=self.kept_plain(found), intermediate_size=width)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, Lfm2Config)
    mixer: Mixer = _attention(read, stem, tables) if config.attends[index] else _conv(read, stem, config.conv_bias)
    inner = f"{stem}.feed_forward"
    mlp = SwiGlu(read.norm(f"{stem}.ffn_norm"), read.linear(f"{inner}.w1", f"{inner}.w3"), read.linear(f"{inner}.w2"))
    return Layer(mixer, (mlp,))


def final_norm(read: Reader, stem: str) -> Norm:
    return read.norm(stem)


def _attention(read: Reader, stem: str, tables: Tables) -> Attention:
    config, inner = read.config, f"{stem}.self_attn"
    q_norm, k_norm = (read(f"{inner}.{part}_layernorm.weight") for part in "qk")
    return Attention(
        norm=read.norm(f"{stem}.operator_norm"),
        qkv=read.linear(*(f"{inner}.{part}_proj" for part in "qkv")),
        heads=QKVLayout(
            config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm, config.rms_norm_eps, *tables
        ),
        out=read.linear(f"{inner}.out_proj"),
    )


def _conv(read: Reader, stem: str, bias: bool) -> ShortConv:
    inner = f"{stem}.conv"
    return ShortConv(
        norm=read.norm(f"{stem}.operator_norm"),
        inputs=read.linear(f"{inner}.in_proj", bias=bias),
        out=read.linear(f"{inner}.out_proj", bias=bias),
        conv=read(f"{inner}.conv.weight")[:, 0].contiguous(),
        bias=read(f"{inner}.conv.bias") if bias else None,
    )


def _attends(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = names_of(config, "layer_types")
    if kinds is None:
        places = places_of(config, "full_attn_idxs") or []
        return tuple(layer in places for layer in range(layers))
    return attending(kinds, layers, ("conv", "full_attention"), "the family has")


def _width(config: dict[str, Any]) -> int:
    width = count_of(config, "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    if flag_of(config, "block_auto_adjust_ff_dim", True):
        step = count_of(config, "block_multiple_of", 256)
        width = int(positive_of(config, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // step) * step
    return width
