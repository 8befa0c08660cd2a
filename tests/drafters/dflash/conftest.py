"""A float64 reference of DFlash."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbatch.models.decoder import Decoder


class Reference:
    """Hidden states and logits of a block in float64: no cache, nothing fused, the config's raw keys."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Decoder) -> None:
        self.config = config | config["dflash_config"]
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.embedding = target.embedding.double()
        self.target = target

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def hidden(self, features: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
        """After the last norm, of the anchor and `count` masks; features [start, n * H] of all positions before."""
        config, start = self.config, len(features)
        heads, dim = config["num_attention_heads"], config["head_dim"]
        inverse = config["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
        place = torch.arange(start + count + 1)
        angle = torch.outer(place.double(), inverse).repeat(1, 2)[:, None]

        def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
            half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * angle.cos() + half * angle.sin()

        context = self.norm(self.project(features.double(), "fc"), "hidden_norm")
        x = self.embedding[[anchor] + [config["mask_token_id"]] * count]
        for index in range(config["num_hidden_layers"]):
            layer = f"layers.{index}"
            own = self.norm(x, f"{layer}.input_layernorm")
            given = torch.cat([context, own])
            q, k, v = (
                self.project(of, f"{layer}.self_attn.{part}_proj").view(len(of), -1, dim)
                for part, of in (("q", own), ("k", given), ("v", given))
            )
            q = turned(self.norm(q, f"{layer}.self_attn.q_norm"), angle[start:])
            k = turned(self.norm(k, f"{layer}.self_attn.k_norm"), angle)
            k, v = (item.repeat_interleave(heads // item.shape[1], 1) for item in (k, v))
            distance = place[start:, None] - place
            slides = config.get("layer_types", ["full_attention"] * 9)[index] == "sliding_attention"
            seen = torch.ones_like(distance, dtype=torch.bool)
            if config.get("is_causal", slides):
                seen &= distance >= 0
            if slides:
                seen &= distance.abs() < config["sliding_window"]
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
            weight = scores.masked_fill(~seen, -math.inf).softmax(-1)
            x = x + self.project(torch.einsum("hqk,khd->qhd", weight, v).flatten(1), f"{layer}.self_attn.o_proj")
            own = self.norm(x, f"{layer}.post_attention_layernorm")
            inner = F.silu(self.project(own, f"{layer}.mlp.gate_proj")) * self.project(own, f"{layer}.mlp.up_proj")
            x = x + self.project(inner, f"{layer}.mlp.down_proj")
        return self.norm(x, "norm")

    def logits(self, features: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
        """[count, V] of the drafts."""
        return self.target.logits(self.hidden(features, anchor, count)[1:].float()).double()


@pytest.fixture
def reference() -> type[Reference]:
    return Reference
