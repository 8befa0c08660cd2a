"""The random numbers of `rng.uniform_ref` within Triton kernels, bit by bit."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from specbatch.kernels.sampling import rng

_GOLDEN, _MIX1, _MIX2 = (tl.constexpr(value) for value in (rng.GOLDEN, rng.MIX1, rng.MIX2))
_SIMULATED = tl.constexpr(rng.offset_of(rng.SIMULATED))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def random_bits(seeds, positions, OFFSET: tl.constexpr):
    """The random number times 2^53, int64. seeds, positions: int64; OFFSET: `rng.offset_of(stream)`."""
    return (_mix(_mix(seeds + OFFSET) + positions * _GOLDEN) >> 11) & ((1 << 53) - 1)


@triton.jit
def simulated_accept(seed, length, drafted, WHOLE: tl.constexpr, MORE: tl.constexpr):
    """`rng.simulated_accept_ref` of one row; WHOLE and MORE: `simulation_parameters(mean)`."""
    more = random_bits(seed, length, _SIMULATED) < MORE
    return tl.minimum(WHOLE - 1 + more.to(tl.int64), drafted)


def simulation_parameters(mean: float | None) -> tuple[int, int]:
    """The whole accept length below `mean` and 2^53 times the chance of one more; (0, 0) for None, "not simulated"."""
    if mean is None:
        return 0, 0
    whole = math.floor(mean)
    return whole, math.ceil((mean - whole) * 2**53)
