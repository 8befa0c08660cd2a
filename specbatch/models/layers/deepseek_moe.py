"""Mixtures of experts of DeepSeek-V2 and V3, GLM-4.5 and LFM2-MoE: scaled weights, groups, ungated shared experts.

Those after DeepSeek-V3 have sigmoid scores and a bias that only the choice of experts sees. DeepSeek-AI, "DeepSeek-V3
Technical Report" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from specbatch.files.config_values import count_of, flag_of, positive_of, spelled
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing
from specbatch.models.layers.moe import MOST_EXPERTS, SWIGLU_NAMES, Mixture, read_routed, swiglu_rows, with_shared
from specbatch.models.weight_reader import Reader

_MOST_SHARED = 1 << 10


@dataclass(frozen=True, kw_only=True)
class DeepseekMixture(Mixture):
    """shared: the width of the shared experts together. score, scale, groups, top_groups: see `Routing`. is_biased:
    whether the choice has a bias."""

    score: Literal["softmax", "sigmoid"] = "sigmoid"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    is_biased: bool = True

    def __post_init__(self) -> None:
        Routing(self.experts, self.top_k, score=self.score, groups=self.groups, top_groups=self.top_groups)


def deepseek_mixture_of(config: dict[str, Any], **own: Any) -> DeepseekMixture:
    """Read the experts of a config.json; own: fields that it does not decide."""
    inner = count_of(config, "moe_intermediate_size")
    fields = {
        "experts": count_of(config, spelled(config, "n_routed_experts", "num_experts"), most=MOST_EXPERTS),
        "top_k": count_of(config, "num_experts_per_tok"),
        "inner": inner,
        "shared": inner * count_of(config, "n_shared_experts", 0, least=0, most=_MOST_SHARED),
        "normalise": flag_of(config, "norm_topk_prob", True),
        "scale": positive_of(config, "routed_scaling_factor", 1.0),
        "groups": count_of(config, "n_group", 1),
        "top_groups": count_of(config, "topk_group", 1),
        "is_biased": flag_of(config, "use_expert_bias", True),
    }
    return DeepseekMixture(**fields | own)


def read_deepseek_experts(
    read: Reader,
    stem: str,
    mixture: DeepseekMixture,
    *,
    bias: str = "gate.e_score_correction_bias",
    names: tuple[str, str, str] = SWIGLU_NAMES,
    router: torch.dtype | None = torch.float32,
) -> Experts:
    """Read the mixture under the prefix `stem`. bias: name of that of the choice; names: of an expert's gate, up and
    down; router: the type of its weights and logits, None for the model's."""
    hidden = read.config.hidden_size
    up, down = read_routed(read, stem, mixture, names)
    slices = 0
    if mixture.shared:
        shared = f"{stem}.shared_experts"
        ups = read.weight(swiglu_rows(shared, mixture.shared, names), hidden)
        downs = read.weight({f"{shared}.{names[2]}.weight": hidden}, mixture.shared)
        up, down, slices = with_shared(read, stem, (up, down), (ups, downs), "swiglu")
    rule = Routing(
        mixture.experts,
        mixture.top_k,
        score=mixture.score,
        normalise=mixture.normalise,
        scale=mixture.scale,
        bias=read(f"{stem}.{bias}", mixture.experts, dtype=torch.float32) if mixture.is_biased else None,
        groups=mixture.groups,
        top_groups=mixture.top_groups,
        shared=slices,
    )
    weights = read(f"{stem}.gate.weight", mixture.experts, hidden, dtype=router)
    return Experts(rule, weights, up, down, ranks=read.ranks)
