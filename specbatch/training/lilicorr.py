"""Training of LiLiCorr drafts without convolutions, in the layout that SGLang and vLLM read (`LiLiCorrDraftModel`).

"LiLiCorr: Lightweight Likelihood Correlation of Parallel Drafts for Speculative Decoding" (arXiv 2608.20530); the loss
is the variant "base" of NVIDIA's Model-Optimizer (#2342). To the loss of a row in the training of DFLASH drafts come
two terms, each with weight `HEAD_WEIGHT`, where the target's token and all before it in the block are among the
candidates. The first is the cross entropy of the head's scores after the target's token before. The second is the
expected penalty of a candidate that is sampled by these scores: by how much the target's logit of its own token exceeds
that of the candidate. In Model-Optimizer only whole blocks have these terms, and all rows the same weight in them; here
they have the weight of their row. A row without them counts as a wrong draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.models.config import ModelConfig
from specbatch.models.heads.lilicorr import ARCHITECTURE, FEATURES, described, published_head, slot_distances
from specbatch.training.data import Batch, Example
from specbatch.training.dflash import DFlashHead, sizes_of
from specbatch.training.head import Guess, Scores
from specbatch.training.layers import Norm, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

HEAD_WEIGHT = 0.25
VECTOR_STD = 0.02  # of the matrices that give the vectors, at first


class BiasedMlp(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, inner)
        self.down_proj = nn.Linear(inner, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return out


class LatticeAttention(nn.Module):
    """Parameters are named as those of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self._heads = heads

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [n, L, width]; bias [heads, L, L]: what is added to the scores."""
        parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self._heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class LatticeLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = Norm(width, eps)
        self.attn = LatticeAttention(width, heads)
        self.mlp_norm = Norm(width, eps)
        self.mlp = BiasedMlp(width, inner, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LatticeHead(nn.Module):
    """See `heads.lilicorr.LatticeHead`. own: the settings of `published_head`; slots: rows that draft."""

    def __init__(self, base: ModelConfig, own: dict[str, Any], slots: int) -> None:
        super().__init__()
        hidden, eps, width = base.hidden_size, base.rms_norm_eps, own["lilicorr_hidden_size"]
        heads, inner = own["lilicorr_num_heads"], int(width * own["lilicorr_mlp_ratio"])
        self._scale, self._eps = own["lilicorr_logit_scale"], own["lilicorr_vector_eps"]
        self.token_proj = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.context_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = BiasedMlp(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, own["lilicorr_candidate_topk"], width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        count = own["lilicorr_num_layers"]
        self.layers = nn.ModuleList(LatticeLayer(width, heads, inner, eps) for _ in range(count))
        self.output_norm = Norm(width, eps)
        self.anchor_norm = Norm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(width, own["lilicorr_factor_dim"]) for _ in range(3)
        )

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Matrices by the seed; all else begins at zero, or norms at one."""
        initialize(self, seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "embedding")) and "norm" not in name:
                parameter.zero_()
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            head.weight.mul_(VECTOR_STD * head.in_features**0.5)

    def forward(
        self, embedded: torch.Tensor, logprobs: torch.Tensor, hidden: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """Scores of transitions float32 [n, slots, K, K]; arguments as in `heads.lilicorr.LatticeHead.scores`."""
        rows, count = logprobs.shape[1:]
        x = self.token_proj(embedded) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(described(logprobs)).to(x.dtype))
        x = (x + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        distance, middle = slot_distances(rows, count, x.device), self.relative_slot_bias.shape[1] // 2
        bias = self.relative_slot_bias[:, distance + middle] + self.same_slot_bias[:, None, None] * (distance == 0)
        for layer in self.layers:
            x = layer(x, bias)
        x, given = self.output_norm(x), self.anchor_norm(self.context_proj(anchor))
        each = given[:, None].expand_as(x)
        read = F.silu(self.factor_input_proj(torch.cat([x, each, x * each], -1))).unflatten(1, (rows, count))
        out, into = (F.normalize(head(read), dim=-1, eps=self._eps) for head in (self.out_head, self.in_head))
        first = F.normalize(self.anchor_out_head(given), dim=-1, eps=self._eps)
        before = torch.cat([first[:, None, None].expand(-1, 1, count, -1), out[:, :-1]], 1)
        scores: torch.Tensor = self._scale * (before @ into.transpose(-1, -2)).float()
        return scores


class LiLiCorrHead(DFlashHead):
    architecture = ARCHITECTURE

    def __init__(self, target: Target, *, width: int, seed: int, **sizes: Any) -> None:
        """width: of the head; the others as for `DFlashHead`."""
        super().__init__(target, seed=seed, **sizes)
        self._own = published_head(target.config, width)
        self.lilicorr = LatticeHead(target.config, self._own, self.drafts)
        self.lilicorr.reset(seed + 1)
        self.to(target.device)

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        last, flat = blocks.last.flatten(0, 1), blocks.flat
        base = [F.linear(hidden[:, row], target.head).float() for row in range(1, self.drafts + 1)]
        tokens = torch.stack([logits.topk(self._own["lilicorr_candidate_topk"]).indices for logits in base], 1)
        known = [row.gather(1, tokens[:, at]) - row.logsumexp(-1, keepdim=True) for at, row in enumerate(base)]
        anchors = self.hidden_norm(self.fc(blocks.aux.flatten(0, 1)[flat[:, 0] - 1]))
        embedded = F.embedding(tokens, target.embedding)
        transitions = self.lilicorr(embedded, torch.stack(known, 1), hidden[:, 1:], anchors)
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        covered, before = alive.clone(), torch.zeros_like(truth[:, 0])
        guesses = []
        for row in range(1, self.drafts + 1):
            here = blocks.within(row)
            wanted, found = truth[here, row], tokens[here, row - 1]
            is_known = (tokens[:, row - 1] == truth[:, row, None]).int()
            scores = transitions[here, row - 1, before[here]]
            covered, before = covered & is_known.any(1), is_known.argmax(1)
            hits = (found.gather(1, scores.argmax(1, keepdim=True))[:, 0] == wanted) & covered[here]
            alive[here] &= hits
            theirs = target.logits(last[flat[here, row - 1]])
            penalty = (theirs.gather(1, wanted[:, None]) - theirs.gather(1, found)).clamp(min=0)
            of_head = F.cross_entropy(scores, before[here], reduction="none") + (scores.softmax(-1) * penalty).sum(-1)
            losses = F.cross_entropy(base[row - 1][here], wanted, reduction="none")
            guesses.append(Guess(losses + HEAD_WEIGHT * of_head * covered[here], hits, alive[here]))
        return Scores.of(guesses, self._decay)


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> LiLiCorrHead:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    assert recipe.lattice_width is not None
    return LiLiCorrHead(target, width=recipe.lattice_width, **sizes_of(recipe, target, train, spare_tokens))
