"""What the kernels of recurrent layers have in common: which tokens of the last verify still have to go into a state.

An attention layer forgets rejected drafts by its length. A state cannot: it must be that behind the last accepted
token. So a verify leaves the state as it was before it and keeps the small inputs of its rows, and the next verify
begins by folding those in that were accepted. The state is read once and written once a step, and nothing is ever
copied back (SGLang's and MLX's replay; `Verify` says which rows there are).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.sampling.tree_verify import tree_depths


class StateReplay(NamedTuple):
    """A verify of N rows for each of the sequences on device rows `rows` int64 [B], and what of the one before is kept.

    folded int64 [R]: tokens of each device row's last verify that are folded in by this one, 0 behind a prompt; kept
    int64 [R, M]: which rows of that verify they are, in order (the first `folded` of them matter); None: the first
    ones, as in a chain. ancestors int64 [B, N]: a tree, bit j of a word says that the row sees row j, itself included,
    parents before children; None is a chain.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None

    def replayed_rows(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the last verify to be folded in, int64 [B, most], and which of them count, bool [B, most]."""
        places = torch.arange(most, device=self.rows.device)
        order = places.expand(len(self.rows), most) if self.path is None else self.path[self.rows, :most]
        return order, places < self.counts[self.rows][:, None]

    def sees(self, rows: int) -> torch.Tensor:
        """bool [B, N, N]: does row i come after row j, or is it j?"""
        places = torch.arange(rows, device=self.rows.device)
        if self.ancestors is None:
            return (places[:, None] >= places).expand(len(self.rows), rows, rows)
        return (self.ancestors[:, :, None] >> places & 1).bool()

    def depths(self, rows: int) -> torch.Tensor:
        """int64 [B, N]: tokens between the root and each row, 0 for the root."""
        if self.ancestors is None:
            return torch.arange(rows, device=self.rows.device).expand(len(self.rows), rows)
        return tree_depths(self.ancestors)
