"""Training of XPress drafts, in the layout that vLLM reads (`Qwen3XPressModel`).

"xPress: Parallel Refinement for Diffusion Drafters in Speculative Decoding" (arXiv 2608.02438); the loss is that of
vllm-project/speculators (#1061). Blocks are filled as in the training of DFLASH drafts. The logits of a row are scored
three times: as the refiner gives them for the target's tokens before the row; as it gives them in each of `PASSES`
passes over its own choices, on average, with weight `PASS_WEIGHT`; and without the refiner, with weight `BASE_WEIGHT`.
Each score is a * cross entropy with the target's token + (1 - a) * total variation distance from the target's
distribution. In speculators a is 0.1; here it falls to that as in the training of DSpark drafts, for the same reason.
Rows have the weights of DFLASH. The mixer and W2 begin at zero, so that an untrained draft is one of DFlash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.models.heads.xpress import ARCHITECTURE, published_head
from specbatch.training.data import Batch, Example
from specbatch.training.dflash import DFlashHead, sizes_of
from specbatch.training.head import Guess, Scores
from specbatch.training.layers import Mlp, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

PASSES = 3
PASS_WEIGHT = 0.3
BASE_WEIGHT = 0.6


class Mixer(nn.Module):
    def __init__(self, rank: int, rows: int) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, rows, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, rows, rank] -> the same shape: each row gets those up to itself, channel by channel."""
        return x + torch.einsum("ckj,njc->nkc", self.L.tril(), x)


class Refiner(nn.Module):
    """See `heads.xpress.Refiner`. inner: channels of its MLP."""

    def __init__(self, vocabulary: int, hidden: int, rows: int, rank: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(vocabulary, rank)
        self.down_h = nn.Linear(hidden, rank, bias=False)
        self.down_g = nn.Linear(hidden, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = Mixer(rank, rows)
        self.mlp = Mlp(rank, inner)
        self.w2 = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What W2 reads, [n, rows, rank], of blocks with hidden states [n, rows, H] and the tokens before each row,
        int64 [n, rows]."""
        mean = self.down_g(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1)
        x = self.mix(self.in_proj(torch.cat([self.down_h(hidden), mean, self.w1(before)], -1)))
        out: torch.Tensor = x + self.mlp(x)
        return out


class XPressHead(DFlashHead):
    def __init__(self, target: Target, *, rank: int, token_weight: float, seed: int, **sizes: Any) -> None:
        """rank: of the refiner; token_weight: see `Recipe`; the others as for `DFlashHead`."""
        super().__init__(target, seed=seed, **sizes)
        base = target.config
        self._token_weight = token_weight
        self._keys = published_head(self._rows, rank)
        inner = self._keys["xpress_mlp_hidden"]
        self.xpress_head = Refiner(base.vocab_size, base.hidden_size, self._rows, rank, inner)
        initialize(self.xpress_head, seed + 1)
        with torch.no_grad():
            self.xpress_head.mix.L.zero_()
            self.xpress_head.w2.weight.zero_()
        self.to(target.device)

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        last, flat = blocks.last.flatten(0, 1), blocks.flat
        known = torch.stack([batch.tokens.flatten()[flat[:, 0] - 1], truth[:, 0]], 1)
        latents = [self.xpress_head(hidden, torch.cat([known[:, :1], truth[:, :-1]], 1))]
        latents += self._passes(hidden, known, target)
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        guesses = []
        share = 1 - (1 - self._token_weight) * self.progress  # of the cross entropy
        for row in range(1, self.drafts + 1):
            here = blocks.within(row)
            wanted, base = truth[here, row], F.linear(hidden[here, row], target.head)
            theirs = target.logits(last[flat[here, row - 1]]).softmax(-1)
            taught, *own = ((base + self.xpress_head.w2(found[here, row])).float() for found in latents)
            losses = mixed(taught, wanted, theirs, share) + BASE_WEIGHT * mixed(base.float(), wanted, theirs, share)
            passes = torch.stack([mixed(logits, wanted, theirs, share) for logits in own]).mean(0)
            hits = taught.argmax(-1) == wanted
            alive[here] &= hits
            guesses.append(Guess(losses + PASS_WEIGHT * passes, hits, alive[here]))
        return Scores.of(guesses, self._decay)

    def _passes(self, hidden: torch.Tensor, known: torch.Tensor, target: Target) -> list[torch.Tensor]:
        """What W2 reads in each pass over own choices, [n, rows, rank]. known int64 [n, 2]: the tokens before the
        anchor, and of it."""
        found: list[torch.Tensor] = []
        for _ in range(PASSES):
            rows = []
            with torch.no_grad():
                for row in range(1, self.drafts):
                    logits = F.linear(hidden[:, row], target.head)
                    rows.append((logits + self.xpress_head.w2(found[-1][:, row]) if found else logits).argmax(-1))
            tokens = [known, torch.stack(rows, 1)] if rows else [known]
            found.append(self.xpress_head(hidden, torch.cat(tokens, 1)))
        return found

    def config(self) -> dict[str, Any]:
        return super().config() | {"architectures": [ARCHITECTURE], **self._keys}


def mixed(logits: torch.Tensor, wanted: torch.Tensor, theirs: torch.Tensor, share: float) -> torch.Tensor:
    """Losses [n] of logits float32 [n, V] for tokens int64 [n] and distributions float32 [n, V] of the target; share:
    of the cross entropy."""
    distance = (logits.softmax(-1) - theirs).abs().sum(-1) / 2
    return share * F.cross_entropy(logits, wanted, reduction="none") + (1 - share) * distance


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> XPressHead:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    assert recipe.refiner_rank is not None
    assert recipe.token_weight is not None
    sizes = sizes_of(recipe, target, train, spare_tokens)
    return XPressHead(target, rank=recipe.refiner_rank, token_weight=recipe.token_weight, **sizes)
