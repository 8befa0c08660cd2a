"""Counter-based random numbers (splitmix64): every number depends on seed, position and stream only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

CONTEXT_ROWS = 8 * 24  # of simulated acceptance by context: up to 2^24 tokens

# One stream per use, so that two samples at the same position never share a random number.
TARGET, ACCEPT, RESIDUAL, DRAFT, SIMULATED, NOISE = range(6)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN, MIX1, MIX2 = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def stream_offset(stream: int) -> int:
    """The offset that separates the streams of one seed."""
    return _signed(GOLDEN * (stream + 1) % (1 << 64))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014). int64 wraps; the masks make its shifts logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform_ref(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Random numbers in [0, 1), float64, that depend on (seed, position, stream) only.

    seeds and positions: int64, broadcast together. A token's randomness is thus the same in every schedule, batch
    and algorithm.
    """
    bits = _mix(_mix(seeds + stream_offset(stream)) + positions * GOLDEN) >> 11
    return (bits & ((1 << 53) - 1)).double() * 2.0**-53


def verify_keys(positions: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """Keys for `uniform_ref`, instead of positions, of the random numbers that one verify draws for tokens at
    `positions`: int64, and roots int64, broadcast to them: the position of the verify's root.

    A verify decides by all of its drafts, also by those after the accepted ones. The next verify, which has another
    root, drafts at these positions again: with the same random numbers its drafts would not be independent.
    """
    return positions + (roots << 32)


def simulated_accept_ref(
    seeds: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, thresholds: torch.Tensor
) -> torch.Tensor:
    """Simulated numbers of accepted drafts, for benchmarks: int64 [B] for seeds, lengths and drafted, int64 [B].

    Draft j, whose token is at position lengths + j, is accepted if all before it are and its random number is below
    thresholds[j - 1], or by context below thresholds[context_row(lengths), j - 1]. thresholds int64 [D] or
    [CONTEXT_ROWS, D]: see `acceptance_thresholds`; further drafts are never accepted.
    """
    place = torch.arange(thresholds.shape[-1], device=seeds.device)
    if thresholds.dim() == 2:
        thresholds = thresholds[context_row_ref(lengths)]
    numbers = uniform_ref(seeds[:, None], lengths[:, None] + 1 + place, SIMULATED) * 2.0**53
    accepted = (numbers < thresholds) & (place < drafted[:, None])
    return accepted.long().cumprod(-1).sum(-1)


def acceptance_thresholds(conditional: Sequence[float], device: torch.device) -> torch.Tensor:
    """2^53 times the probability that each draft is accepted if all before it are, rounded up: int64 [D]. A random
    number of 53 bits is below it with exactly that probability."""
    return torch.tensor([math.ceil(p * 2**53) for p in conditional], dtype=torch.int64, device=device)


def thresholds_by_context(conditional: Callable[[float], Sequence[float]], device: torch.device) -> torch.Tensor:
    """`acceptance_thresholds` by length of the context: int64 [CONTEXT_ROWS, D]. conditional: the probabilities at a
    context of so many tokens."""
    middles = (2 ** (row // 8) * (1 + (row % 8 + 0.5) / 8) for row in range(CONTEXT_ROWS))
    return torch.stack([acceptance_thresholds(conditional(length), device) for length in middles])


def context_row_ref(lengths: torch.Tensor) -> torch.Tensor:
    """The row of contexts of so many tokens, eight for each power of two: int64, like lengths. Whole numbers only, so
    that every device finds the same row."""
    powers = 1 << torch.arange(1, 32, device=lengths.device)
    exponent = (lengths[..., None] >= powers).sum(-1)
    return (8 * exponent + ((lengths << 3 >> exponent) & 7)).clamp(max=CONTEXT_ROWS - 1)
