"""A float64 reference of XPress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from block_drafts import Reference


class XPressReference(Reference):
    """The hidden states are those of DFlash. The refiner is evaluated row by row, with the tensors of the file."""

    def logits(self, features: torch.Tensor, anchor: int, count: int, drafts: Sequence[int]) -> torch.Tensor:
        """Logits [len(drafts), V] of drafts, each given all before it."""
        hidden = self.hidden(features, anchor, count)
        base = self.target.logits(hidden[1:].float()).double()
        if self.config.get("xpress_topc"):
            least = base.topk(self.config["xpress_topc"]).values[:, -1:]
            base = base.masked_fill(base < least, -torch.inf)
        bias = self.bias(hidden, [self.predecessor, anchor, *drafts[:-1]])
        return base[: len(drafts)] + bias[1 : len(drafts) + 1]

    def passes(self, features: torch.Tensor, anchor: int, count: int, passes: int) -> torch.Tensor:
        """The greedy tokens [count] of a number of passes."""
        hidden = self.hidden(features, anchor, count)
        base = self.target.logits(hidden[1:].float()).double()
        tokens = base.argmax(-1)
        for _ in range(passes):
            tokens = (base + self.bias(hidden, [self.predecessor, anchor, *tokens[:-1].tolist()])[1:]).argmax(-1)
        return tokens

    def bias(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), V], of rows with hidden states [rows, H] and a token before each of the first rows."""
        own = {name.removeprefix("xpress_head."): value for name, value in self.tensors.items()}
        mean, rows, found = own["down_g.weight"] @ hidden.mean(0), [], []
        for h, token in zip(hidden, tokens, strict=False):
            read = torch.cat([own["down_h.weight"] @ h, mean, own["w1.weight"][token]])
            rows.append(own["in_proj.weight"] @ read)
            place = len(rows) - 1
            mixed = sum((own["mix.L"][:, place, at] * x for at, x in enumerate(rows)), rows[place])
            gate, up = (own[f"mlp.{part}_proj.weight"] @ mixed for part in ("gate", "up"))
            found.append(own["w2.weight"] @ (mixed + own["mlp.down_proj.weight"] @ (F.silu(gate) * up)))
        return torch.stack(found)


@pytest.fixture
def reference() -> type[XPressReference]:
    return XPressReference
