"""Sort-free filtering, sampling and rejection sampling match the references that sort."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from crossed import crossed, slow_but
from dtypes import HALVES

pytest.importorskip("triton")

from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.engine.device import acceptance
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.filtered_distribution_triton import filter_logits, probabilities
from specbatch.kernels.sampling.rng import DRAFT, TARGET, uniform_ref
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.kernels.sampling.sample_triton import rejection_sample, sample

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of NumPy, in the interpreter
# temperature, top-k, top-p, min-p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.0),
    (0.7, 20, 0.95, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 100, 0.731, 0.05),
    (1.0, 1, 1.0, 0.0),
    (0.3, 0, 0.37, 0.2),
    (1.0, 5000, 0.999, 0.0),
    (5.0, 700, 0.9, 0.0),
    (1e-30, 0, 0.9, 0.0),
    (1.0, 50, 1e-9, 0.0),
]


filter_in_small_blocks = partial(filter_logits, block=64, warps=4)  # many to a row, and lists that overflow


def settings_of(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = [SETTINGS[index % len(SETTINGS)] for index in range(count)]
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*chosen, strict=True))
    return temperature.float(), top_k.long(), top_p.float(), min_p.float()


def logits_of(kind: str, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 7 + vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator)
    logits = {
        "flat": logits,
        "peaked": logits * 5,
        "ties": (logits * 2).round(),
        "all equal": logits * 0 - 1,
        "impossible": torch.where(logits > 1, logits, -math.inf),
    }[kind]
    return logits.to(dtype).to(device)


KINDS = ["flat", "peaked", "ties", "all equal", "impossible"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(
        [("ties", torch.float16), ("impossible", HALVES[-1]), ("peaked", torch.float32)],
        [*itertools.product(KINDS, HALVES), ("peaked", torch.float32)],
    ),
)
def test_filtered_distribution_matches_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = len(SETTINGS)
    logits = logits_of(kind, rows, 100, dtype, device)
    settings = settings_of(rows, device)
    ours = probabilities(filter_in_small_blocks(logits, *settings, truncated=True))
    expected = probabilities_ref(logits, *settings)
    for row in range(rows):
        assert torch.equal(ours[row] > 0, expected[row] > 0), SETTINGS[row]
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "n", "truncated"),
    slow_but([("peaked", 1, True), ("ties", 1, False)], [("flat", 2, True), ("peaked", 1, True), ("ties", 1, False)]),
)
def test_samples_match_reference(kind: str, n: int, truncated: bool, device: torch.device) -> None:
    batch = len(SETTINGS)
    logits = logits_of(kind, batch * n, 100, torch.float16, device)
    settings = settings_of(batch, device)
    generator = torch.Generator().manual_seed(n)
    seeds = torch.randint(-(1 << 62), 1 << 62, (batch,), generator=generator).to(device)
    positions = torch.randint(0, 1000, (batch, n), generator=generator).to(device)
    tokens, finite = sample(filter_in_small_blocks(logits, *settings, truncated=truncated), seeds, positions, TARGET)
    cut = [item.repeat_interleave(n) for item in (settings if truncated else settings[:1])]
    uniform = uniform_ref(seeds[:, None], positions, TARGET)
    expected = sample_ref(probabilities_ref(logits, *cut).view(batch, n, -1), uniform)
    assert torch.equal(tokens, expected)
    assert finite.all()


@pytest.mark.parametrize(
    ("kind", "drafted", "verification"),
    slow_but(
        [("flat", 1, "token"), ("peaked", None, "block")],
        itertools.product(("peaked", "flat"), (None, 1), ("token", "block")),
    ),
)
def test_rejection_sampling_matches_reference(
    kind: str, drafted: int | None, verification: str, device: torch.device
) -> None:
    """The first draft's distribution is the target's own, so that p - q is zero."""
    batch, n, vocabulary = 7, 4, 100
    logits = logits_of(kind, batch * n, vocabulary, torch.float16, device)
    settings = settings_of(batch, device)
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(1 << 62), 1 << 62, (batch,), generator=generator).to(device)
    positions = (torch.randint(0, 1000, (batch, 1), generator=generator) + torch.arange(n)).to(device)
    sampling = Sampling(*settings, seeds, SamplingFlags(sampled=True, truncated=True))
    near = logits.float().view(batch, n, -1)[:, :-1] + torch.randn(batch, n - 1, vocabulary, generator=generator).to(
        device
    )
    near[:, 0] = logits.view(batch, n, -1)[:, 0]
    q = sampling.probabilities(near.contiguous())
    drafts = sample_ref(q, sampling.uniform(positions[:, :-1], DRAFT))
    limit = torch.full((batch,), n - 1 if drafted is None else drafted, device=device)
    p = sampling.probabilities(logits.view(batch, n, -1))
    expected = acceptance._rejection_sample(p, Proposal(drafts, limit, q), positions, sampling, verification)
    filtered = filter_in_small_blocks(logits, *settings, truncated=True)
    # Bit-identical to the target's where equal, like a draft distribution that these kernels wrote.
    q[:, 0] = probabilities(filtered).view(batch, n, -1)[:, 0]
    tokens, accepted, finite = rejection_sample(filtered, drafts, limit, q, seeds, positions, verification)
    assert torch.equal(accepted, expected[1])
    emitted = torch.arange(n, device=device) <= accepted[:, None]
    assert torch.equal(tokens[emitted], expected[0][emitted])
    assert finite.all()
    if drafted is None:
        assert 0 < accepted.sum() < batch * (n - 1)


@pytest.mark.parametrize(("bad", "temperature"), crossed([math.nan, math.inf], [0.0, 0.8]))
def test_non_finite_logits_are_flagged(bad: float, temperature: float, device: torch.device) -> None:
    logits = logits_of("flat", 4, 90, torch.float16, device)
    logits[2, 85] = bad
    one, two = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    settings = (one * temperature, two + 3, one * 0.9, one * 0)
    positions = torch.arange(4, device=device).view(2, 2)
    for truncated in (True, False):
        tokens, finite = sample(filter_in_small_blocks(logits, *settings, truncated=truncated), two, positions, TARGET)
        assert finite.tolist() == [[True, True], [False, True]]
        assert ((tokens >= 0) & (tokens < 90)).all()
        filtered = filter_in_small_blocks(logits, *settings, truncated=truncated)
        q = torch.full((2, 1, 90), 1 / 90, device=device)
        tokens, _, finite = rejection_sample(filtered, tokens[:, :1].contiguous(), two + 1, q, two, positions)
        assert finite.tolist() == [[True, True], [False, True]]
        assert ((tokens >= 0) & (tokens < 90)).all()


@pytest.mark.parametrize("kind", slow_but(["flat"], ["peaked", "flat"]))
def test_production_block_sizes(kind: str, device: torch.device) -> None:
    """Whole rows on a GPU; tokens near a cutoff may fall on either side of it."""
    rows, vocabulary = len(SETTINGS), 151_936 if device.type == "cuda" else 9_001
    logits = logits_of(kind, rows, vocabulary, torch.bfloat16 if device.type == "cuda" else torch.float16, device)
    settings = settings_of(rows, device)
    filtered = filter_logits(logits, *settings, truncated=True)
    ours, expected = probabilities(filtered), probabilities_ref(logits, *settings)
    assert ((ours - expected).abs().sum(1) < 1e-4).all()
    positions, seeds = torch.arange(rows, device=device)[:, None], torch.arange(rows, device=device)
    tokens, _ = sample(filtered, seeds, positions, TARGET)
    # Our sample from our own distribution.
    assert torch.equal(tokens, sample_ref(ours, uniform_ref(seeds, positions[:, 0], TARGET))[:, None])
