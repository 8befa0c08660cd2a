"""From logits to tokens: counter-based random numbers, truncated distributions, draws."""

from __future__ import annotations

import math

import torch

# One stream per use, so that two draws at the same position never share a number.
TARGET, ACCEPT, RESIDUAL, DRAFT, SIMULATED = range(5)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN, MIX1, MIX2 = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def offset_of(stream: int) -> int:
    """What sets the streams of one seed apart."""
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
    bits = _mix(_mix(seeds + offset_of(stream)) + positions * GOLDEN) >> 11
    return (bits & ((1 << 53) - 1)).double() * 2.0**-53


def probabilities_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution a token is drawn from: float32 [R, V].

    logits [R, V]; the parameters are [R]. Order: temperature, top-k (0 is off), top-p, min-p. Temperature 0 gives
    the one-hot of the argmax. The three truncations come together or not at all (None).
    """
    greedy = temperature <= 0
    logits = logits.float()
    # A colder or hotter one would give the same law, but overflow on the way.
    scaled = logits / temperature.clamp(1e-30, 1e30)[:, None]
    if top_k is not None and top_p is not None and min_p is not None:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), -torch.inf)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p
        # The likeliest token always stays, whatever rounding does to its sum.
        drop = ((before >= top_p[:, None]) & (top_p < 1)[:, None] | (p < min_p[:, None] * p[:, :1])) & (rank > 0)
        ordered = ordered.masked_fill(drop, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    p = scaled.softmax(-1)
    one_hot = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, p)


def draw_ref(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Draw an index per row by inversion: weights [..., V] >= 0 (need not sum to 1), coins [...] in [0, 1) -> int64.

    An index of weight 0 is never drawn, though a parallel sum need not be monotone to the last bit.
    """
    sums = weights.double().cumsum(-1)
    return ((sums > coins[..., None] * sums[..., -1:]) & (weights > 0)).int().argmax(-1)


def simulated_accept_ref(
    seeds: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, mean: float
) -> torch.Tensor:
    """Accepted drafts of a benchmark in place of real ones: int64 [B] for seeds, lengths and drafted, int64 [B].

    accepted + 1 is the whole number below or above `mean` (at least 1), with that mean; a row accepts no more than it
    drafted.
    """
    whole = math.floor(mean)
    more = uniform_ref(seeds, lengths, SIMULATED) < mean - whole
    return torch.minimum(whole - 1 + more.long(), drafted)
