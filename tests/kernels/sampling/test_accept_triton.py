"""Greedy acceptance, commit and staging kernels match the references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from crossed import crossed
from dtypes import DTYPES

pytest.importorskip("triton")

from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.engine.device.acceptance import accept_ref
from specbatch.kernels.sampling.accept import BatchRows
from specbatch.kernels.sampling.accept_triton import (
    BLOCK,
    FEW,
    PROGRAMS,
    Chosen,
    argmax_partials,
    commit,
    verify_inputs,
)
from specbatch.kernels.sampling.rng import (
    SIMULATED,
    acceptance_thresholds,
    context_row_ref,
    simulated_accept_ref,
    thresholds_by_context,
    uniform_ref,
)


def greedy(seeds: torch.Tensor) -> Sampling:
    zero = torch.zeros(len(seeds), device=seeds.device)
    return Sampling(zero, zero.long(), zero + 1, zero, seeds, SamplingFlags())


class Case:
    """B sequences of random lengths in a batch of R rows, two of them padding. Drafts agree to varying degrees."""

    def __init__(self, batch: int, n: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> None:
        cpu = torch.Generator().manual_seed(batch * 1000 + n)
        self.n, self.slots = n, batch + 2
        logits = torch.randn(batch * n, vocabulary, generator=cpu)
        if vocabulary > 8:
            logits = (logits * 2).round() / 2  # ties everywhere
        self.logits = logits.to(dtype).to(device)
        best = self.logits.argmax(-1).view(batch, n)
        agree = torch.rand(batch, n, generator=cpu).to(device) < 0.85
        drafts = torch.where(agree, best, (best + 1) % vocabulary)
        self.drafts = drafts[:, : n - 1].contiguous()
        self.drafted = torch.randint(0, n, (batch,), generator=cpu).to(device)
        self.drafted[::2] = n - 1
        rows = torch.randperm(batch + 1, generator=cpu)[:batch] + 1
        if batch > 2:
            rows[:2] = 0
        self.rows = rows.to(device)
        self.lengths = torch.randint(0, 30, (self.slots,), generator=cpu).to(device)
        self.tokens = torch.randint(0, vocabulary, (self.slots, 30 + n + 3), generator=cpu).to(device)
        self.seeds = torch.randint(-(1 << 62), 1 << 62, (batch,), generator=cpu).to(device)

    def expected(
        self, simulate: torch.Tensor | None = None, accepted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(packed, tokens, lengths) as an iteration makes them."""
        starts = self.lengths[self.rows]
        predicted = starts[:, None] + torch.arange(1, self.n + 1, device=starts.device)
        logits = self.logits.view(len(starts), self.n, -1)
        verdict = accept_ref(logits, Proposal(self.drafts, self.drafted), predicted, greedy(self.seeds), simulate)
        count = verdict.accepted if accepted is None else accepted
        tokens, lengths = self.tokens.clone(), self.lengths.clone()
        tokens[self.rows[:, None], predicted] = verdict.tokens
        lengths[self.rows] = starts + count + 1
        lengths[0] = self.lengths[0]
        packed = torch.cat([verdict.tokens, torch.stack([count, self.drafted, verdict.finite.long()], 1)], 1)
        return packed, tokens, lengths

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.drafts, self.drafted)

    @property
    def batch(self) -> BatchRows:
        return BatchRows(self.tokens, self.lengths, self.rows)

    def commit_argmax(self, simulate: torch.Tensor | None = None) -> torch.Tensor:
        return commit(Chosen(argmax_partials(self.logits), None), self.proposal, self.batch, self.seeds, simulate)

    def check(self, packed: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        assert torch.equal(packed, expected[0])
        assert torch.equal(self.tokens[1:], expected[1][1:])
        assert torch.equal(self.lengths, expected[2])


SHAPES = [(1, 1, 5), (1, 5, 37), (4, 1, 8193), (5, 3, 4096), (3, 7, 4097), (2, 16, 10_000), (1, 64, 3)]


@pytest.mark.parametrize(("batch", "n", "vocabulary", "simulate", "dtype"), crossed(SHAPES, [None, 0.0, 0.7], DTYPES))
def test_greedy_accept_matches_reference(
    batch: int, n: int, vocabulary: int, simulate: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(batch, n, vocabulary, device, dtype)
    thresholds = None if simulate is None else acceptance_thresholds([simulate] * 7, device)
    expected = case.expected(thresholds)
    case.check(case.commit_argmax(thresholds), expected)


@pytest.mark.parametrize("rule", ["compared", "given", "simulated"])
@pytest.mark.parametrize(("batch", "n", "vocabulary"), SHAPES[:5])
def test_commit_matches_reference(batch: int, n: int, vocabulary: int, rule: str, device: torch.device) -> None:
    case = Case(batch, n, vocabulary, device, torch.float32)
    options: dict[str, Any] = {}
    if rule == "given":
        options = {"accepted": torch.arange(batch, device=device) % n}
    elif rule == "simulated":
        options = {"simulate": acceptance_thresholds((0.9, 0.5), device)}
    expected = case.expected(options.get("simulate"), options.get("accepted"))
    finite = torch.arange(batch * n, device=device).view(batch, n) % 5 > 0
    expected[0][:, -1] = finite.all(1)
    chosen = case.logits.argmax(-1).view(batch, n)
    packed = commit(Chosen(chosen, finite), case.proposal, case.batch, case.seeds, **options)
    case.check(packed, expected)


@pytest.mark.parametrize(("place", "bad"), crossed([0, 4095, 4096, 9000], [math.nan, -math.nan, math.inf]))
def test_non_finite_logits_are_flagged(bad: float, place: int, device: torch.device) -> None:
    case = Case(3, 4, 9001, device, torch.float32)
    case.logits[6, place] = bad  # the second sequence
    packed = case.commit_argmax()
    assert packed[:, -1].tolist() == [1, 0, 1]
    assert packed[1, 2] == place


@pytest.mark.parametrize("rows", [1, 700, 3000])
def test_argmax_does_not_depend_on_chunk_size(rows: int, device: torch.device) -> None:
    """Few rows give many chunks; many rows give several blocks per program."""
    programs, few = PROGRAMS, FEW
    if device.type == "cpu":
        programs, few, rows = max(1, 2048 * 2 // rows), 256 if rows == 1 else 0, 2

    def argmax(logits: torch.Tensor) -> list[int]:
        best = argmax_partials(logits, programs=programs, few=few).amax(-1)
        return (0x7FFFFFFF - (best & 0x7FFFFFFF)).tolist()

    logits = torch.randn(rows, 5 * BLOCK + 3, generator=torch.Generator().manual_seed(1)).to(device)
    logits = (logits * 4).round()
    assert argmax(logits) == logits.argmax(-1).tolist()
    logits[:, 7000] = math.nan
    logits[:, 7000 + BLOCK] = math.nan
    assert argmax(logits) == [7000] * rows
    logits[:, 12] = -math.nan
    assert argmax(logits) == [12] * rows
    for value in (-math.inf, 0.0, -3.0):
        assert argmax(torch.full_like(logits, value)) == [0] * rows
    zeros = torch.zeros_like(logits)
    zeros[:, 0] = -0.0
    assert argmax(zeros) == [0] * rows
    lowest = torch.full_like(logits, -math.inf)
    lowest[:, -1] = -1e30
    assert argmax(lowest) == [logits.shape[1] - 1] * rows


@pytest.mark.parametrize("by_context", [False, True])
def test_random_numbers_match_reference(device: torch.device, by_context: bool) -> None:
    batch = 64
    seeds = torch.randint(-(1 << 62), 1 << 62, (batch,), generator=torch.Generator().manual_seed(3)).to(device)
    drafts = torch.zeros(batch, 7, dtype=torch.int64, device=device)
    drafted, rows = torch.full_like(seeds, 7), torch.arange(1, batch + 1, device=device)
    chosen = torch.zeros(batch, 8, dtype=torch.int64, device=device)
    tokens = torch.zeros(batch + 1, 2000, dtype=torch.int64, device=device)
    lengths = torch.arange(batch + 1, device=device) * 29
    starts = lengths[1:].clone()
    batch_rows = BatchRows(tokens, lengths, rows)
    thresholds = acceptance_thresholds([0.9, 0.5, 0.8, 0.99, 0.6, 0.3, 1.0], device)
    if by_context:
        thresholds = thresholds_by_context(lambda length: [1 / (1 + length / 500)] * 9, device)
    packed = commit(Chosen(chosen, chosen == 0), Proposal(drafts, drafted), batch_rows, seeds, thresholds)
    assert torch.equal(packed[:, 8], simulated_accept_ref(seeds, starts, drafted, thresholds))
    assert len(packed[:, 8].unique()) > 4


def test_random_numbers_are_below_a_threshold_as_often_as_the_reference(device: torch.device) -> None:
    """Whose threshold is exact: at the random number itself, and one above it."""
    seeds = torch.arange(1, 9, device=device)
    number = (uniform_ref(seeds, torch.full_like(seeds, 6), SIMULATED) * 2.0**53).long()
    for more, wanted in ((0, 0), (1, 1)):
        for place in range(len(seeds)):
            tokens, lengths = torch.zeros(2, 9, dtype=torch.int64, device=device), torch.tensor([0, 5], device=device)
            rows, seed = torch.tensor([1], device=device), seeds[place : place + 1]
            chosen = torch.zeros(1, 2, dtype=torch.int64, device=device)
            proposal = Proposal(chosen[:, 1:], torch.tensor([1], device=device))
            threshold = number[place : place + 1] + more
            packed = commit(Chosen(chosen, chosen == 0), proposal, BatchRows(tokens, lengths, rows), seed, threshold)
            assert (
                packed[0, 2] == wanted == simulated_accept_ref(seed, lengths[1:] * 0 + 5, proposal.drafted, threshold)
            )


@pytest.mark.parametrize(("batch", "n"), [(1, 1), (3, 1), (2, 5), (5, 16)])
def test_stage_matches_reference(batch: int, n: int, device: torch.device) -> None:
    case = Case(batch, n, 50, device, torch.float32)
    tokens, positions = verify_inputs(case.tokens, case.lengths, case.rows, case.drafts)
    lengths = case.lengths[case.rows]
    root = case.tokens[case.rows, lengths][:, None]
    assert torch.equal(tokens, torch.cat([root, case.drafts], 1).flatten())
    assert torch.equal(positions, (lengths[:, None] + torch.arange(n, device=device)).flatten())


def test_context_rows_are_eighths_of_powers_of_two() -> None:
    lengths = torch.tensor([0, 1, 2, 3, 511, 512, 575, 576, 1023, 1024, 32767, 32768, 1 << 30])
    wanted = [0, 0, 8, 12, 71, 72, 72, 73, 79, 80, 119, 120, 191]
    assert context_row_ref(lengths).tolist() == wanted
