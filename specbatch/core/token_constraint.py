"""Grammars on the device: the state of each row of a verify, and the tokens that may follow it.

The state of a request advances by the tokens that it accepts, and that of a row by the drafts before it, as if they had
been generated. A draft that the grammar does not allow is therefore never accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.grammar.token_automaton import FREE
from specbatch.kernels.sampling.grammar_mask import grammar_mask


class Constraint(NamedTuple):
    """Of B requests.

    tables   int16 [cells]: of each grammar the classes of all tokens, then for each state the one after a token of each
             class, or -1 (see `TokenAutomaton`)
    starts   int64 [B]: where its table starts
    classes  int64 [B]: how many classes it has
    states   int64 [B]: after the root. Nothing constrains a request in the state `FREE`
    """

    tables: torch.Tensor
    starts: torch.Tensor
    classes: torch.Tensor
    states: torch.Tensor

    def after(self, states: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The states [B] after tokens [B], `FREE` after one that is not allowed."""
        kind = self.tables[self.starts + tokens]
        found = self.tables[self.starts + vocabulary + states.clamp(min=0) * self.classes + kind]
        return torch.where(states < 0, FREE, found.long())

    def mask(self, logits: torch.Tensor, states: torch.Tensor) -> None:
        """Set logits float32 [B, n, V] of tokens that are not allowed in states [B, n] to -inf. Rows after a token that
        is not allowed stay as they are: none of them is reached."""
        grammar_mask(logits, self.tables, self.starts, self.classes, states)
