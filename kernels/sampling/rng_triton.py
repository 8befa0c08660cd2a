"""The random numbers of `rng.uniform_ref` within Triton kernels, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.sampling import rng

_GOLDEN, _MIX1, _MIX2 = (tl.constexpr(value) for value in (rng.GOLDEN, rng.MIX1, rng.MIX2))
_ROWS = tl.constexpr(rng.CONTEXT_ROWS)
_SIMULATED = tl.constexpr(rng.stream_offset(rng.SIMULATED))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def random_bits(seeds, positions, OFFSET: tl.constexpr):
    """The random number times 2^53, int64. seeds, positions: int64; OFFSET: `rng.stream_offset(stream)`."""
    return (_mix(_mix(seeds + OFFSET) + positions * _GOLDEN) >> 11) & ((1 << 53) - 1)


@triton.jit
def verify_keys(positions, root):
    """`rng.verify_keys`."""
    return positions + (root << 32)


@triton.jit
def simulated_accept(
    seed, length, drafted, thresholds, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`rng.simulated_accept_ref` of one row, with the first DEPTH of the thresholds; WIDTH: their columns, if there is
    a row for each length of the context, else 0; BLOCK: at least DEPTH + 1."""
    place = tl.arange(0, BLOCK)
    if WIDTH:
        powers = tl.full([32], 2, tl.int64) << tl.arange(0, 32)
        exponent = tl.sum((length >= powers).to(tl.int64), 0)
        row = 8 * exponent + (((length << 3) >> exponent) & 7)
        thresholds += tl.minimum(row, _ROWS - 1) * WIDTH
    threshold = tl.load(thresholds + place, place < DEPTH, other=0)
    rejected = (random_bits(seed, length + 1 + place, _SIMULATED) >= threshold) | (place >= drafted)
    return tl.min(tl.where(rejected, place, DEPTH), 0).to(tl.int64)
