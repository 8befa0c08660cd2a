"""Packed rows of a ragged verify: sequences with different numbers of rows, without padding between them.

Whatever treats rows alike (embedding, GEMMs, norms, MLP, the output matrix) computes the packed rows only, and the
Triton kernel of verify attention finds those of a sequence by itself. Other attention and recurrence find the rows of a
sequence side by side in a rectangle [B, N], as in a verify of all drafts: their inputs are spread over it before them,
and the outputs are packed again. The number of packed rows is fixed, so that a CUDA graph holds for any division of
them; which row belongs to which sequence is known on the device only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.common.upload import upload


class PackedRows(NamedTuple):
    """Where the R packed rows of B sequences are in the rectangle [B, N], and back.

    places  int64 [R]: b * N + i of row i of sequence b
    rows    int64 [B * N]: the packed row of each place; of places without one, that of the sequence's first row, so
            that what is computed there is finite
    firsts  int64 [B + 1]: the first packed row of each sequence, then R
    """

    places: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B * N, ...] -> [R, ...]."""
        return x.index_select(0, self.places)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [B * N, ...]."""
        return x.index_select(0, self.rows)


def pack_rows(counts: torch.Tensor, most: int, total: int) -> PackedRows:
    """Packed rows of sequences with counts int64 [B] of rows each, at least 1 and at most `most`, `total` in all."""
    place = torch.arange(most, device=counts.device)
    firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    first = firsts[:-1, None]
    exists = place < counts[:, None]
    rows = torch.where(exists, first + place, first).flatten()
    # A boolean index would wait for the device: places without a row are written past the end.
    places = counts.new_zeros(total + 1)
    places[torch.where(exists.flatten(), rows, total)] = torch.arange(len(rows), device=counts.device)
    return PackedRows(places[:total], rows, firsts)


def rows_of_groups(first: int, others: int, most: int, device: torch.device) -> PackedRows:
    """Packed rows of so many sequences with `most` rows each, and after them others with one row."""
    counts = upload([most] * first + [1] * others, device)
    return pack_rows(counts, most, first * most + others)
