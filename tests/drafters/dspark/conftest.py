"""A float64 reference of DSpark."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from block_drafts import Reference


class DSparkReference(Reference):
    """The hidden states are those of DFlash. The chain of tokens is walked with the config's raw keys."""

    def rows(self, features: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
        """Hidden states [count, H] of the rows that draft."""
        of_anchor = self.config.get("sample_from_anchor", True)
        return self.hidden(features, anchor, count - of_anchor)[0 if of_anchor else 1 :]

    def before(self, anchor: int, drafts: Sequence[int]) -> torch.Tensor:
        """Embeddings [n, rank] of the tokens before each draft."""
        return self.tensors["markov_head.markov_w1.weight"][[anchor, *drafts[:-1]]]

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        hidden, embedded = self.rows(features, anchor, count)[: len(drafts)], self.before(anchor, drafts)
        kind, state = self.config["markov_head_type"], torch.zeros(self.config["markov_rank"]).double()
        logits = self.target.logits(hidden.float()).double()
        ids = self.tensors.get("d2t", torch.zeros(logits.shape[1]).double()).long()
        ids = torch.arange(len(ids)) + ids
        for row, (h, e) in enumerate(zip(hidden, embedded, strict=True)):
            latent = e
            if kind == "gated":
                latent = e * torch.sigmoid(self.project(torch.cat([h, e]), "markov_head.gate_proj"))
            if kind == "rnn":
                gate, new, out = self.project(torch.cat([state, e, h]), "markov_head.joint_proj").chunk(3)
                state = state * torch.sigmoid(gate) + torch.tanh(new) * (1 - torch.sigmoid(gate))
                latent = torch.tanh(out)
            logits[row, ids] += self.tensors["markov_head.markov_w2.weight"] @ latent
        return logits

    def confidence(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        """The predicted chance [n] that each draft is accepted."""
        read = self.rows(features, anchor, count)
        if self.config.get("confidence_head_with_markov", True):
            read = torch.cat([read, self.before(anchor, drafts)], -1)
        return torch.sigmoid(self.project(read, "confidence_head.proj"))[:, 0]


@pytest.fixture
def reference() -> type[DSparkReference]:
    return DSparkReference
