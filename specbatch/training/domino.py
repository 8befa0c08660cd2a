"""Training of Domino drafts, in the layout of SpecForge (`DFlashDraftModel` with `projector_type` "domino").

The loss is that of SpecForge (#571) and NVIDIA's Model-Optimizer. Blocks are filled as in the training of DFLASH
drafts, but row j learns the token after anchor + j, so that the anchor's row learns, too. The GRU reads the target's
tokens. A row's loss is (1 - b) * cross entropy of the corrected logits + b * cross entropy without the correction,
where b falls from 1 to 0 in the course of the training: first the layers learn, then the GRU. Rows have the weights of
DFLASH. The correction begins at zero, so that an untrained draft is one of DFlash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.models.heads.domino import ARCHITECTURE, published_head
from specbatch.training.data import Batch, Example
from specbatch.training.dflash import DFlashHead, sizes_of
from specbatch.training.head import Guess, Scores
from specbatch.training.layers import initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target


class DominoHead(DFlashHead):
    architecture = ARCHITECTURE

    def __init__(self, target: Target, *, gru_size: int, rank: int, block: int, seed: int, **sizes: Any) -> None:
        """gru_size: channels of the GRU's state; rank: of the correction; the others as for `DFlashHead`."""
        super().__init__(target, block=block, seed=seed, **sizes)
        self.drafts = block
        self._own = published_head(gru_size, rank)
        hidden = target.config.hidden_size
        self.prefix_gru = nn.GRU(hidden, gru_size, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + gru_size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, target.config.vocab_size, bias=False),
        )
        initialize(self.prefix_gru, seed + 1)
        initialize(self.embed_proj, seed + 2)
        last = self.embed_proj[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        self.to(target.device)

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        states, _ = self.prefix_gru(F.embedding(truth[:, : self.drafts], target.embedding))
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        guesses = []
        for row in range(self.drafts):
            here = blocks.within(row + 1)
            own, wanted = hidden[here, row], truth[here, row + 1]
            base = F.linear(own, target.head)
            losses = F.cross_entropy(base.float(), wanted, reduction="none")
            logits = base
            if row >= self._own["pure_draft_prefix_len"]:
                logits = base + self.embed_proj(torch.cat([own, states[here, row]], -1))
                corrected = F.cross_entropy(logits.float(), wanted, reduction="none")
                losses = self.progress * corrected + (1 - self.progress) * losses
            hits = logits.argmax(-1) == wanted
            alive[here] &= hits
            guesses.append(Guess(losses, hits, alive[here]))
        return Scores.of(guesses, self._decay)


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> DominoHead:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    assert recipe.gru_size is not None
    assert recipe.correction_rank is not None
    sizes = sizes_of(recipe, target, train, spare_tokens)
    return DominoHead(target, gru_size=recipe.gru_size, rank=recipe.correction_rank, **sizes)
