"""N-gram lookup on token rows ("prompt lookup decoding"), with fixed shapes and no host read."""

from __future__ import annotations

import torch

from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.tree_verify import ancestor_words


def lookup_ref(
    tokens: torch.Tensor, last: torch.Tensor, longest: int, shortest: int, count: int, texts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where the end of each row occurred before and copy what followed.

    tokens int64 [B, W]; last int64 [B]: index of each row's newest token (later tokens are ignored).
    The longest match of `longest`..`shortest` tokens wins, the latest occurrence among equals. The copy may run into
    itself: after the newest token it continues periodically, as in LZ77. With more than one of `texts` the next best
    match follows whose copy is another one, and so on.
    Returns (drafts int64 [B, texts, count], found bool [B, texts]); drafts without a match are the newest token
    repeated.
    """
    width = tokens.shape[1]
    place = torch.arange(width, device=tokens.device)
    run = torch.zeros_like(tokens)  # tokens that match, counted backwards from each place
    alive = place < last[:, None]
    for back in range(min(longest, width)):
        suffix = tokens.gather(1, (last - back).clamp(min=0)[:, None])
        shifted = tokens if back == 0 else torch.nn.functional.pad(tokens[:, :-back], (back, 0), value=-1)
        alive = alive & (shifted == suffix) & (last >= back)[:, None]
        run = run + alive
    score = torch.where(run >= shortest, run * width + place, -1)
    step = torch.arange(count, device=tokens.device)
    period = (last[:, None] - place).clamp(min=1)
    drafts, found = [], []
    for text in range(texts):
        best, end = score.max(1)
        found.append(best >= 0)
        end = torch.where(found[-1], end, (last - 1).clamp(min=0))[:, None]
        source = torch.where(found[-1][:, None], end + 1 + step % period.gather(1, end), last[:, None])
        drafts.append(tokens.gather(1, source))
        if text + 1 < texts:
            alike = score >= 0
            for index in range(count):
                following = tokens.gather(1, (place + 1 + index % period).clamp(max=width - 1))
                alike = alike & (following == drafts[-1][:, index, None])
            score = score.masked_fill(alike, -1)
    return torch.stack(drafts, 1), torch.stack(found, 1)


def ngram_match_ref(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    shortest: int,
    count: int,
    texts: int = 1,
    bound: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lookup_ref` in the given rows: drafts int64 [B, texts, count] and found bool [B, texts].

    tokens int64 [R, W] of all device rows; rows int64 [B]; lengths int64 [B]: index of each sequence's newest token,
    none larger than `bound`.
    """
    end = None if bound is None else bound + 1
    return lookup_ref(tokens[rows, :end], lengths, longest, shortest, count, texts)


ngram_match = op(ngram_match_ref, "specbatch.kernels.drafting.ngram_triton:ngram_match")


def merge_into_tree(
    texts: torch.Tensor, found: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts with common beginnings as one tree of `count` nodes, those of the first text first.

    texts int64 [B, K, S], of which those found bool [B, K] count; what is found comes before what is not. Returns
    tokens int64 [B, count], words of ancestors int64 [B, count + 1] and how many of the nodes are there, int64 [B]. The
    others are children of the root without meaning.
    """
    batch, kinds, depth = texts.shape
    same = (texts[:, :, None] == texts[:, None]).long().cumprod(-1)  # [B, K, K, S]: do they begin alike?
    owner = same.argmax(2)  # the first text with that beginning
    fresh = (owner == torch.arange(kinds, device=texts.device)[:, None]) & found[:, :, None]
    number = fresh.flatten(1).long().cumsum(1)
    node = number.view_as(texts).gather(1, owner)
    parents = torch.nn.functional.pad(node[:, :, :-1], (1, 0)).flatten(1)
    seat = torch.where(fresh.flatten(1) & (number <= count), number, 0)  # 0: for nothing
    empty = texts.new_zeros(batch, count + 1)
    tokens, up = (empty.scatter(1, seat, item)[:, 1:].contiguous() for item in (texts.flatten(1), parents))
    return tokens, ancestor_words(up, depth), number[:, -1].clamp(max=count)
