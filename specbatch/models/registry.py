"""From a checkpoint to a model that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbatch.errors import refuse
from specbatch.models.llama import Llama

if TYPE_CHECKING:
    from specbatch.weights import Checkpoint


def load_model(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, max_positions: int) -> Llama:
    """Build the model of a checkpoint with room for `max_positions` positions."""
    return Llama(checkpoint.config, checkpoint.tensor, dtype=dtype, device=device, max_positions=max_positions)


def parse_skip(draft: str, layers: int) -> frozenset[int] | None:
    """Layers that "self:skip=12-15,20" leaves out of a model with `layers` layers; None for any other draft."""
    if not draft.startswith("self"):
        return None
    skipped: set[int] = set()
    head, _, ranges = draft.partition("=")
    try:
        if head != "self:skip":
            raise ValueError
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            skipped |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise refuse("draft", draft, "write self:skip=FIRST-LAST, for example self:skip=12-15") from None
    if not skipped or not skipped < set(range(layers)):
        raise refuse("draft", draft, f"the model has layers 0-{layers - 1}; skip some of them and keep at least one")
    return frozenset(skipped)
