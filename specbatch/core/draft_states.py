"""What penalties, logit bias, bad words and grammars change of the logits of drafts.

A draft that the target's adjusted logits make unlikely is rejected, so drafters adjust theirs, too. Which drafts are
verified never changes what the target emits. Grammars advance by the drafts. Penalties are those at the root for all
drafts of a step: counts that include the drafts hardly raise the accept length, and each node of a tree would need its
own. Bad words of several tokens and `min_tokens` are left to the target.
"""

from __future__ import annotations

import torch

from specbatch.core.logit_adjustments import ANY, Adjustments, History, adjusted_logits
from specbatch.core.token_constraint import NEVER
from specbatch.kernels.sampling.grammar_mask import grammar_mask

# The lowest logit that penalties and bad words leave: above those that a grammar does not allow, as for the target.
_LOWEST = NEVER / 2


class DraftStates:
    """The adjustments while a drafter chooses, and the states of grammars of W nodes of each request, at first of the
    roots, W = 1."""

    def __init__(self, adjustments: Adjustments, history: History, vocabulary: int) -> None:
        """history: before the first draft. vocabulary: size of the target's."""
        self._constraint = adjustments.constraint
        self._states = None if self._constraint is None else self._constraint.states[:, None]
        self._host = adjustments.host
        self._paths: list[list[list[int]]] = [[[]] for _ in history.lengths]  # the drafts before each node
        self._masks = None if self._host is None else self._host.masks(self._paths)
        self._history = history
        self._vocabulary = vocabulary
        self._fixed = adjustments._replace(constraint=None, banned=_single(adjustments.banned))

    def mask(self, scores: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Adjust scores [B, W, Vd] of tokens after the nodes in place, and return them. Those of tokens that a grammar
        does not allow are `NEVER`. ids int64 [Vd] or [B, Vd]: the token of each column; None if they are the same."""
        fixed, constraint = self._fixed, self._constraint
        if fixed.bias_tokens is not None or fixed.penalties is not None or fixed.banned is not None:
            self._adjust(scores, ids)
        if constraint is not None:
            assert self._states is not None
            grammar_mask(scores, constraint.tables, constraint.grammars, self._states, NEVER, ids)
        if self._masks is not None:
            self._masks.mask(scores, NEVER, ids)
        return scores

    def follow(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """Go on to the nodes with these tokens, int64 [B, W']. parents int64 [B, W']: the node before each; None if
        there are as many, in the same order."""
        if self._constraint is not None:
            assert self._states is not None
            before = self._states if parents is None else self._states.gather(1, parents)
            self._states = self._constraint.after(before, tokens)
        if self._host is not None:
            above = [range(tokens.shape[1])] * len(tokens) if parents is None else parents.tolist()
            self._paths = [
                [[*paths[parent], token] for parent, token in zip(rows, drafts, strict=True)]
                for paths, rows, drafts in zip(self._paths, above, tokens.tolist(), strict=True)
            ]
            self._masks = self._host.masks(self._paths)

    def _adjust(self, scores: torch.Tensor, ids: torch.Tensor | None) -> None:
        if ids is None:
            adjusted = adjusted_logits(scores, self._fixed, self._history)
        else:
            columns = ids.expand(len(scores), -1)[:, None].expand_as(scores)
            wide = scores.new_zeros(*scores.shape[:2], self._vocabulary).scatter_(2, columns, scores)
            adjusted = adjusted_logits(wide, self._fixed, self._history).gather(2, columns)
        scores.copy_(adjusted.clamp_(min=_LOWEST))


def _single(banned: torch.Tensor | None) -> torch.Tensor | None:
    """Of words int64 [B, W, L] those of one token, int64 [B, W, 1]."""
    if banned is None:
        return None
    return torch.where((banned[:, :, :-1] == ANY).all(-1), banned[:, :, -1], ANY)[:, :, None]
