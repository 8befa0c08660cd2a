"""Ragged batch of a prefill pass: bounds of its sequences on the host, and as tables on the device."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.upload import upload, upload_to

_MOST_SIZES = 4  # of tiles in one pass
_PAGE = 128  # tokens, of a cache of these spans alone: kernels copy such pages in bulk


class RaggedBatch:
    """Concatenated query rows of several sequences ("spans"; `cu_seqlens` of FlashAttention are `offsets`).

    Span s holds rows offsets[s]..offsets[s + 1] - 1: tokens starts[s]..ends[s] - 1 of the sequence on device row
    rows[s] of page_table int64 [R, P]. Its keys are tokens 0..ends[s] - 1. No span is empty.
    """

    def __init__(
        self, starts: list[int], ends: list[int], rows: list[int], page_table: torch.Tensor, page_size: int
    ) -> None:
        self.starts, self.ends, self.rows = starts, ends, rows
        self.page_table, self.page_size = page_table, page_size
        self.counts = [end - start for start, end in zip(starts, ends, strict=True)]
        self.offsets = _running(self.counts)
        self.fresh: bool = not any(starts)  # no span has a prefix: the keys are those of this very pass
        self.scores = sum(end * (end + 1) - start * (start + 1) for start, end in zip(starts, ends, strict=True)) // 2
        self._tiles: dict[int, torch.Tensor] = {}

    @cached_property
    def table(self) -> torch.Tensor:
        """int64 [4, S + 1]: starts, ends, rows, offsets; the last column of the first three is unused."""
        return upload(self.host_table(len(self.counts)), self.page_table.device)

    def host_table(self, most: int) -> np.ndarray:
        """`table` on the host, with room for `most` spans: int64 [4, most + 1]. Unused spans are empty and begin after
        the last token."""
        table = np.zeros((4, most + 1), np.int64)
        for row, part in zip(table, (self.starts, self.ends, self.rows, self.offsets), strict=True):
            row[: len(part)] = part
        table[3, len(self.offsets) :] = self.offsets[-1]
        return table

    def tiles(self, tokens: int) -> torch.Tensor:
        """int64 [N, 2]: span and first row within it of every tile of `tokens` rows, those with the most keys first,
        so that programs started in this order end at about the same time."""
        if tokens not in self._tiles:
            self._tiles[tokens] = upload(self.host_tiles(tokens), self.page_table.device)
        return self._tiles[tokens]

    def host_tiles(self, tokens: int) -> list[tuple[int, int]]:
        """`tiles` on the host."""
        tiles = [(span, row) for span, count in enumerate(self.counts) for row in range(0, count, tokens)]
        return sorted(tiles, key=lambda tile: -self.starts[tile[0]] - tile[1])

    def full_tiles(self, tokens: int) -> int:
        """How many tiles of `tokens` rows there are, but for those that only exist at fixed addresses and are empty."""
        return len(self.tiles(tokens))

    @property
    def keys_per_query(self) -> float:
        """The mean."""
        return self.scores / self.offsets[-1]

    @cached_property
    def query_bounds(self) -> torch.Tensor:
        """int32 [S + 1]: offsets."""
        return self.table[3].int()

    @cached_property
    def key_bounds(self) -> torch.Tensor:
        """int32 [S + 1]: where each span's keys begin in the concatenation of all spans' keys."""
        return upload(_running(self.ends), self.page_table.device, torch.int32)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """int64 [sum of ends]: KV slot of every key, span by span."""
        lengths = torch.tensor(self.ends)
        owner = torch.repeat_interleave(torch.arange(len(self.ends)), lengths)
        place = torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
        row, place = upload(torch.stack([torch.tensor(self.rows)[owner], place]), self.page_table.device)
        return kv_slots(self.page_table, row, place, self.page_size)

    @property
    def padded_keys(self) -> int:
        """Of all spans in whole pages of their own."""
        return sum(-(-end // _PAGE) * _PAGE for end in self.ends)

    @cached_property
    def alone(self) -> tuple[torch.Tensor, RaggedBatch]:
        """For a cache of the keys of these spans alone, span by span in whole pages: the KV slot of each, int64 [padded
        keys], that of the span's first key for padding; and the spans in such a cache."""
        counts, device = [-(-end // _PAGE) for end in self.ends], self.page_table.device
        firsts = torch.tensor(_running(counts)[:-1])
        table = upload(torch.arange(max(counts)) + firsts[:, None], device)
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        start = (torch.arange(len(owner)) - firsts[owner]) * _PAGE
        rows, ends = torch.tensor(self.rows)[owner], torch.tensor(self.ends)[owner]
        row, start, end = upload(torch.stack([rows, start, ends]), device)[..., None]
        place = start + torch.arange(_PAGE, device=device)
        slots = kv_slots(self.page_table, row, torch.where(place < end, place, 0), self.page_size)
        return slots.flatten(), RaggedBatch(self.starts, self.ends, list(range(len(counts))), table, _PAGE)


class StaticRaggedBatch(RaggedBatch):
    """Up to `most` spans of up to `tokens` tokens in all, at fixed addresses: what a graph reads. fresh: without a
    prefix.

    It has what the device reads; what the host knows of a pass (counts, starts, offsets) is not part of a recording.

    given  int64 [1]: nonzero if the caller supplies the tokens of the pass, see `prompt_inputs`
    """

    def __init__(self, tokens: int, most: int, page_table: torch.Tensor, page_size: int, *, fresh: bool) -> None:
        self.page_table, self.page_size, self.fresh = page_table, page_size, fresh
        self.ends = [tokens if fresh else page_table.shape[1] * page_size]  # the longest there may be
        self._tokens = tokens
        self._empty = most  # a span that always is
        # The table, two cells for `given`, which align the tiles to 16 bytes, then tiles of each size: one copy fills
        # all of them.
        size = 4 * (most + 1)
        self._used = size + 2
        room = self._used + _MOST_SIZES * 2 * (tokens + most)
        self._memory = torch.zeros(room, dtype=torch.int64, device=page_table.device)
        self.table, self.given = self._memory[:size].view(4, most + 1), self._memory[size : size + 1]
        self._tiles = {}

    def tiles(self, tokens: int) -> torch.Tensor:
        """As `RaggedBatch.tiles`; those that a pass does not fill are of the empty span."""
        if tokens not in self._tiles:
            count = self.full_tiles(tokens) + self._empty
            part = self._memory[self._used : self._used + 2 * count].view(count, 2)
            part.copy_(torch.tensor([self._empty, 0], device=part.device))
            self._used += 2 * count
            self._tiles[tokens] = part
        return self._tiles[tokens]

    def full_tiles(self, tokens: int) -> int:
        """As if one span had all tokens."""
        return -(-self._tokens // tokens)

    @property
    def keys_per_query(self) -> float:
        """As if one span had all tokens. The length of a prefix is not known here; it counts as half of the tokens."""
        return self._tokens / 2 if self.fresh else self._tokens

    def load(self, spans: RaggedBatch, *, given: bool = False) -> None:
        """The spans of the next pass."""
        parts = [spans.host_table(self._empty), np.array([given, given])]
        for tokens, tiles in self._tiles.items():
            part, filled = np.full(tuple(tiles.shape), (self._empty, 0)), spans.host_tiles(tokens)
            part[: len(filled)] = filled
            parts.append(part)
        upload_to(self._memory[: self._used], np.concatenate(parts, axis=None))


def _running(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
