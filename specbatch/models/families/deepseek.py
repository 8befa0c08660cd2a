"""DeepSeek-V2 and V3, Kimi-K2 and K2.5 (text), GLM-4.7-Flash: latent attention (MLA), mixtures with shared experts.

DeepSeek-AI, "DeepSeek-V2" and "DeepSeek-V3 Technical Report" (2024); names, layout and defaults are those of
`DeepseekV2Config`, `DeepseekV3Config` and `Glm4MoeLiteConfig` of transformers. Kimi-K2 is a DeepSeek-V3 with other
sizes; K2.5 and later have it as the text part of a multimodal model, whose other parts are not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, names_of, positive_of, table_of
from specbatch.kernels.attention.queries import LatentLayout
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.head_gemm import head_gemm
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.models.config import Ends, ModelConfig, follows_layers
from specbatch.models.families import llama
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.layers.deepseek_moe import DeepseekMixture, deepseek_mixture_of, read_deepseek_experts
from specbatch.models.layers.moe import MoeMlp, Shapes
from specbatch.models.weight_reader import Reader, Tables

# Of a Glm4MoeLite that does not state them; then those of DeepSeek-V3.
_LITE = {
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
}  # fmt: skip
_SPARE = ("vision_tower.", "mm_projector.", "model.mm_projector.")  # of Kimi-K2.5
_LATENT_EPS = 1e-6  # of the norms in latent attention, which do not read rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """query_rank: of the queries' low-rank projection, None if it is one matrix; rank: of the latents; plain: channels
    of a head's queries and keys without rope, after which come `head_dim` channels with it; value_dim: of a head;
    interleaved and score_scale: see `LatentLayout`; dense_layers: the first so many layers have no mixture; prefix: of
    all names."""

    module: ClassVar[str] = __name__
    mtp_module: ClassVar[str] = "specbatch.models.heads.layer_mtp"

    query_rank: int | None
    rank: int
    plain: int
    value_dim: int
    interleaved: bool
    score_scale: float
    mixture: DeepseekMixture | None
    dense_layers: int
    prefix: str = ""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DeepseekConfig:
        """Read a config.json. Those of multimodal models contain the text model as a nested table."""
        text = table_of(config, "text_config")
        if text:
            third = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
            return replace(cls.from_dict(text | third), prefix="language_model.")
        names, kind = config.get("architectures") or (), config.get("model_type")
        if "Glm4MoeLiteForCausalLM" in names or kind == "glm4_moe_lite":
            config = _LITE | {key: value for key, value in config.items() if value is not None} | _dense_layers(config)
        elif kind == "kimi_k25" or any("K25For" in name for name in names):
            raise refuse("text_config", config.get("text_config"), "the config must have the text model there")
        is_third = "DeepseekV2ForCausalLM" not in names and kind != "deepseek_v2"
        for key in ("attention_bias", "mlp_bias"):
            if flag_of(config, key):
                raise refuse(key, True, "the layers of DeepSeek here have no biases; use false")
        if config.get("moe_layer_freq") not in (None, 1):
            raise refuse(
                "moe_layer_freq", config["moe_layer_freq"], "every layer after the dense ones has a mixture; use 1"
            )
        turning = count_of(config, "qk_rope_head_dim", 64)
        if turning % 2:
            raise refuse("qk_rope_head_dim", turning, "rope rotates pairs of channels; it must be even")
        own = {"head_dim": turning, "num_key_value_heads": 1, "sliding_window": None, "layer_types": None}
        plain = ModelConfig.from_dict(config | {"architectures": None, "model_type": "llama"} | own)
        unturned, depth = count_of(config, "qk_nope_head_dim", 128), plain.num_layers
        dense = count_of(config, "first_k_dense_replace", 3 if is_third else 0, least=0)
        has_ranks = config.get("q_lora_rank", 1536) is not None
        return cls(
            **vars(plain) | {"family": "deepseek_v3" if is_third else "deepseek_v2"},
            query_rank=count_of(config, "q_lora_rank", 1536) if has_ranks else None,
            rank=count_of(config, "kv_lora_rank", 512),
            plain=unturned,
            value_dim=count_of(config, "v_head_dim", 128),
            interleaved=not is_third or flag_of(config, "rope_interleave", True),  # V2 has no such switch
            score_scale=(unturned + turning) ** -0.5 * _mscale(config) ** 2,
            mixture=(_third_mixture(config) if is_third else _second_mixture(config)) if dense < depth else None,
            dense_layers=min(dense, depth),
        )

    def divided(self, ranks: int) -> Self:
        """Heads are divided, and each rank has all latents."""
        step = self.input_step
        mixture = self.mixture and self.mixture.divided(ranks, step)
        part = replace(super().divided(ranks), mixture=mixture)
        for width in (self.plain + self.head_dim, self.plain + self.value_dim, self.value_dim):
            if part.num_heads * width % step:
                works = f"a rank's heads, {part.num_heads} of {width}, must be a multiple of {step} channels"
                raise refuse("tensor_parallel", ranks, works)
        return part

    def sections(self, name: str) -> tuple[int, ...]:
        is_stack = name.endswith("experts.gate_up_proj")
        return (self.mixture.inner,) * 2 if self.mixture is not None and is_stack else ()

    @property
    def names(self) -> Ends:
        return Ends(*(self.prefix + name for name in Ends()))

    def is_spare(self, name: str) -> bool:
        return bool(self.prefix) and name.startswith(_SPARE)

    @property
    def cache_dims(self) -> tuple[int, int]:
        return self.head_dim, self.rank

    @property
    def has_latents(self) -> bool:
        return True

    @property
    def usual_heads(self) -> tuple[int, int]:
        return self.num_heads, self.value_dim

    @property
    def mixer_widths(self) -> tuple[int, int]:
        return (self.num_heads + 1) * (self.rank + self.head_dim), self.num_heads * self.rank

    @property
    def input_widths(self) -> tuple[int, ...]:
        low = () if self.query_rank is None else (self.query_rank,)
        return self.hidden_size, self.intermediate_size, self.num_heads * self.value_dim, *low

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        queries, low = self.num_heads * (self.plain + self.head_dim), self.query_rank
        # Of the next layer: its input of attention, the first projection, queries, queries for latents, latents.
        first = queries if low is None else 2 * low + queries
        first += 3 * self.rank + self.head_dim + self.num_heads * self.rank
        return (self.mixer_widths[0] + first) * dtype.itemsize

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        dense = super().mlp_bytes(dtype) if self.dense_layers else 0
        return dense if self.mixture is None else max(dense, self.mixture.token_bytes(self.hidden_size, dtype))

    def fit(self, found: Shapes) -> Self:
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        return replace(super().fit(found), mixture=self.mixture and replace(self.mixture, fused=fused))

    def stacked(self) -> Self:
        return replace(self, mixture=self.mixture and replace(self.mixture, fused=True))

    def may_dequantize(self, name: str, shape: tuple[int, ...]) -> bool:
        absorbed = self.quantization is not None and name.endswith("kv_b_proj.weight")
        return absorbed or super().may_dequantize(name, shape)

    def is_mtp(self, name: str) -> bool:
        return follows_layers(name, self.num_layers)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """qkv: the queries (or their low-rank part, which query_norm and query_up follow) and the latents with the rotated
    part of keys as one matrix. latent_norm: of latents. up [heads, plain + value_dim, rank]: from a latent to the
    unrotated part of a head's key, and to its value."""

    heads: LatentLayout
    query_norm: Norm | None
    query_up: Linear | None
    latent_norm: Norm
    up: torch.Tensor
    plain: int

    @property
    def width(self) -> int:
        return self.heads.width

    @property
    def mixed(self) -> int:
        return self.heads.count * self.heads.rank

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        heads, rank = self.heads, self.heads.rank
        first = self.qkv(x, norm=self.norm)
        q, latent, key = first.split([first.shape[1] - heads.dim, rank, heads.dim - rank], 1)
        if self.query_up is not None:
            q = self.query_up(q.contiguous(), norm=self.query_norm)
        q = q.unflatten(1, (heads.count, -1))
        out = x.new_empty(len(x), self.width) if out is None else out
        rows = out.view(len(x), heads.count + 1, heads.dim)
        rows[:, :-1, :rank] = head_gemm(q[..., : self.plain], self.up[:, : self.plain])
        rows[:, :-1, rank:] = q[..., self.plain :]
        rows[:, -1, :rank] = rms_norm(latent.contiguous(), *self.latent_norm)
        rows[:, -1, rank:] = key
        return out

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        latents = mixed.view(len(x), self.heads.count, self.heads.rank)
        values = head_gemm(latents, self.up[:, self.plain :].transpose(1, 2))
        return self.out(values.flatten(1), residual=x)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin of the rotated channels."""
    config = read.config
    assert isinstance(config, DeepseekConfig)
    stem = f"{config.prefix}model.layers.{index}"
    mixer = _attention(read, stem, tables)
    if config.mixture is None or index < config.dense_layers:
        return Layer(mixer, (llama.dense(read, stem),))
    norm = read.norm(f"{stem}.post_attention_layernorm")
    return Layer(mixer, (MoeMlp(norm, read_deepseek_experts(read, f"{stem}.mlp", config.mixture)),))


def _attention(read: Reader, stem: str, tables: Tables) -> LatentAttention:
    config, inner = read.config, f"{stem}.self_attn"
    assert isinstance(config, DeepseekConfig)
    heads, rank, turning, hidden = config.num_heads, config.rank, config.head_dim, config.hidden_size
    queries, low = heads * (config.plain + turning), config.query_rank
    first = {f"{inner}.q_proj": queries} if low is None else {f"{inner}.q_a_proj": low}
    absorbed = f"{inner}.kv_b_proj.weight"
    up = read(absorbed, heads * (config.plain + config.value_dim), rank)
    return LatentAttention(
        norm=read.norm(f"{stem}.input_layernorm"),
        qkv=read.linear(first | {f"{inner}.kv_a_proj_with_mqa": rank + turning}, hidden),
        heads=LatentLayout(
            heads, 1, rank + turning, None, None, config.rms_norm_eps, *tables,
            rank=rank, scale=config.score_scale, interleaved=config.interleaved,
        ),
        out=read.linear({f"{inner}.o_proj": hidden}, heads * config.value_dim),
        query_norm=None if low is None else Norm(read(f"{inner}.q_a_layernorm.weight", low), _LATENT_EPS),
        query_up=None if low is None else read.linear({f"{inner}.q_b_proj": queries}, low),
        latent_norm=Norm(read(f"{inner}.kv_a_layernorm.weight", rank), _LATENT_EPS),
        up=up.view(heads, config.plain + config.value_dim, rank),
        plain=config.plain,
    )  # fmt: skip


def _dense_layers(config: dict[str, Any]) -> dict[str, int]:
    """`first_k_dense_replace` of a config that lists the kinds of MLPs."""
    kinds = names_of(config, "mlp_layer_types")
    if kinds is None:
        return {}
    dense = next((index for index, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise refuse("mlp_layer_types", kinds, "layers after the first 'dense' ones must be 'sparse'")
    return {"first_k_dense_replace": dense}


def _third_mixture(config: dict[str, Any]) -> DeepseekMixture:
    for key, works in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key) not in (None, works):
            raise refuse(key, config[key], f"the mixtures of DeepSeek-V3 here have {works!r}")
    defaults = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    return deepseek_mixture_of(defaults | {key: value for key, value in config.items() if value is not None})


def _second_mixture(config: dict[str, Any]) -> DeepseekMixture:
    if config.get("scoring_func") not in (None, "softmax"):
        raise refuse("scoring_func", config["scoring_func"], "the mixtures of DeepSeek-V2 here have 'softmax'")
    if flag_of(config, "norm_topk_prob"):
        raise refuse(
            "norm_topk_prob", True, "no published DeepSeek-V2 normalises, and transformers does not; use false"
        )
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise refuse("topk_method", method, "use 'greedy' or 'group_limited_greedy'")
    groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}
    return deepseek_mixture_of(config | groups, score="softmax", normalise=False, is_biased=False)


def _mscale(config: dict[str, Any]) -> float:
    """What YaRN multiplies queries and keys by, each."""
    rope = table_of(config, "rope_scaling") or table_of(config, "rope_parameters")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor = positive_of(rope, "factor", where="rope")
    weight = positive_of(rope, "mscale_all_dim", where="rope")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


final_norm = llama.final_norm
