"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specbatch.errors import refuse
from specbatch.kernels.common.rowwise import row_sum, sigmoid, softmax


@dataclass(frozen=True)
class Routing:
    """How a layer chooses `top_k` of its `experts` for a token by their logits.

    softmax (Qwen3-MoE, Qwen3-Next, Qwen3.5): the greatest of a softmax over all experts. sigmoid (Nemotron-H, after
    DeepSeek-V3): the greatest of sigmoid + `bias` float32 [experts]; weights are without the bias. Experts are in
    `groups` of equal size, of which only the `top_groups` with the greatest sum of their best two take part.
    normalise: divide the weights by their sum; they are multiplied by `scale` in the end, and each by its expert's
    factor of `factors` float32 [experts] (Gemma 4). DeepSeek-V2 takes the groups with the greatest expert of a softmax.

    After the routed experts come `shared` ones, to which every token goes, with weight 1 or, if `gated`, the sigmoid
    of one more logit after those of the experts.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.experts % self.groups:
            raise refuse("n_group", self.groups, f"use a divisor of the {self.experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise refuse("topk_group", self.top_groups, f"use 1 to {self.groups}, the groups there are")
        if self.experts < self.groups * self.group_best:
            raise refuse("n_group", self.groups, f"a group needs at least {self.group_best} experts; use fewer groups")
        if not 1 <= self.top_k <= self.experts // self.groups * self.top_groups:
            most = self.experts // self.groups * self.top_groups
            raise refuse("num_experts_per_tok", self.top_k, f"use 1 to {most}, the experts to choose from")

    @property
    def group_best(self) -> int:
        """How many experts of a group decide whether it takes part: by the sum of their scores."""
        return 2 if self.score == "sigmoid" and self.groups > 1 else 1

    @property
    def width(self) -> int:
        """Experts that a token goes to."""
        return self.top_k + self.shared

    @property
    def logits(self) -> int:
        """Logits of a token."""
        return self.experts + int(self.gated)


def route_ref(logits: torch.Tensor, rule: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, rule.logits] -> weights float32 [T, width] and experts int32 [T, width], the best first, shared last.

    Of equal experts the lower one is chosen. A softmax keeps the order of its logits, so they are what is compared.
    """
    logits = logits.float()
    routed = logits[:, : rule.experts]
    if rule.score == "softmax":
        scores, keys = softmax(routed), routed
    else:
        scores = sigmoid(routed)
        keys = scores if rule.bias is None else scores + rule.bias
    if rule.groups > 1:
        grouped = keys.unflatten(1, (rule.groups, -1))
        best = _greatest(grouped.topk(rule.group_best).values.sum(-1), rule.top_groups)
        taken = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=keys.device).scatter_(1, best, True)
        keys = grouped.where(taken[..., None], -torch.inf).flatten(1)
    experts = _greatest(keys, rule.top_k)
    weights = scores.gather(1, experts)
    if rule.normalise:
        weights = weights / (row_sum(weights)[:, None] + (1e-20 if rule.score == "sigmoid" else 0))
    weights = weights * rule.scale
    if rule.factors is not None:
        weights = weights * rule.factors[experts]
    if rule.shared:
        always = torch.arange(rule.experts, rule.experts + rule.shared, device=logits.device)
        gate = sigmoid(logits[:, rule.experts :]) if rule.gated else logits.new_ones(len(logits), 1)
        experts = torch.cat([experts, always.expand(len(logits), -1)], 1)
        weights = torch.cat([weights, gate.expand(-1, rule.shared)], 1)
    return weights, experts.int()


def _greatest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the greatest along the last dimension, the lower one first where equal (`topk` does not say)."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]
