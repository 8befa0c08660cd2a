"""Lookup of n-grams in other answers, finished or running, by chained hash tables, without a host read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.dispatch import op

LEVELS = 3  # lengths of n-grams: the shortest, twice and four times as long
HOPS = 4  # places that are compared for each length: others with the same hash are skipped
PRIME = 2**31 - 1
BASE = 1_103_515_245
SEPARATOR = -1  # after each answer, and where nothing is


class CorpusIndex(NamedTuple):
    """Finished answers in a ring of C tokens, and for each length of n-grams, longest first, a table of the places that
    they end at: places 0 to C - 1 of the ring, and C + r * W + i for token i of row r of the running requests.

    An n-gram is found through the newest place with its hash and, from there, the places before it. The tokens
    themselves are compared, so that equal hashes and places that were overwritten only cost a draft.

    ring      int32 [C]: each answer after the end of its prompt, and before a separator
    newest    int32 [LEVELS, H]: by hash, the newest place; -1: none. H is a power of two
    earlier   int32 [LEVELS, C + R * W]: by place, the one with the same hash before it; -1: none
    powers    int64 [longest]: of `BASE` modulo `PRIME`
    shortest  length of the shortest n-grams
    """

    ring: torch.Tensor
    newest: torch.Tensor
    earlier: torch.Tensor
    powers: torch.Tensor
    shortest: int

    @classmethod
    def empty(cls, size: int, shortest: int, running: torch.Tensor) -> CorpusIndex:
        """Room for `size` tokens of finished answers, beside those of running requests [R, W]."""
        assert shortest << (LEVELS - 1) < size < size + running.numel() < 2**31

        def nothing(*shape: int) -> torch.Tensor:
            return torch.full(shape, SEPARATOR, dtype=torch.int32, device=running.device)

        powers = [pow(BASE, power, PRIME) for power in range(shortest << (LEVELS - 1))]
        numbers = torch.tensor(powers, dtype=torch.int64, device=running.device)
        earlier = nothing(LEVELS, size + running.numel())
        return cls(nothing(size), nothing(LEVELS, _table(size)), earlier, numbers, shortest)

    @staticmethod
    def bytes_of(size: int, running: int) -> int:
        """Its memory, with so many tokens in the ring and of running requests."""
        return 4 * (size + LEVELS * (_table(size) + size + running))

    @property
    def is_cuda(self) -> bool:
        return self.ring.is_cuda

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.shortest << level for level in reversed(range(LEVELS)))

    def clear(self) -> None:
        """Forget everything."""
        for table in (self.ring, self.newest, self.earlier):
            table.fill_(SEPARATOR)


def _table(size: int) -> int:
    return 1 << (size - 1).bit_length()


def corpus_insert_ref(index: CorpusIndex, texts: torch.Tensor, start: int) -> None:
    """Write finished answers to the ring, from place `start` on, and add their n-grams to the tables.

    texts int32 [2, T], T <= C: tokens, with a separator after each answer, and whether an n-gram that ends there is
    added. N-grams that contain a separator, or begin before the texts, are not.
    """
    tokens, adds = texts[0].long(), texts[1].bool()
    places = (start + torch.arange(len(tokens), device=tokens.device)) % len(index.ring)
    index.ring[places] = texts[0]
    before = torch.nn.functional.pad(tokens, (len(index.powers) - 1, 0), value=SEPARATOR)
    _add(index, before.unfold(0, len(index.powers), 1).flip(1), adds, places)


def corpus_extend_ref(
    index: CorpusIndex,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    accepted: torch.Tensor,
    count: int,
) -> None:
    """Add n-grams of running requests to the tables: those whose next token is known after a verify.

    tokens int64 [R, W] of all device rows; rows, lengths int64 [B]: of each sequence its row, of which row 0 is
    padding, and the index of the token before those that the verify emitted; accepted int64 [B], less than `count`:
    drafts that it accepted.
    """
    step = torch.arange(count, device=rows.device)
    ends = lengths[:, None] - 1 + step
    adds = (step <= accepted[:, None]) & (rows > 0)[:, None] & (ends >= 0)
    places = len(index.ring) + rows[:, None] * tokens.shape[1] + ends
    windows = _suffixes(tokens, rows.repeat_interleave(count), ends.flatten(), len(index.powers))
    added = adds.flatten().nonzero()[:, 0]
    _add(index, windows[added], adds.flatten()[added], places.flatten()[added])


def _suffixes(tokens: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """int64 [n, longest]: the tokens of rows [n] up to place `ends` [n], newest first; less than -1 before them."""
    back = ends[:, None] - torch.arange(longest, device=ends.device)
    return tokens[rows[:, None], back.clamp(min=0)].masked_fill(back < 0, SEPARATOR - 1)


def _add(index: CorpusIndex, windows: torch.Tensor, adds: torch.Tensor, places: torch.Tensor) -> None:
    """Add the n-grams that end at `places` int64 [n], as if one after the other: windows int64 [n, longest], newest
    token first; adds bool [n]."""
    for level, length in enumerate(index.lengths):
        added = (adds & (windows[:, :length] >= 0).all(1)).nonzero()[:, 0]
        hashes = _hashes(index, windows[added], length)
        order = hashes.argsort(stable=True)
        hashes, own = hashes[order], places[added[order]].int()
        again = hashes[1:] == hashes[:-1]  # as the place before it
        before = index.newest[level, hashes]
        before[1:] = torch.where(again, own[:-1], before[1:])
        index.earlier[level, places] = SEPARATOR
        index.earlier[level, own.long()] = before
        last = torch.cat([~again, again.new_ones(min(1, len(own)))])
        index.newest[level, hashes[last]] = own[last]


def _hashes(index: CorpusIndex, windows: torch.Tensor, length: int) -> torch.Tensor:
    terms = (windows[:, :length] + 1) * index.powers[:length] % PRIME
    return (terms.sum(1) % PRIME) & (index.newest.shape[1] - 1)


def corpus_drafts_ref(
    index: CorpusIndex,
    tokens: torch.Tensor,
    known: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace drafts by what followed the newest tokens elsewhere, where the index has them.

    tokens int64 [R, W] of all device rows; known int64 [R]: index of each row's newest token; rows int64 [B]; drafts
    int64 [B, n], of which the first `drafted` int64 [B] count. The longest n-gram wins, and its newest place among
    equals. Drafts end with the answer they come from; the others are the newest token repeated.
    Returns drafts int64 [B, n], drafted int64 [B] and which are of the corpus, int64 [B] (1 or 0).
    """
    size, width = len(index.ring), tokens.shape[1]
    suffix = _suffixes(tokens, rows, known[rows], len(index.powers))
    back = torch.arange(len(index.powers), device=rows.device)

    def text_at(places: torch.Tensor) -> torch.Tensor:
        running = tokens.flatten()[(places - size).clamp(0, tokens.numel() - 1)]
        return torch.where(places < size, index.ring[places.clamp(max=size - 1)].long(), running)

    hit = torch.full_like(rows, -1)
    for level, length in enumerate(index.lengths):
        place = index.newest[level, _hashes(index, suffix, length)].long()
        for _ in range(HOPS):
            first, column = place[:, None] - back[:length], (place - size) % width
            text = text_at(torch.where(place[:, None] < size, first % size, first))
            # An earlier request's place may be past the tokens of the one that has its row now.
            there = (column >= length - 1) & (column < known[((place - size) // width).clamp(min=0)])
            same = (text == suffix[:, :length]).all(1) & (there | (place < size)) & (place >= 0)
            hit = torch.where((hit < 0) & same, place, hit)
            place = torch.where(place >= 0, index.earlier[level, place], -1).long()
    step = torch.arange(1, drafts.shape[1] + 1, device=rows.device)
    row, column = (hit - size) // width, (hit - size) % width
    ahead = hit[:, None] + step
    is_ring = (hit < size)[:, None]
    text = text_at(torch.where(is_ring, ahead % size, ahead))
    there = torch.where(is_ring, text >= 0, column[:, None] + step <= known[row.clamp(min=0)][:, None])
    there = (there & (hit >= 0)[:, None]).long().cumprod(1)
    count = there.sum(1)
    found = count > 0
    text = torch.where(there.bool(), text, suffix[:, :1])
    return torch.where(found[:, None], text, drafts), torch.where(found, count, drafted), found.long()


_PLACE = "specbatch.kernels.drafting.corpus_triton"
corpus_insert = op(corpus_insert_ref, f"{_PLACE}:corpus_insert")
corpus_extend = op(corpus_extend_ref, f"{_PLACE}:corpus_extend")
corpus_drafts = op(corpus_drafts_ref, f"{_PLACE}:corpus_drafts")
