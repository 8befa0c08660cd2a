"""N-gram lookup on token rows ("prompt lookup decoding"), with fixed shapes and no host read."""

from __future__ import annotations

import torch


def ngram_match_ref(
    tokens: torch.Tensor, last: torch.Tensor, longest: int, shortest: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where the end of each row occurred before and copy what followed.

    tokens int64 [B, W]; last int64 [B]: index of each row's newest token (what lies behind it is ignored).
    The longest match of `longest`..`shortest` tokens wins, the latest occurrence among equals. The copy may run into
    itself: behind the newest token it goes on periodically, as in LZ77.
    Returns (drafts int64 [B, count], found bool [B]); drafts of rows without a match are the newest token repeated.
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
    best, end = score.max(1)
    found = best >= 0
    end = torch.where(found, end, (last - 1).clamp(min=0))
    period = (last - end).clamp(min=1)
    step = torch.arange(count, device=tokens.device) % period[:, None]
    source = torch.where(found[:, None], end[:, None] + 1 + step, last[:, None])
    return tokens.gather(1, source), found
