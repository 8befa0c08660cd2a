"""MiniMax-M2: attention with norms over all heads of queries and of keys, and a mixture of experts in every layer.

Layout and defaults are those of `MiniMaxM2Config` of transformers, and names those of the published files. Part of each
head rotates (`rotary_dim`). The MTP layers that a config may mention (`num_mtp_modules`) are not in those files.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Norm
from specbatch.models.config import ModelConfig
from specbatch.models.families import llama
from specbatch.models.layers import partial_rope
from specbatch.models.layers.blocks import Attention, Layer
from specbatch.models.layers.deepseek_moe import DeepseekMixture, deepseek_mixture_of, read_deepseek_experts
from specbatch.models.layers.moe import MoeMlp, Shapes
from specbatch.models.weight_reader import Reader, Tables

_THETA = 5e6  # of a config that states none
_EXPERT = ("w1", "w3", "w2")  # an expert's gate, up and down


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(ModelConfig):
    """all_heads: queries and KV heads of the whole model, over which norms go."""

    module: ClassVar[str] = __name__

    mixture: DeepseekMixture
    all_heads: tuple[int, int]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> MiniMaxM2Config:
        for key, works in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer"), ("use_qk_norm", True)):
            if config.get(key) not in (None, works):
                raise refuse(key, config[key], f"the layers of MiniMax-M2 here have {works!r}")
        if count_of(config, "shared_intermediate_size", 0, least=0):
            raise refuse("shared_intermediate_size", config["shared_intermediate_size"], "no shared expert; use 0")
        config = config | {"head_dim": count_of(config, "head_dim", 128)}
        if config.get("rope_parameters") is None and config.get("rope_theta") is None:
            config |= {"rope_theta": _THETA}
        turning = config["head_dim"] if config.get("rotary_dim") is None else count_of(config, "rotary_dim")
        turning = partial_rope.turning(config, config["head_dim"], min(turning / config["head_dim"], 1.0))
        plain = ModelConfig.from_dict(
            partial_rope.without_factor(config)
            | {"architectures": None, "model_type": "llama", "attention_bias": False, "mlp_bias": False}
        )
        experts = config | {"moe_intermediate_size": plain.intermediate_size, "norm_topk_prob": True}
        experts |= {"num_experts": config.get("num_experts") or config.get("num_local_experts")}
        return cls(
            **vars(plain) | {"family": "minimax_m2", "rope": replace(plain.rope, rotary_dim=turning)},
            mixture=deepseek_mixture_of(experts, is_biased=flag_of(config, "use_routing_bias", True)),
            all_heads=(plain.num_heads, plain.num_kv_heads),
        )

    def divided(self, ranks: int) -> Self:
        return replace(super().divided(ranks), mixture=self.mixture.divided(ranks, self.input_step))

    def sections(self, name: str) -> tuple[int, ...]:
        return (self.mixture.inner,) * 2 if name.endswith("experts.gate_up_proj") else ()

    def mixing_bytes(self, dtype: torch.dtype) -> int:
        whole = 3 * sum(self.all_heads) * self.head_dim * dtype.itemsize  # gathered, in one row, and its norm
        return max(super().mixing_bytes(dtype), whole)

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        return 4 * self.hidden_size + self.mixture.token_bytes(self.hidden_size, dtype)  # the router is float32

    def may_dequantize(self, name: str, shape: tuple[int, ...]) -> bool:
        """Rows of queries and keys are permuted, and values are in the same matrix."""
        return super().may_dequantize(name, shape) or name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))

    def fit(self, found: Shapes) -> Self:
        fused = any(name.endswith("experts.gate_up_proj") for name in found)
        return replace(super().fit(found), mixture=replace(self.mixture, fused=fused))

    def stacked(self) -> Self:
        return replace(self, mixture=replace(self.mixture, fused=True))


@dataclass(frozen=True, kw_only=True)
class WholeNormAttention(Attention):
    """Attention with norms over all heads of queries, and of keys, those of other ranks included."""

    q_norm: Norm
    k_norm: Norm
    ranks: Communicator | None

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        heads, y = self.heads, super().project(x, out)
        queries, keys = heads.count * heads.dim, heads.kv * heads.dim
        for part, norm in ((y[:, :queries], self.q_norm), (y[:, queries : queries + keys], self.k_norm)):
            part.copy_(self._normed(part.contiguous(), norm))
        return y

    def _normed(self, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self.ranks is None:
            return rms_norm(part, *norm)
        width = part.shape[1]
        copies = self.ranks.size * width // len(norm.weight)  # neighbouring ranks may have the same KV head
        whole = self.ranks.all_gather(part)[::copies].transpose(0, 1).flatten(1)
        start = self.ranks.rank // copies * width
        return rms_norm(whole, *norm)[:, start : start + width]


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`; tables: cos and sin."""
    config, stem = read.config, f"model.layers.{index}"
    assert isinstance(config, MiniMaxM2Config)
    names, dim = (f"{stem}.input_layernorm", f"{stem}.self_attn"), config.head_dim
    plain = partial_rope.attention(read, *names, tables, llama.qkv_rows(config, names[1]))
    order = partial_rope.paired(dim, config.rope.rotary_dim)

    def norm(part: str, count: int) -> Norm:
        weight = read(f"{names[1]}.{part}_norm.weight", count * dim).view(count, dim)
        return Norm(weight[:, order.to(weight.device)].flatten(), config.rms_norm_eps)

    own = {field.name: getattr(plain, field.name) for field in fields(plain)}
    queries, keys = config.all_heads
    mixer = WholeNormAttention(**own, q_norm=norm("q", queries), k_norm=norm("k", keys), ranks=read.ranks)
    moe, bias = f"{stem}.block_sparse_moe", "e_score_correction_bias"
    experts = read_deepseek_experts(read, moe, config.mixture, bias=bias, names=_EXPERT)
    return Layer(mixer, (MoeMlp(read.norm(f"{stem}.post_attention_layernorm"), experts),))


final_norm = llama.final_norm
