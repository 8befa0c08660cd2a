"""Coins against splitmix64 in plain integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specbatch.kernels.sampling import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform_ref

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STREAMS = (TARGET, ACCEPT, RESIDUAL, DRAFT)
P_VALUE = 1e-4
STEADY = settings(deadline=None, derandomize=True)


# -- uniform_ref ----------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x &= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def coin(seed: int, position: int, stream: int) -> float:
    key = mix(seed + GOLDEN * (stream + 1))
    return (mix(key + GOLDEN * position) >> 11) / 2**53


def test_the_plain_reference_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + GOLDEN * (index + 1)) for index in range(4)] == published


@pytest.mark.parametrize("stream", STREAMS)
@STEADY
@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    position=st.integers(0, (1 << 63) - 1) | st.integers(0, 100),
)
def test_coins_are_splitmix64_bit_by_bit(stream: int, seed: int, position: int) -> None:
    assert uniform_ref(torch.tensor(seed), torch.tensor(position), stream).item() == coin(seed, position, stream)


def test_the_streams_are_distinct() -> None:
    assert len(set(STREAMS)) == len(STREAMS)
    seeds = torch.arange(100)
    coins = torch.cat([uniform_ref(seeds, torch.tensor(7), stream) for stream in STREAMS])
    assert len(coins.unique()) == 400


def test_a_coin_depends_on_seed_position_and_stream_only() -> None:
    seeds, positions = torch.arange(-5, 8), torch.arange(0, 60, 4)
    grid = uniform_ref(seeds[:, None], positions, ACCEPT)
    assert grid.shape == (13, 15)
    assert grid.dtype == torch.float64
    assert torch.equal(grid, uniform_ref(seeds[:, None], positions, ACCEPT))
    assert torch.equal(grid.flip(0), uniform_ref(seeds.flip(0)[:, None], positions, ACCEPT))
    assert torch.equal(grid.t(), uniform_ref(seeds, positions[:, None], ACCEPT))
    assert torch.equal(grid[3:4, 2:9], uniform_ref(seeds[3:4, None], positions[None, 2:9], ACCEPT))
    assert torch.equal(grid[:, ::2], uniform_ref(seeds[:, None].expand(-1, 15)[:, ::2], positions[::2], ACCEPT))


def p_value(*coins: torch.Tensor, bins: int) -> float:
    """Chi-square of the joint cells of coins against independent uniform ones."""
    cells = torch.zeros_like(coins[0], dtype=torch.int64)
    for item in coins:
        cells = cells * bins + (item * bins).long()
    counts = torch.bincount(cells.flatten(), minlength=bins ** len(coins)).numpy()
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("stream", STREAMS)
def test_coins_are_uniform(stream: int) -> None:
    by_seed = uniform_ref(torch.arange(200_000), torch.tensor(31), stream)
    by_position = uniform_ref(torch.tensor(0), torch.arange(200_000), stream)
    for coins in (by_seed, by_position):
        assert coins.min() >= 0
        assert coins.max() < 1
        assert stats.kstest(coins.numpy(), "uniform").pvalue > P_VALUE
        assert p_value(coins, bins=1024) > P_VALUE
        low_bits = (coins * 2.0**40) % 1  # a draw among many tokens looks at every bit
        assert p_value(low_bits, bins=256) > P_VALUE


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_independent(stream: int) -> None:
    seeds, positions = torch.arange(2000)[:, None], torch.arange(150)
    coins = uniform_ref(seeds, positions, stream)
    assert p_value(coins[1:], coins[:-1], bins=32) > P_VALUE, "seed and seed + 1"
    assert p_value(coins[:, 1:], coins[:, :-1], bins=32) > P_VALUE, "position and position + 1"
    assert p_value(coins[1:, :-1], coins[:-1, 1:], bins=32) > P_VALUE, "seed + 1 and position + 1"
    assert p_value(coins[:, 2:], coins[:, 1:-1], coins[:, :-2], bins=12) > P_VALUE, "three in a row"
    for other in STREAMS:
        if other != stream:
            assert p_value(coins, uniform_ref(seeds, positions, other), bins=32) > P_VALUE, "streams"
