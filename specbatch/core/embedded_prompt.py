"""Prompts with given embeddings for some of their tokens, such as those of an image from a vision encoder."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.errors import SpecbatchError, refuse


@dataclass(frozen=True)
class EmbeddedPrompt:
    """Token ids, and embeddings that replace those of some of the tokens.

    embeddings: floating point [n, hidden_size] of the target, on any device, by the position of the first of n tokens.
    The token ids there are placeholders of the vocabulary, as chat templates insert them for images. N-gram lookup uses
    these ids, and so do drafts whose embeddings have another width than the target's. All other drafters that read
    tokens (EAGLE, EAGLE-3, MTP, a draft model) get the given embeddings, except that the draft model of a chain looks
    up the last token of a prompt. DFLASH and DSpark read no tokens of a prompt. Prefixes are shared up to the first
    such position. Positions count tokens: a target with two-dimensional positions for images (mrope) sees them as text.
    """

    token_ids: Sequence[int]
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def checked(self, index: int, hidden: int) -> EmbeddedPrompt:
        """The prompt in plain types. Raises SpecbatchError if the embeddings do not fit; index: of the prompt."""
        try:
            tokens = list(map(operator.index, self.token_ids))
        except TypeError:
            raise refuse(f"prompt {index}", f"{self.token_ids!r:.60}", "give text or a list of token ids") from None
        if not isinstance(self.embeddings, Mapping):
            raise _misfit(index, type(self.embeddings).__name__, "give tensors by their first position")
        for start, values in self.embeddings.items():
            if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < len(tokens):
                raise _misfit(index, start, f"positions go from 0 to {len(tokens) - 1}")
            if not isinstance(values, torch.Tensor) or not values.is_floating_point():
                found = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
                raise _misfit(index, f"{found} at {start}", "give tensors of floating point")
            if values.dim() != 2 or values.shape[1] != hidden or not 1 <= len(values) <= len(tokens) - start:
                most = len(tokens) - start
                raise _misfit(index, f"{list(values.shape)} at {start}", f"use [n, {hidden}] with n from 1 to {most}")
            if not values.isfinite().all():
                raise _misfit(index, f"values that are not finite at {start}", "check their source")
        parts = dict(sorted(self.embeddings.items()))
        for (start, values), (following, _) in pairwise(parts.items()):
            if start + len(values) > following:
                raise _misfit(index, f"{len(values)} rows at {start}", f"those of position {following} overlap them")
        return EmbeddedPrompt(tokens, {start: values.detach() for start, values in parts.items()})


class EmbeddingOverrides(NamedTuple):
    """Embeddings [n, hidden_size] that replace those of a pass's tokens at `places` int64 [n]."""

    places: torch.Tensor
    values: torch.Tensor


def embed(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    overrides: EmbeddingOverrides | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """tokens int64 [T], embedding [V, hidden_size] -> [T, hidden_size]. scale: of the embedding, not of the overrides,
    rounded to its dtype."""
    x = F.embedding(tokens, embedding)
    if scale is not None:
        x = x * torch.tensor(scale, dtype=x.dtype).item()
    return x if overrides is None else x.index_copy_(0, *overrides)


def _misfit(index: int, value: object, works: str) -> SpecbatchError:
    return refuse(f"embeddings of prompt {index}", value, works)
