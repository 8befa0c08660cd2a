"""Sums, exponentials and what is made of them, for the torch references. In deterministic mode the bits of an element
depend on its own row alone.

torch's sums and vectorized functions do not have that property: the order of a sum depends on shape, strides and
threads, and the last elements of a tensor or of a thread's share are computed by scalar code with another exponential
(on AVX2 and AVX-512, 4% of the results of silu and sigmoid and 10% of those of softplus then differ in the last bit).
Here deterministic results are made of operations that IEEE 754 defines to the last bit, in a fixed order: additions,
multiplications, divisions and square roots of elements. They are the same with any number of rows and threads, on any
processor.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic

# exp(x) = 2^n exp(r) with n = round(x / ln 2); ln 2 in two parts, of which the first times n is exact; the polynomial
# of expf in the Cephes library (Moshier), r^2 p(r) + r + 1, is within 2 units in the last place.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_LEAST, EXP_MOST = -86.0, 88.7  # exp is 0 below, and at the upper end close to the largest number


def row_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sum of x over one dimension, which disappears."""
    if not is_deterministic():
        return x.sum(dim)
    count = x.shape[dim]
    if not count:
        return x.sum(dim)
    while count > 1:  # halves: a tree that depends on the size alone
        half = 1 << (count - 1).bit_length() - 1
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, count - half)
        if half > count - half:
            both = low.narrow(dim, 0, count - half) + high
            x = torch.cat([both, low.narrow(dim, count - half, 2 * half - count)], dim)
        else:
            x = low + high
        count = half
    return x.squeeze(dim)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of float32 x. In deterministic mode results below e^-86 are 0."""
    if not is_deterministic():
        return x.exp()
    clamped = x.clamp(EXP_LEAST, EXP_MOST)
    n = (clamped * (1 / math.log(2))).round_()
    r = (clamped - n * LN2_HIGH).sub_(n * LN2_LOW)
    p = r * EXP[0]
    for coefficient in EXP[1:]:
        p.add_(coefficient).mul_(r)
    p.mul_(r).add_(r).add_(1.0)
    # 2^n in two factors: 2^128 is no float32.
    power = n.nan_to_num_(0.0).to(torch.int32).add_(126).bitwise_left_shift_(23).view(torch.float32)
    return p.mul_(power).mul_(2.0).masked_fill_(x < EXP_LEAST, 0.0).masked_fill_(x > EXP_MOST, torch.inf)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), in the type of x."""
    if not is_deterministic() or x.is_cuda:  # there all elements run the same code
        return x.sigmoid()
    return _sigmoid(x.float()).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), in the type of x."""
    if not is_deterministic():
        return F.silu(x)
    wide = x.float()
    return (wide / (exp(-wide) + 1)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) of float32 x."""
    if not is_deterministic():
        return F.softplus(x)
    # log(1 + u) = 2 artanh(u / (2 + u)), u <= 1
    u = exp(-x.abs())
    return x.clamp(min=0) + _twice_artanh(u / (u + 2), 8)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """softmax of float32 x over its last dimension."""
    if not is_deterministic():
        return x.softmax(-1)
    weights = exp(x - x.amax(-1, keepdim=True))
    return weights / row_sum(weights)[..., None]


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """The log of the sum of e^x over the last dimension of float32 x, which disappears."""
    if not is_deterministic():
        return x.logsumexp(-1)
    largest = x.amax(-1)
    return largest + _log(row_sum(exp(x - largest[..., None])))


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """log of the softmax of float32 x over its last dimension."""
    return x - logsumexp(x)[..., None] if is_deterministic() else x.log_softmax(-1)


def multiply_add(x: torch.Tensor, factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x + factor * other, elementwise, in the memory of x."""
    # A compiler may fuse the two in the vectorized part of a loop only.
    return x.add_(factor * other) if is_deterministic() else x.addcmul_(factor, other)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (exp(-x) + 1)


def _log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of float32 x > 0, by way of float64."""
    mantissa, exponent = torch.frexp(x.double())
    is_small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_small, mantissa * 2, mantissa)
    log = _twice_artanh((mantissa - 1) / (mantissa + 1), 12)
    return (log + (exponent.double() - is_small.double()) * math.log(2)).float()


def _twice_artanh(x: torch.Tensor, terms: int) -> torch.Tensor:
    """2 artanh(x) = 2 (x + x^3 / 3 + x^5 / 5 + ...)."""
    square = x * x
    total = torch.full_like(x, 1 / (2 * terms - 1))
    for odd in range(2 * terms - 3, 0, -2):
        total.mul_(square).add_(1 / odd)
    return total.mul_(x).mul_(2.0)
