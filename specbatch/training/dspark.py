"""Training of DSpark drafts, in the format of DeepSpec (`Qwen3DSparkModel`), with a vanilla Markov head.

"DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" and its code
(github.com/deepseek-ai/DeepSpec). Blocks are filled as in the training of DFLASH drafts, but row j learns the token
after anchor + j, so that the anchor's row learns, too. The Markov head reads the target's tokens. A row's loss is
a * cross entropy with the target's token + (1 - a) * L1 distance from the target's distribution + the cross entropy of
the confidence head with the chance that a draft sampled there is accepted, 1 - L1 / 2. Row j has the loss weight
exp(-j / 4). Losses are averaged by row, where DeepSpec averages over all rows.

In DeepSpec a is 0.1. Here it falls from 1 at the start of the training to `Recipe.token_weight` at the end: the
gradient of the distance is small as long as the draft gives the right token almost no probability, and short trainings
would end there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.training.data import Batch, Example
from specbatch.training.dflash import DFlashHead, sizes_of
from specbatch.training.head import Guess, Scores
from specbatch.training.layers import initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

ARCHITECTURE = "Qwen3DSparkModel"
DECAY = 4.0  # rows after which the weight of a row has fallen to 1 / e


class MarkovHead(nn.Module):
    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class DSparkHead(DFlashHead):
    def __init__(self, target: Target, *, rank: int, token_weight: float, block: int, seed: int, **sizes: Any) -> None:
        """rank: of the Markov head; token_weight: see `Recipe`; the others as for `DFlashHead`."""
        super().__init__(target, block=block, seed=seed, **sizes)
        self._token_weight = token_weight
        self.drafts = block
        self.markov_head = MarkovHead(target.config.vocab_size, rank)
        self.confidence_head = ConfidenceHead(target.config.hidden_size + rank)
        initialize(self.markov_head, seed + 1)
        with torch.no_grad():  # at first without bias, and all drafts as likely to be accepted as not
            for parameter in (self.markov_head.markov_w2.weight, *self.confidence_head.parameters()):
                parameter.zero_()
        self.to(target.device)
        self._ends = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        last, flat = blocks.last.flatten(0, 1), blocks.flat
        before = self.markov_head.markov_w1(truth)
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        guesses = []
        share = 1 - (1 - self._token_weight) * self.progress  # of the cross entropy
        for row in range(self.drafts):
            here = blocks.within(row + 1)
            own, embedded = hidden[here, row], before[here, row]
            logits = (F.linear(own, target.head) + self.markov_head.markov_w2(embedded)).float()
            wanted = truth[here, row + 1]
            theirs = target.logits(last[flat[here, row]]).softmax(-1)
            distance = (logits.softmax(-1) - theirs).abs().sum(-1)
            confidence = self.confidence_head.proj(torch.cat([own, embedded], -1))[..., 0].float()
            accepted = (1 - distance.detach() / 2).clamp(0, 1)
            losses = share * F.cross_entropy(logits, wanted, reduction="none") + (1 - share) * distance
            losses = losses + F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
            hits = logits.argmax(-1) == wanted
            alive[here] &= hits
            guesses.append(Guess(losses, hits, alive[here]))
        return Scores.of(guesses, math.exp(-1 / DECAY))

    def config(self) -> dict[str, Any]:
        described = super().config()
        return described | {
            "architectures": [ARCHITECTURE],
            **described.pop("dflash_config"),
            "num_anchors": self._anchors,
            "markov_rank": self.markov_head.markov_w2.in_features,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The file holds copies of the target's embedding and output matrix, as DeepSpec's code needs them."""
        return super().tensors() | {name: tensor.clone() for name, tensor in self._ends.items()}


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> DSparkHead:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    assert recipe.markov_rank is not None
    assert recipe.token_weight is not None
    sizes = sizes_of(recipe, target, train, spare_tokens)
    return DSparkHead(target, rank=recipe.markov_rank, token_weight=recipe.token_weight, **sizes)
