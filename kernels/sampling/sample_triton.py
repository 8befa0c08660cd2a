"""Triton kernels of sampling by inversion, and of rejection sampling of sampled drafts.

The sums of blocks of tokens, computed by all programs at once, give the block in which the cumulative sum passes the
random number; only that block is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel
from specbatch.kernels.common.sizes import next_power_of_2
from specbatch.kernels.sampling.filtered_distribution import SamplingTensors
from specbatch.kernels.sampling.filtered_distribution_triton import (
    ARGMAX,
    COLUMNS,
    PEAK,
    FilteredDistribution,
    kept,
    launch_settings,
    load,
    probabilities,
    sampling_distribution,
    total_weight,
)
from specbatch.kernels.sampling.rng import ACCEPT, RESIDUAL, stream_offset
from specbatch.kernels.sampling.rng_triton import random_bits, verify_keys

_WARPS = 16
_ACCEPT, _RESIDUAL = tl.constexpr(stream_offset(ACCEPT)), tl.constexpr(stream_offset(RESIDUAL))


@triton.jit
def _residual(logits, q, at, vocabulary, dist, total, scale):
    """max(scale * p - q, 0) of tokens `at`; 0 past the vocabulary."""
    p = scale * (kept(load(logits, at, vocabulary), at, dist) / total.to(tl.float32))
    return tl.where(at < vocabulary, tl.maximum(p - tl.load(q + at, at < vocabulary, other=0.0), 0.0), 0.0)


@triton.jit
def _find_block(sums, blocks, uniform, BLOCKS: tl.constexpr):
    """Where inversion ends: the block, the sum to exceed in it, counted from its start."""
    block = tl.arange(0, BLOCKS)
    running = tl.cumsum(tl.load(sums + block, block < blocks, other=0.0), 0)
    target = uniform * tl.max(running, 0)
    passed = running <= target
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), blocks - 1), target - tl.max(tl.where(passed, running, 0.0), 0)


@triton.jit
def _invert(weight, at, target, otherwise):
    """The first of tokens `at` at which the running sum of weight exceeds target."""
    weight = weight.to(tl.float64)
    first = tl.min(tl.where((tl.cumsum(weight, 0) > target) & (weight > 0), at, 0x7FFFFFFF), 0)
    final = tl.max(tl.where(weight > 0, at, -1), 0)  # sums in another order differ in their last bits
    token = tl.minimum(first, final)
    return tl.where(token >= 0, token, otherwise)  # NaN logits


@triton.jit
def _unit(bits):
    return bits.to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _sample_kernel(
    logits, dists, sums, seeds, positions, tokens, finite, vocabulary, per_sequence, blocks,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    dist = dists + row * COLUMNS
    uniform = _unit(random_bits(tl.load(seeds + row // per_sequence), tl.load(positions + row), OFFSET))
    block, target = _find_block(sums + row * blocks, blocks, uniform, BLOCKS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.where(at < vocabulary, kept(load(logits + row * vocabulary, at, vocabulary), at, dist), 0.0)
    token = _invert(weight, at, target, tl.load(dist + ARGMAX).to(tl.int32))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, tl.abs(tl.load(dist + PEAK)) < float("inf"))


@triton.jit
def _uniforms(seeds, positions, sequence, place, N: tl.constexpr):
    """The random numbers that decide on the drafts `place`, from 0."""
    first = positions + sequence * N
    keys = verify_keys(tl.load(first + place, place < N - 1, other=0), tl.load(first) - 1)
    return _unit(random_bits(tl.load(seeds + sequence), keys, _ACCEPT))


@triton.jit
def _accept_kernel(
    logits,
    dists,
    sums,
    q,
    drafts,
    drafted,
    seeds,
    positions,
    accepted,
    scales,  # float32 [B, N], for block verification, which accepts later; else None
    finite,
    vocabulary,
    blocks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    place, block = tl.arange(0, BLOCK_N), tl.arange(0, BLOCKS)
    inside = place < N - 1
    row = sequence * N + place
    draft = tl.load(drafts + sequence * (N - 1) + place, inside, other=0)
    x = tl.load(logits + row * vocabulary + draft, inside, other=0.0).to(tl.float32)
    dist = dists + tl.where(inside, row, 0) * COLUMNS
    is_sum = inside[:, None] & (block < blocks)[None, :]
    total = tl.sum(tl.load(sums + row[:, None] * blocks + block[None, :], is_sum, other=0.0), 1)
    p = kept(x, draft.to(tl.int32), dist) / total.to(tl.float32)
    q_draft = tl.load(q + (sequence * (N - 1) + place) * vocabulary + draft, inside, other=0.0)
    if scales is not None:
        scale = tl.full([], 1.0, tl.float32)
        tl.store(scales + sequence * N, scale)
        for index in range(N - 1):
            scaled = scale * tl.sum(tl.where(place == index, p, 0.0), 0)
            of_draft = tl.sum(tl.where(place == index, q_draft, 0.0), 0)
            scale = tl.where(scaled < of_draft, scaled / tl.where(of_draft > 0, of_draft, 1.0), 1.0)
            scale = tl.where(scaled > 0, scale, 0.0)
            tl.store(scales + sequence * N + index + 1, scale)
    else:
        uniforms = _uniforms(seeds, positions, sequence, place, N)
        stays = (uniforms * q_draft < p) & (place < tl.load(drafted + sequence)) & inside
        tl.store(accepted + sequence, tl.min(tl.where(stays, N - 1, place), 0).to(tl.int64))
    peak = tl.load(dists + row * COLUMNS + PEAK, place < N, other=0.0)
    tl.store(finite + row, tl.abs(peak) < float("inf"), place < N)


@triton.jit
def _residual_kernel(
    logits, dists, sums, q, drafted, accepted, scales, residuals, vocabulary,
    N: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums of max(scale * p - q, 0), by block, after the last accepted draft, or with `scales` after every prefix; 0
    where no draft follows."""
    wait_for_previous_kernel(PDL)
    place, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    residuals += place * blocks
    if scales is not None:
        row, sequence = place, place // N
        count, scale = place % N, tl.load(scales + place)
    else:
        sequence, scale = place, 1.0
        count = tl.load(accepted + sequence)
        row = sequence * N + count
    rest = tl.zeros([], tl.float64)
    if count < tl.load(drafted + sequence):
        total = total_weight(sums + row * blocks, blocks, BLOCKS)
        at = block * BLOCK + tl.arange(0, BLOCK)
        q += (row - sequence) * vocabulary
        weight = _residual(logits + row * vocabulary, q, at, vocabulary, dists + row * COLUMNS, total, scale)
        rest = tl.sum(weight.to(tl.float64), 0)
    tl.store(residuals + block, rest)


