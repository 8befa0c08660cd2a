"""A float64 reference of LiLiCorr."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from block_drafts import Reference, convolved_by_rows


class LiLiCorrReference(Reference):
    """The hidden states are those of DFlash, or with convolutions of DFlash 2. The head is evaluated for one block at a
    time, pair by pair, with the tensors of the file."""

    def convolved(self, x: torch.Tensor, read: torch.Tensor, name: str, side: int) -> torch.Tensor:
        if not self.config.get("conv_kernel_size"):
            return x
        return convolved_by_rows(self, x, read, name, side)

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        hidden = self.hidden(features, anchor, count)[1:]
        base = self.target.logits(hidden.float()).double().log_softmax(-1)
        known, tokens = base.topk(self.config["lilicorr_candidate_topk"])
        given = self.norm(self.project(features[-1].double(), "fc"), "hidden_norm")
        first, out, into = self.vectors(known, tokens, hidden, given)
        found, before = torch.full_like(base, -math.inf), first
        for row, token in enumerate(drafts):
            found[row, tokens[row]] = self.config["lilicorr_logit_scale"] * (into[row] @ before)
            before = out[row, tokens[row].tolist().index(token)] if token in tokens[row] else out[row, 0]
        return found[: len(drafts)]

    def vectors(
        self, known: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the anchor [factor], and of the candidates, by which they are followed and follow, [rows, K, factor]."""
        own = {name.removeprefix("lilicorr."): value for name, value in self.tensors.items()}
        rows, count = tokens.shape

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return self.project(x, f"lilicorr.{name}")

        def unit(x: torch.Tensor) -> torch.Tensor:
            return x / x.norm(dim=-1, keepdim=True).clamp(min=self.config["lilicorr_vector_eps"])

        x = torch.empty(rows, count, own["pass_hidden_proj.weight"].shape[0]).double()
        for row in range(rows):
            for rank in range(count):
                value = known[row, rank]
                told = torch.stack(
                    [
                        value,
                        value.exp(),
                        value - known[row, 0],
                        value * 0 + rank / max(count - 1, 1),
                        value * 0 + (not rank),
                    ]
                )
                told = F.layer_norm(told, (5,), own["feature_norm.weight"], own["feature_norm.bias"])
                token = self.embedding[tokens[row, rank]]
                x[row, rank] = linear(token, "token_proj") if "token_proj.weight" in own else token
                x[row, rank] += linear(F.silu(linear(told, "feature_mlp.up_proj")), "feature_mlp.down_proj")
                x[row, rank] += linear(hidden[row], "pass_hidden_proj")
                x[row, rank] += own["slot_embedding"][0, 0, row, 0] + own["rank_embedding"][0, 0, 0, rank]
        x = x.flatten(0, 1)
        slot = torch.arange(rows).repeat_interleave(count)
        heads, block = self.config["lilicorr_num_heads"], self.config["block_size"]
        for index in range(self.config["lilicorr_num_layers"]):
            name = f"layers.{index}"
            read = self.norm(x, f"lilicorr.{name}.attn_norm")
            parts = F.linear(read, own[f"{name}.attn.in_proj_weight"], own[f"{name}.attn.in_proj_bias"])
            q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts.chunk(3, -1))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
            distance = slot[:, None] - slot
            scores += own["relative_slot_bias"][:, distance + block - 1]
            scores += own["same_slot_bias"][:, None, None] * (distance == 0)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + linear(mixed, f"{name}.attn.out_proj")
            read = self.norm(x, f"lilicorr.{name}.mlp_norm")
            x = x + linear(F.silu(linear(read, f"{name}.mlp.up_proj")), f"{name}.mlp.down_proj")
        x = self.norm(x, "lilicorr.output_norm")
        state = self.norm(linear(given, "context_proj"), "lilicorr.anchor_norm").expand_as(x)
        read = F.silu(linear(torch.cat([x, state, x * state], -1), "factor_input_proj"))
        out, into = (unit(linear(read, f"{part}_head")).view(rows, count, -1) for part in ("out", "in"))
        return unit(linear(state[0], "anchor_out_head")), out, into


@pytest.fixture
def reference() -> type[LiLiCorrReference]:
    return LiLiCorrReference
