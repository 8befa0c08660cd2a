"""State replay: recurrent states advance by the accepted tokens of a verify without checkpoints or copies.

An attention layer forgets rejected drafts by its length. A recurrent state cannot: it must be the state after the last
accepted token. So a verify leaves the state as it was before and keeps the small inputs of its rows, and the next
verify first replays those that were accepted. A state is read once and written once per step, and nothing is ever
copied back (as in SGLang and MLX).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.sampling.tree_verify import tree_depths


class StateReplay(NamedTuple):
    """A verify of N rows for each of the sequences on device rows `rows` int64 [B], and what it replays.

    counts int64 [R]: tokens of each device row's last verify to replay, 0 after a prompt. path int64 [R, M]: which rows
    of that verify they are, in order (the first `counts` matter); None: the first ones, as in a chain. ancestors int64
    [B, N]: a tree, bit j of a word means that the row sees row j, itself included, parents before children; None is a
    chain.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None

    def replayed_rows(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the last verify to replay, int64 [B, most], and which of them exist, bool [B, most]."""
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
