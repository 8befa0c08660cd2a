"""Grammars of requests: the tokens that may follow each row of a verify and each draft.

Most grammars are automata on the device, which has the state of each row (`Constraint`). Others are matched on the
host, which sends masks (`HostMasks`, see `grammar.host_matcher`) and is asked while a step drafts (`HostGrammars`).

The state of a request advances by the tokens that it accepts, and that of a row by the drafts before it, as if they had
been generated. A draft that the grammar does not allow is therefore never accepted. Drafters know the states, too, and
choose from the tokens that are allowed: their distributions are those of the masked logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specbatch.kernels.sampling.grammar_mask import grammar_mask, grammar_step

# The logit of a draft that is not allowed: below all others, and finite, also in FP16. A draft vocabulary may have no
# token that is allowed; its distribution then is one nevertheless, and whatever is drafted is rejected.
NEVER = -60_000.0


class HostMasks(NamedTuple):
    """Tokens that may follow the rows of H of the requests of a pass, as the host knows them.

    requests  int64 [H]: their places in the pass
    bits      int32 [H, n, ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t may follow
    """

    requests: torch.Tensor
    bits: torch.Tensor

    def mask(self, logits: torch.Tensor, value: float = -torch.inf, ids: torch.Tensor | None = None) -> None:
        """Set logits [B, n, V] of other tokens to a value. Requests with fewer rows have the first ones. ids int64 [V],
        or [B, V] of each request: the token of each column; None if they are the same."""
        token = torch.arange(logits.shape[2], device=logits.device) if ids is None else ids
        token = token[self.requests] if token.dim() == 2 else token.expand(len(self.requests), -1)
        word, bit = token >> 5, (token & 31).int()
        for row in range(self.bits.shape[1]):
            is_out = (self.bits[:, row].gather(1, word) >> bit & 1) == 0
            logits[self.requests, row] = logits[self.requests, row].masked_fill_(is_out, value)


class HostGrammars(Protocol):
    """The grammars on the host of the B requests of a step, while it drafts. Each call waits for the device."""

    def masks(self, paths: Sequence[Sequence[Sequence[int]]]) -> HostMasks:
        """Tokens that may follow W nodes of each request, given the drafts from the root to each. All tokens follow a
        draft that may not be there."""
        ...

    def replace(self, drafts: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Constraint.replace`."""
        ...


class Constraint(NamedTuple):
    """Of B requests.

    tables    int16 [cells]: of all grammars (see `grammar_mask`)
    grammars  int64 [B, 3]: of each request
    states    int64 [B]: after the root. Nothing constrains a request in the state `FREE`
    """

    tables: torch.Tensor
    grammars: torch.Tensor
    states: torch.Tensor

    def after(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after tokens [B, n] in states [B, n], `FREE` after one that is not allowed."""
        return grammar_step(states, tokens, self.tables, self.grammars)

    def forced(self, states: torch.Tensor) -> torch.Tensor:
        """`TokenAutomaton.forced` of states [B, n]: int64 [B, n], -1 where there is none."""
        _, rows, width = self.grammars[:, :, None].unbind(1)
        end = rows + (states.clamp(min=0) + 1) * width
        low, high = self.tables[end - 2].long() & 0xFFFF, self.tables[end - 1].long()
        return torch.where(states < 0, -1, high << 16 | low)

    def mask(self, logits: torch.Tensor, states: torch.Tensor) -> None:
        """Set logits float32 [B, n, V] of tokens that are not allowed in states [B, n] to -inf. Rows after a token that
        is not allowed stay as they are: none of them is reached."""
        grammar_mask(logits, self.tables, self.grammars, states)

    def replace(self, drafts: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of drafts int64 [B, n] after the roots, of which the first `drafted` int64 [B] count, keep those before the
        first that may not follow, and go on with tokens that are forced: drafts, and how many of them count.

        Drafting what is forced follows the jump-forward decoding of SGLang (Zheng et al. 2024, arXiv 2312.07104). Here
        the target decides which tokens the text consists of."""
        states, found = self.states[:, None], []
        given = torch.arange(drafts.shape[1], device=drafts.device) < drafted[:, None]
        is_given = is_kept = torch.ones_like(states, dtype=torch.bool)
        count = torch.zeros_like(drafted)
        for place in range(drafts.shape[1]):
            draft, forced = drafts[:, place, None], self.forced(states)
            after = self.after(states, draft)
            is_given = is_given & given[:, place, None] & ((after >= 0) | (states < 0))
            is_kept = is_kept & (is_given | (forced >= 0))
            found.append(torch.where(is_given, draft, forced.clamp(min=0)))
            states = torch.where(is_given, after, self.after(states, found[-1]))
            count = count + is_kept[:, 0]
        return torch.cat(found, 1), count