@triton.jit
def _longest_prefix(
    scales, residuals, seeds, positions, limit, sequence, blocks,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Drafts, at most `limit`, that block verification accepts."""
    place, block = tl.arange(0, BLOCK_N), tl.arange(0, BLOCKS)
    is_draft = place < N - 1
    row = sequence * N + place + 1  # after draft `place`
    is_sum = is_draft[:, None] & (block < blocks)[None, :]
    left = tl.sum(tl.load(residuals + row[:, None] * blocks + block[None, :], is_sum, other=0.0), 1)
    scale = tl.load(scales + row, is_draft, other=0.0).to(tl.float64)
    left = tl.where(place + 1 == limit, scale, left)
    whole = left + 1 - scale
    accepts = (_uniforms(seeds, positions, sequence, place, N) * whole < left) | (whole <= 0)
    return tl.max(tl.where(accepts & (place < limit) & is_draft, place + 1, 0), 0).to(tl.int64)


@triton.jit
def _bonus_kernel(
    logits, dists, sums, q, drafts, drafted, seeds, positions, accepted, scales, residuals, tokens, vocabulary, blocks,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    if scales is not None:
        limit = tl.load(drafted + sequence)
        count = _longest_prefix(scales, residuals, seeds, positions, limit, sequence, blocks, N, BLOCK_N, BLOCKS)
        tl.store(accepted + sequence, count)
        row = sequence * N + count
        residuals += row * blocks
        scale = tl.load(scales + row)
    else:
        count = tl.load(accepted + sequence)
        row = sequence * N + count
        residuals += sequence * blocks
        scale = 1.0
    dist = dists + row * COLUMNS
    logits += row * vocabulary
    sums += row * blocks
    uniform = _unit(random_bits(tl.load(seeds + sequence), tl.load(positions + row), _RESIDUAL))
    lane = tl.arange(0, BLOCK)
    if total_weight(residuals, blocks, BLOCKS) > 0:
        block, target = _find_block(residuals, blocks, uniform, BLOCKS)
        at = block * BLOCK + lane
        total = total_weight(sums, blocks, BLOCKS)
        weight = _residual(logits, q + (row - sequence) * vocabulary, at, vocabulary, dist, total, scale)
    else:  # nothing to subtract, or p == q up to rounding: sample from p
        block, target = _find_block(sums, blocks, uniform, BLOCKS)
        at = block * BLOCK + lane
        weight = tl.where(at < vocabulary, kept(load(logits, at, vocabulary), at, dist), 0.0)
    bonus = _invert(weight, at, target, tl.load(dist + ARGMAX).to(tl.int32)).to(tl.int64)
    place = tl.arange(0, BLOCK_N)
    draft = tl.load(drafts + sequence * (N - 1) + place, place < N - 1, other=0)
    tl.store(tokens + sequence * N + place, tl.where(place == count, bonus, draft), place < N)


def sample(
    dist: FilteredDistribution, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_ref` with the random numbers of seeds int64 [B] at positions int64 [B, n]: tokens int64 [B, n] and finite
    bool [B, n], whether their logits are free of NaN and infinity."""
    tokens = torch.empty_like(positions)
    finite = torch.empty(positions.shape, dtype=torch.bool, device=positions.device)
    _sample_kernel[(tokens.numel(),)](
        *dist[:3], seeds, positions, tokens, finite, dist.logits.shape[1], positions.shape[1], dist.sums.shape[1],
        OFFSET=stream_offset(stream), BLOCK=dist.block, num_warps=_WARPS, **launch_settings(dist),
    )  # fmt: skip
    return tokens, finite


def sample_tokens(
    logits: torch.Tensor, positions: torch.Tensor, stream: int, sampling: SamplingTensors
) -> torch.Tensor:
    """Tokens int64 [B, n] sampled from logits [B, n, V] for `positions` int64 [B, n]."""
    return sample(sampling_distribution(logits, sampling), sampling.seeds, positions, stream)[0]


def sample_with_probabilities(
    logits: torch.Tensor, positions: torch.Tensor, stream: int, sampling: SamplingTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_tokens`, and the filtered distributions, float32 [B, n, V]."""
    dist = sampling_distribution(logits, sampling)
    tokens, _ = sample(dist, sampling.seeds, positions, stream)
    return tokens, probabilities(dist).view(logits.shape)


def rejection_sample(
    dist: FilteredDistribution,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    q: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    verification: str = "token",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling of a chain, in three launches.

    dist: of the target's B * n rows; drafts int64 [B, n-1], of which drafted int64 [B] count, sampled from q float32
    [B, n-1, V]; seeds int64 [B]; positions int64 [B, n]; verification: "token" or "block", for which the residuals are
    summed after every prefix instead of the accepted one. Returns tokens int64 [B, n], accepted int64 [B] and finite
    bool [B, n].
    """
    batch, n = positions.shape
    vocabulary, blocks = dist.logits.shape[1], dist.sums.shape[1]
    tokens, accepted = torch.empty_like(positions), torch.empty_like(drafted)
    finite = torch.empty(batch, n, dtype=torch.bool, device=positions.device)
    scales = torch.empty(batch, n, device=positions.device) if verification == "block" else None
    rows = batch if scales is None else batch * n
    residuals = torch.empty(rows, blocks, dtype=torch.float64, device=positions.device)
    common = {"N": n, "scales": scales, **launch_settings(dist)}
    block_n = next_power_of_2(n)
    _accept_kernel[(batch,)](
        *dist[:3], q, drafts, drafted, seeds, positions, accepted,
        finite=finite, vocabulary=vocabulary, blocks=blocks, BLOCK_N=block_n, **common,
    )  # fmt: skip
    _residual_kernel[(rows, blocks)](
        *dist[:3], q, drafted, accepted,
        residuals=residuals, vocabulary=vocabulary, BLOCK=dist.block, num_warps=8, **common,
    )  # fmt: skip
    _bonus_kernel[(batch,)](
        *dist[:3], q, drafts, drafted, seeds, positions, accepted,
        residuals=residuals, tokens=tokens, vocabulary=vocabulary, blocks=blocks, BLOCK_N=block_n, BLOCK=dist.block,
        num_warps=_WARPS, **common,
    )  # fmt: skip
    return tokens, accepted, finite
