"""A float64 reference of Domino."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from block_drafts import Reference


class DominoReference(Reference):
    """The hidden states are those of DFlash. The GRU is that of torch, over the tokens before each draft."""

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        shifted, size = self.config["shift_label"], self.config["gru_hidden_dim"]
        hidden = self.hidden(features, anchor, count - shifted)[0 if shifted else 1 :][: len(drafts)]
        logits = self.target.logits(hidden.float()).double()
        gru = torch.nn.GRU(hidden.shape[1], size, bias=False, batch_first=True).double()
        gru.load_state_dict(
            {f"weight_{part}_l0": self.tensors[f"prefix_gru.weight_{part}_l0"] for part in ("ih", "hh")}
        )
        with torch.no_grad():
            states = gru(self.embedding[[anchor, *drafts[:-1]]][None])[0][0]
        inner = F.silu(self.project(torch.cat([hidden, states], -1), "embed_proj.0"))
        first = self.config["pure_draft_prefix_len"]
        logits[first:] += self.project(inner, "embed_proj.2")[first:]
        return logits


@pytest.fixture
def reference() -> type[DominoReference]:
    return DominoReference
