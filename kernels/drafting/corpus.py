"""Lookup of n-grams in earlier answers, held in a ring of tokens with chained hash tables, without a host read."""

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
    """Answers in a ring of C tokens, and for each length of n-grams, longest first, a table of the places they end at.

    An n-gram is found through the newest place with its hash and, from there, the places before it. The tokens
    themselves are compared, so that equal hashes and places that were overwritten only cost a draft.

    tokens    int32 [C]: each answer after the end of its prompt, and before a separator
    newest    int32 [LEVELS, H]: by hash, the newest place; -1: none. H is a power of two
    earlier   int32 [LEVELS, C]: by place, the one with the same hash before it; -1: none
    powers    int64 [longest]: of `BASE` modulo `PRIME`
    shortest  length of the shortest n-grams
    """

    tokens: torch.Tensor
    newest: torch.Tensor
    earlier: torch.Tensor
    powers: torch.Tensor
    shortest: int

    @classmethod
    def empty(cls, size: int, shortest: int, device: torch.device) -> CorpusIndex:
        """Room for `size` tokens."""
        assert size > shortest << (LEVELS - 1)

        def nothing(*shape: int) -> torch.Tensor:
            return torch.full(shape, SEPARATOR, dtype=torch.int32, device=device)

        powers = [pow(BASE, power, PRIME) for power in range(shortest << (LEVELS - 1))]
        numbers = torch.tensor(powers, dtype=torch.int64, device=device)
        return cls(nothing(size), nothing(LEVELS, _table(size)), nothing(LEVELS, size), numbers, shortest)

    @staticmethod
    def bytes_of(size: int) -> int:
        """Its memory."""
        return 4 * (size + LEVELS * (_table(size) + size))

    @property
    def is_cuda(self) -> bool:
        return self.tokens.is_cuda

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.shortest << level for level in reversed(range(LEVELS)))

    def clear(self) -> None:
        """Forget everything."""
        for table in (self.tokens, self.newest, self.earlier):
            table.fill_(SEPARATOR)


def _table(size: int) -> int:
    return 1 << (size - 1).bit_length()


def corpus_insert_ref(index: CorpusIndex, texts: torch.Tensor, start: int) -> None:
    """Write texts to the ring, from place `start` on, and add their n-grams to the tables.

    texts int32 [2, T], T <= C: tokens, with a separator after each answer, and whether an n-gram that ends there is
    added. N-grams that contain a separator, or begin before the texts, are not.
    """
    tokens, adds = texts[0].long(), texts[1].bool()
    size, table = len(index.tokens), index.newest.shape[1]
    places = (start + torch.arange(len(tokens), device=tokens.device)) % size
    index.tokens[places] = texts[0]
    for level, length in enumerate(index.lengths):
        windows = torch.nn.functional.pad(tokens, (length - 1, 0), value=SEPARATOR).unfold(0, length, 1).flip(1)
        added = (adds & (windows >= 0).all(1)).nonzero()[:, 0]
        hashes = (_terms(windows[added], index.powers).sum(1) % PRIME) & (table - 1)
        order = hashes.argsort(stable=True)
        hashes, added = hashes[order], places[added[order]].int()
        again = hashes[1:] == hashes[:-1]  # as the place before it
        before = index.newest[level, hashes]
        before[1:] = torch.where(again, added[:-1], before[1:])
        index.earlier[level, places] = SEPARATOR
        index.earlier[level, added.long()] = before
        last = torch.cat([~again, again.new_ones(min(1, len(added)))])
        index.newest[level, hashes[last]] = added[last]


def _terms(tokens: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """What each of tokens int64 [..., n], newest first, adds to the hash."""
    return (tokens + 1) * powers[: tokens.shape[-1]] % PRIME


def corpus_drafts_ref(
    index: CorpusIndex,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace drafts by what followed the newest tokens in the corpus, where it has them.

    tokens int64 [R, W] of all device rows; rows int64 [B]; lengths int64 [B]: index of each sequence's newest token;
    drafts int64 [B, n], of which the first `drafted` int64 [B] count. The longest n-gram wins, and its newest place
    among equals. Drafts end with the answer they come from; the others are the newest token repeated.
    Returns drafts int64 [B, n], drafted int64 [B] and which are of the corpus, int64 [B] (1 or 0).
    """
    size, table = len(index.tokens), index.newest.shape[1]
    back = torch.arange(len(index.powers), device=rows.device)
    ends = lengths[:, None] - back
    suffix = tokens[rows[:, None], ends.clamp(min=0)].masked_fill(ends < 0, SEPARATOR - 1)  # newest first
    terms = _terms(suffix, index.powers)
    hit = torch.full_like(lengths, -1)
    for level, length in enumerate(index.lengths):
        place = index.newest[level, (terms[:, :length].sum(1) % PRIME) & (table - 1)].long()
        for _ in range(HOPS):
            text = index.tokens[(place[:, None] - back[:length]) % size]
            same = (text == suffix[:, :length]).all(1) & (place >= 0)
            hit = torch.where((hit < 0) & same, place, hit)
            place = torch.where(place >= 0, index.earlier[level, place], -1).long()
    step = torch.arange(drafts.shape[1], device=rows.device)
    text = index.tokens[(hit[:, None] + 1 + step) % size].long()
    known = ((text >= 0) & (hit >= 0)[:, None]).long().cumprod(1)
    count = known.sum(1)
    found = count > 0
    text = torch.where(known.bool(), text, suffix[:, :1])
    return torch.where(found[:, None], text, drafts), torch.where(found, count, drafted), found.long()


corpus_insert = op(corpus_insert_ref, "specbatch.kernels.drafting.corpus_triton:corpus_insert")
corpus_drafts = op(corpus_drafts_ref, "specbatch.kernels.drafting.corpus_triton:corpus_drafts")
