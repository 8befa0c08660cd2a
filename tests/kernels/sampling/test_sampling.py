"""Random numbers match splitmix64 in plain integers; filtering and sampling match float64 and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from crossed import slow_but
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.rng import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform_ref
from specbatch.kernels.sampling.sample import sample_ref

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STREAMS = (TARGET, ACCEPT, RESIDUAL, DRAFT)
LARGEST = 1 - 2.0**-53
P_VALUE = 1e-4
STEADY = settings(deadline=None, derandomize=True)


# -- uniform_ref ----------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x &= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def number(seed: int, position: int, stream: int) -> float:
    key = mix(seed + GOLDEN * (stream + 1))
    return (mix(key + GOLDEN * position) >> 11) / 2**53


def test_python_reference_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + GOLDEN * (index + 1)) for index in range(4)] == published


@pytest.mark.parametrize("stream", slow_but([ACCEPT], STREAMS))
@STEADY
@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), position=st.integers(0, (1 << 63) - 1) | st.integers(0, 100))
def test_random_numbers_are_splitmix64(stream: int, seed: int, position: int) -> None:
    assert uniform_ref(torch.tensor(seed), torch.tensor(position), stream).item() == number(seed, position, stream)


def test_streams_are_distinct() -> None:
    assert len(set(STREAMS)) == len(STREAMS)
    seeds = torch.arange(100)
    numbers = torch.cat([uniform_ref(seeds, torch.tensor(7), stream) for stream in STREAMS])
    assert len(numbers.unique()) == 400


def test_random_numbers_depend_on_seed_position_and_stream_only() -> None:
    seeds, positions = torch.arange(-5, 8), torch.arange(0, 60, 4)
    grid = uniform_ref(seeds[:, None], positions, ACCEPT)
    assert grid.shape == (13, 15)
    assert grid.dtype == torch.float64
    assert torch.equal(grid, uniform_ref(seeds[:, None], positions, ACCEPT))
    assert torch.equal(grid.flip(0), uniform_ref(seeds.flip(0)[:, None], positions, ACCEPT))
    assert torch.equal(grid.t(), uniform_ref(seeds, positions[:, None], ACCEPT))
    assert torch.equal(grid[3:4, 2:9], uniform_ref(seeds[3:4, None], positions[None, 2:9], ACCEPT))
    assert torch.equal(grid[:, ::2], uniform_ref(seeds[:, None].expand(-1, 15)[:, ::2], positions[::2], ACCEPT))


def p_value(*numbers: torch.Tensor, bins: int) -> float:
    """Chi-square test of the joint bins against independent uniform numbers."""
    cells = torch.zeros_like(numbers[0], dtype=torch.int64)
    for item in numbers:
        cells = cells * bins + (item * bins).long()
    counts = torch.bincount(cells.flatten(), minlength=bins ** len(numbers)).numpy()
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("stream", slow_but([ACCEPT], STREAMS))
def test_random_numbers_are_uniform(stream: int) -> None:
    by_seed = uniform_ref(torch.arange(200_000), torch.tensor(31), stream)
    by_position = uniform_ref(torch.tensor(0), torch.arange(200_000), stream)
    for numbers in (by_seed, by_position):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > P_VALUE
        assert p_value(numbers, bins=1024) > P_VALUE
        low_bits = (numbers * 2.0**40) % 1  # sampling among many tokens uses every bit
        assert p_value(low_bits, bins=256) > P_VALUE


@pytest.mark.parametrize("stream", slow_but([ACCEPT], STREAMS))
def test_neighbouring_random_numbers_are_independent(stream: int) -> None:
    seeds, positions = torch.arange(2000)[:, None], torch.arange(150)
    numbers = uniform_ref(seeds, positions, stream)
    assert p_value(numbers[1:], numbers[:-1], bins=32) > P_VALUE, "seed and seed + 1"
    assert p_value(numbers[:, 1:], numbers[:, :-1], bins=32) > P_VALUE, "position and position + 1"
    assert p_value(numbers[1:, :-1], numbers[:-1, 1:], bins=32) > P_VALUE, "seed + 1 and position + 1"
    assert p_value(numbers[:, 2:], numbers[:, 1:-1], numbers[:, :-2], bins=12) > P_VALUE, "three in a row"
    for other in STREAMS:
        if other != stream:
            assert p_value(numbers, uniform_ref(seeds, positions, other), bins=32) > P_VALUE, "streams"


# -- probabilities_ref ----------------------------------------------------------------------------------------


def filtered_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, float]:
    """The filtered distribution in float64, and the margin of the closest top-p or min-p decision."""
    z = np.array(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(z))[z.argmax()], 1.0
    z = z / temperature
    order = sorted(range(len(z)), key=lambda index: (-z[index], index))
    kept = [index for index in order[: top_k or None] if z[index] > -np.inf]
    p = np.exp(z[kept] - z[kept[0]])
    p /= p.sum()
    margin = 1.0
    keep = np.ones(len(kept), dtype=bool)
    if top_p < 1:
        before = np.cumsum(p) - p
        keep &= before < top_p
        margin = min(margin, float(np.abs(before - top_p).min()))
    if min_p > 0:
        keep &= p >= min_p * p[0]
        margin = min(margin, float(np.abs(p - min_p * p[0])[1:].min(initial=1)))
    keep[0] = True
    result = np.zeros(len(z))
    result[np.array(kept)[keep]] = p[keep] / p[keep].sum()
    return result, margin


# Multiples of 1/8: many ties, and different logits stay different after the division by a temperature.
LOGIT = st.integers(-40, 40).map(lambda value: value / 8)
ROW = st.tuples(
    st.lists(LOGIT | st.just(-np.inf), min_size=1, max_size=12).filter(lambda row: max(row) > -np.inf),
    st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0, 1.3, 5.0, 100.0]),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.001]) | st.floats(1 / 64, 1, width=32),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]) | st.floats(0, 1, width=32),
)


def of(temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, ...]:
    return torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])


@examples(150)
@given(row=ROW)
def test_filtered_distribution_matches_float64(row: tuple[list[float], float, int, float, float]) -> None:
    logits, *parameters = row
    expected, margin = filtered_distribution(logits, *parameters)
    assume(margin > 1e-5)
    ours = probabilities_ref(torch.tensor([logits]), *of(*parameters))
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours[0].numpy(), expected, rtol=3e-5, atol=1e-37)


@STEADY
@given(row=ROW)
def test_no_truncation_keeps_all_tokens(row: tuple[list[float], float, int, float, float]) -> None:
    logits, temperature, *_ = row
    ours = probabilities_ref(torch.tensor([logits]), torch.tensor([temperature]))
    expected, _ = filtered_distribution(logits, temperature, 0, 1.0, 0.0)
    np.testing.assert_allclose(ours[0].numpy(), expected, rtol=3e-5, atol=1e-37)
    off = probabilities_ref(torch.tensor([logits]), *of(temperature, 0, 1.0, 0.0))
    assert torch.equal(ours, off)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ((1.0, 3, 1.0, 0.0), [0, 1, 2]),
        ((1.0, 3, 0.5, 0.0), [0]),  # of the first three, renormalised: .644, .237, .118
        ((1.0, 3, 0.7, 0.0), [0, 1]),
        ((1.0, 0, 0.7, 0.0), [0, 1]),
        ((1.0, 0, 0.9, 0.0), [0, 1, 2]),
        ((1.0, 0, 1.0, 0.3), [0, 1]),
        ((2.0, 0, 1.0, 0.3), [0, 1, 2]),  # temperature comes first
        ((1.0, 4, 0.96, 0.1), [0, 1, 2]),
        ((1.0, 1, 0.01, 1.0), [0]),
        ((1.0, 99, 1.0, 0.0), [0, 1, 2, 3, 4]),
    ],
)
def test_filters_apply_in_order_temperature_top_k_top_p_min_p(
    parameters: tuple[float, int, float, float], kept: list[int]
) -> None:
    """Five tokens, each e times more likely than the next."""
    p = probabilities_ref(torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]), *of(*parameters))[0]
    assert p.nonzero().flatten().tolist() == kept
    expected = (torch.arange(5.0) / -parameters[0]).exp() * (p > 0)
    torch.testing.assert_close(p, expected / expected.sum())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 20, 0.9, 0.05), (1.5, 0, 0.6, 0.0), (1.0, 5, 1.0, 0.0), (0.9, 0, 1.0, 0.1), (1.2, 50, 0.95, 0.02)],
)
def test_filtered_distribution_matches_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(5)) * 3
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    for value, warper in ((top_k, TopKLogitsWarper), (top_p % 1, TopPLogitsWarper), (min_p, MinPLogitsWarper)):
        if value:
            scores = warper(value)(None, scores)
    ours = probabilities_ref(logits, *(item.expand(20) for item in of(temperature, top_k, top_p, min_p)))
    torch.testing.assert_close(ours, scores.softmax(-1), rtol=1e-5, atol=1e-8)
    assert torch.equal(ours > 0, scores > -torch.inf)


def test_ties_at_a_cutoff_keep_lower_ids() -> None:
    tied = torch.zeros(1, 6)
    assert probabilities_ref(tied, *of(1.0, 2, 1.0, 0.0))[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert probabilities_ref(tied, *of(1.0, 0, 0.4, 0.0))[0, 3:].tolist() == [0, 0, 0]
    assert probabilities_ref(tied, *of(0.0, 0, 1.0, 0.0))[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert probabilities_ref(tied, *of(1.0, 0, 1.0, 1.0))[0].tolist() == pytest.approx([1 / 6] * 6)


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    tied = torch.zeros(1, 4)  # probabilities of exactly 1/4
    assert probabilities_ref(tied, *of(1.0, 0, 0.5, 0.0))[0].tolist() == [0.5, 0.5, 0, 0]
    assert probabilities_ref(tied, *of(1.0, 0, 0.25, 0.0))[0].tolist() == [1, 0, 0, 0]


def test_most_likely_token_is_always_kept() -> None:
    smallest = 0.0  # what a top-p of 1e-50 is in float32
    assert probabilities_ref(torch.tensor([[1.0, 3.0, 2.0]]), *of(1.0, 1, smallest, 1.0))[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38, 1e-45])
def test_tiny_temperatures_keep_most_likely_tokens_only(temperature: float, cut: bool) -> None:
    logits = torch.tensor([[1.0, 30.0, -torch.inf, 30.0, 29.0], [-900.0, -800.0, 0.0, -torch.inf, -1e4]])
    off = (torch.tensor([0, 0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])) if cut else ()
    p = probabilities_ref(logits, torch.tensor([temperature] * 2), *off)
    assert p.tolist() == [[0, 0.5, 0, 0.5, 0], [0, 0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e20, 1e38, torch.inf])
def test_huge_temperatures_are_uniform(temperature: float) -> None:
    p = probabilities_ref(torch.tensor([[1.0, 30.0, -torch.inf, -80.0, 0.0]]), torch.tensor([temperature]))
    assert p.tolist() == [[0.25, 0.25, 0, 0.25, 0.25]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_use_float32_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0])
    p = probabilities_ref(logits, temperature)
    assert p.dtype == torch.float32
    assert torch.equal(p, probabilities_ref(logits.float(), temperature))


def test_rows_do_not_depend_on_batch() -> None:
    logits = torch.randn(8, 333, generator=torch.Generator().manual_seed(1)) * 4
    parameters = (
        torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0, 0.9, 1.0]),
        torch.tensor([0, 0, 5, 0, 0, 3, 400, 0]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.5, 0.99, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.01, 0.0]),
    )
    together = probabilities_ref(logits, *parameters)
    for row in range(8):
        assert torch.equal(
            together[row], probabilities_ref(logits[row : row + 1], *(item[row : row + 1] for item in parameters))[0]
        )
    plain = [0, 1, 7]
    assert torch.equal(together[plain], probabilities_ref(logits[plain], parameters[0][plain]))


# -- sample_ref -------------------------------------------------------------------------------------------------


@STEADY
@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    number=st.integers(0, 63).map(lambda value: Fraction(value, 64)),
    scale=st.sampled_from([1.0, 2.0**-40, 2.0**20]),
)
def test_sample_inverts_the_cdf_exactly(weights: list[int], number: Fraction, scale: float) -> None:
    total, partial = sum(weights), 0
    expected = next(index for index, w in enumerate(weights) if (partial := partial + w) > number * total)
    drawn = sample_ref(torch.tensor([weights]) * scale, torch.tensor([float(number)], dtype=torch.float64))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [expected]


@STEADY
@given(
    weights=st.lists(
        st.just(0.0) | st.floats(2.0**-100, 2.0**100, width=32) | st.floats(0, 1, width=32), min_size=1, max_size=30
    ).filter(any),
    number=st.sampled_from([0.0, 2.0**-53, 0.5, LARGEST]) | st.floats(0, LARGEST),
)
def test_zero_probability_tokens_are_never_sampled(weights: list[float], number: float) -> None:
    drawn = sample_ref(torch.tensor([weights]), torch.tensor([number], dtype=torch.float64))
    assert weights[int(drawn)] > 0


def test_extreme_random_numbers_sample_first_and_last_token() -> None:
    weights = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.7, 0.2, 0.0]).expand(2, 7)
    assert sample_ref(weights, torch.tensor([0.0, LARGEST], dtype=torch.float64)).tolist() == [2, 5]


def test_cdf_resolves_rare_tokens_after_a_likely_one() -> None:
    weights = torch.tensor(
        [1.0] + [1e-8] * 1000
    )  # in float32 the cumulative sums would not change for ten tokens at a time
    wanted = torch.tensor([1, 7, 500, 1000])
    sums = weights.double().cumsum(0)
    numbers = (sums[wanted] - 0.5e-8) / sums[-1]
    assert sample_ref(weights.expand(4, -1), numbers).tolist() == wanted.tolist()


def test_sample_frequencies_match_weights() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 0.5, 0.0, 5.5])
    numbers = uniform_ref(torch.arange(100_000)[:, None], torch.arange(3), TARGET)
    drawn = sample_ref(weights.expand(100_000, 3, 6), numbers)
    assert drawn.shape == (100_000, 3)
    counts = torch.bincount(drawn.flatten(), minlength=6).numpy()
    assert counts[[1, 4]].tolist() == [0, 0]
    possible = weights.numpy() > 0
    expected = weights.numpy()[possible] * 30_000
    assert stats.chisquare(counts[possible], expected).pvalue > P_VALUE
