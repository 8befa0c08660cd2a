"""Training of DFlash 2 drafts, in the format of z-lab (`DFlash2DraftModel`): convolutions along the block, a selector.

github.com/z-lab/dflash has the network. Its authors have not published their training, which here follows
vllm-project/speculators (#1006), SpecForge (#772) and NeMo Automodel: the loss of a row is that of DFlash plus the
cross entropy of the selector over its candidates, with the same weights. The selector reads the target's token before
the row. A target's token that is not among the candidates takes the place of the least likely one in the loss, and
counts as a wrong draft. Convolutions begin as the identity and the selector without effect, so that an untrained draft
is one of DFlash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.models.config import ModelConfig
from specbatch.models.heads.dflash2 import ARCHITECTURE, convolved, published_heads
from specbatch.training.data import Batch, Example
from specbatch.training.dflash import DFlashHead, sizes_of
from specbatch.training.head import Guess, Layer, Scores
from specbatch.training.layers import Attention, Mlp, Norm, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

CODEBOOK_STD = 0.02


class Convolution(nn.Module):
    """A causal convolution along blocks, before (side 0) and after (1) a part of a layer; see `heads.dflash2`."""

    def __init__(self, hidden: int, kernel: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * hidden // group, bias=False)

    def forward(self, x: torch.Tensor, read: torch.Tensor, side: int) -> torch.Tensor:
        """Convolve x [..., rows, H]; read [..., rows, H]: the part's normed input."""
        weight = self.kernel_projection.weight.chunk(2)[side]
        kernels = F.linear(read, weight).unflatten(-1, (self.base_kernel.shape[1], -1))  # [..., rows, kernel, groups]
        return convolved(x, self.base_kernel[side], kernels).to(x.dtype)

    @torch.no_grad()
    def become_identity(self) -> None:
        self.base_kernel.zero_()[:, 0] = 1
        self.kernel_projection.weight.zero_()


class ConvolvedLayer(Layer):
    """A layer whose attention and MLP read and write through convolutions."""

    attention_conv: Convolution
    mlp_conv: Convolution

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        read = super().enter(x)
        out: torch.Tensor = self.attention_conv(read, read, 0)
        return out

    def leave(self, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention_conv(self.self_attn.out(attended, gate), super().enter(x), 1)
        read = self.post_attention_layernorm(x)
        out: torch.Tensor = x + self.mlp_conv(self.mlp(self.mlp_conv(read, read, 0)), read, 1)
        return out


class Selector(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What is added to the logits of candidates int64 [n, K] in rows with hidden [n, H] after tokens int64 [n]:
        [n, K]."""
        weights = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)
        return torch.einsum("nr,nkr->nk", weights, F.embedding(tokens, self.successor_codebook))


class DFlash2Head(DFlashHead):
    architecture = ARCHITECTURE

    def __init__(self, target: Target, *, rank: int, seed: int, **sizes: Any) -> None:
        """rank: of the selector; the others as for `DFlashHead`."""
        super().__init__(target, seed=seed, **sizes)
        base = target.config
        self._own = published_heads(base) | {"selector_rank": rank}
        for layer in self.layers:
            assert isinstance(layer, ConvolvedLayer)
            layer.attention_conv.become_identity()
            layer.mlp_conv.become_identity()
        self.candidate_selector = Selector(base.vocab_size, base.hidden_size, rank)
        initialize(self.candidate_selector, seed + 1)
        with torch.no_grad():
            self.candidate_selector.predecessor_codebook.mul_(CODEBOOK_STD * math.sqrt(rank))
            self.candidate_selector.successor_codebook.zero_()
        self.to(target.device)

    def _new_layer(self, sizes: ModelConfig) -> Layer:
        hidden, eps, own = sizes.hidden_size, sizes.rms_norm_eps, published_heads(sizes)
        layer = ConvolvedLayer(
            Attention(sizes), Norm(hidden, eps), Norm(hidden, eps), Mlp(sizes.hidden_size, sizes.intermediate_size)
        )
        layer.attention_conv, layer.mlp_conv = (
            Convolution(hidden, own["conv_kernel_size"], own["conv_group_size"]) for _ in range(2)
        )
        return layer

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        guesses = []
        for row in range(1, self.drafts + 1):
            here = blocks.within(row)
            own, wanted = hidden[here, row], truth[here, row]
            logits = F.linear(own, target.head).float()
            tokens = logits.topk(self._own["selector_top_k"]).indices
            missing = (tokens != wanted[:, None]).all(1)
            tokens[:, -1] = torch.where(missing, wanted, tokens[:, -1])
            scores = logits.gather(1, tokens) + self.candidate_selector(own, tokens, truth[here, row - 1]).float()
            place = (tokens == wanted[:, None]).int().argmax(1)
            hits = (scores.argmax(1) == place) & ~missing
            alive[here] &= hits
            losses = F.cross_entropy(logits, wanted, reduction="none")
            losses = losses + F.cross_entropy(scores, place, reduction="none")
            guesses.append(Guess(losses, hits, alive[here]))
        return Scores.of(guesses, self._decay)


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> DFlash2Head:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    assert recipe.selector_rank is not None
    return DFlash2Head(target, rank=recipe.selector_rank, **sizes_of(recipe, target, train, spare_tokens))
