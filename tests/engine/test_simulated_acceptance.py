"""Simulated acceptance: its exact distribution for every number of drafts, in engines with chains, blocks, trees and
chosen draft lengths, under both schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chi_square import p_value
from crossed import slow_but
from stand_ins import random_draft_lengths

from specbatch import Engine, SamplingParams, Speculation
from specbatch.config.acceptance_profile import AcceptanceProfile, geometric
from specbatch.jobs.send_one import table
from specbatch.kernels.sampling.rng import acceptance_thresholds, simulated_accept_ref

CPU = torch.device("cpu")
PROFILE = AcceptanceProfile("falling", (0.9, 0.7, 0.8, 0.5, 0.3, 1.0, 0.6))
SELF = Speculation("standalone", draft="self:skip=1", draft_tokens=7)
SHAPES = {
    "chain": SELF,
    "block": Speculation("dflash", draft="toy-block-34", draft_tokens=4),
    "dspark": Speculation("dspark", draft="dummy", draft_tokens=4),
    "dflash2": Speculation("dflash2", draft="dummy", draft_tokens=4),
    "domino": Speculation("domino", draft="dummy", draft_tokens=4),
    "lilicorr": Speculation("lilicorr", draft="dummy", draft_tokens=4),
    "xpress": Speculation("xpress", draft="dummy", draft_tokens=4),
    "tree": replace(SELF, draft_steps=5, draft_topk=3),
    "ngram": Speculation("ngram", draft_tokens=5, ngram_min=1),
}


def accepted(profile: AcceptanceProfile, seeds: torch.Tensor, lengths: torch.Tensor, drafted: int) -> torch.Tensor:
    thresholds = acceptance_thresholds(profile.conditional, CPU)
    return simulated_accept_ref(seeds, lengths, torch.full_like(seeds, drafted), thresholds)


def chances(profile: AcceptanceProfile, drafted: int) -> list[float]:
    """Of accepting 0, 1, .. drafts."""
    reached = [1.0, *itertools.accumulate(profile.conditional[:drafted], lambda one, other: one * other), 0.0]
    return [one - other for one, other in itertools.pairwise(reached)]


@pytest.mark.parametrize("profile", [PROFILE, geometric(2.4, 3), geometric(6.35, 7)], ids=str)
def test_number_of_accepted_drafts_has_the_distribution_of_the_model(profile: AcceptanceProfile) -> None:
    """For every number of drafts; fewer drafts cut the same draws off."""
    seeds = torch.arange(40_000)
    most = len(profile.conditional)
    found = accepted(profile, seeds, seeds % 97, most)
    assert found.dtype == torch.int64
    for drafted in range(most + 1):
        fewer = accepted(profile, seeds, seeds % 97, drafted)
        assert torch.equal(fewer, found.clamp(max=drafted))
        wanted = chances(profile, drafted)
        assert p_value(fewer.bincount(minlength=drafted + 1), torch.tensor(wanted) * len(seeds)) > 1e-3
        assert (fewer + 1).double().mean().item() == pytest.approx(profile.accept_length(drafted), abs=0.04)


def test_verifies_that_follow_each_other_are_independent() -> None:
    """Each begins where the one before it ended; the draws of one request and those of requests with near seeds."""
    seeds, lengths, drafted = torch.arange(20_000), torch.full((20_000,), 11), len(PROFILE.conditional)
    rounds = []
    for _ in range(3):
        rounds.append(accepted(PROFILE, seeds, lengths, drafted))
        lengths = lengths + rounds[-1] + 1
    single = torch.tensor(chances(PROFILE, drafted)).double()
    joint = single[:, None] * single * len(seeds)
    neighbours = (rounds[0], rounds[0].roll(1))
    for one, other in (*itertools.combinations(rounds, 2), neighbours):
        counts = (one * (drafted + 1) + other).bincount(minlength=joint.numel())
        assert p_value(counts, joint) > 1e-3


def run(
    toy_engine: Callable[..., Engine],
    toy: Any,
    speculation: Speculation,
    temperature: float = 0.0,
    count: int = 220,
) -> tuple[list[list[int]], dict[str, Any], dict[str, Any]]:
    """Tokens, metrics and acceptance counters of long answers."""
    engine = toy_engine(speculation=speculation, max_running=4, max_model_len=500, seed=1)
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, temperature=temperature)
    completions = engine.generate([list(prompt) for prompt in toy.prompts()[::7]], params)
    record = engine.record()
    return [item.token_ids for item in completions], record.metrics, record.counters["acceptance"]


@pytest.mark.parametrize(
    ("name", "temperature"), slow_but([("chain", 0.0), ("ngram", 0.0)], itertools.product(SHAPES, (0.0, 1.0)))
)
def test_positions_are_accepted_with_their_probability_under_both_schedules(
    toy: Any, toy_engine: Callable[..., Engine], name: str, temperature: float
) -> None:
    speculation = replace(SHAPES[name], simulate_accept=PROFILE)
    tokens, metrics, counts = run(toy_engine, toy, speculation, temperature)
    assert metrics["verify_steps"] > 150
    assert len(counts["tried"]) == speculation.depth
    for p, tried, right in zip(PROFILE.conditional, counts["tried"], counts["accepted"], strict=False):
        assert p_value([right, tried - right], [p * tried, (1 - p) * tried]) > 1e-3
    if name != "ngram":  # which does not draft at every place
        assert metrics["accept_length"] == pytest.approx(PROFILE.accept_length(speculation.depth), rel=0.1)
    other, _, _ = run(toy_engine, toy, replace(speculation, schedule="v1"), temperature, 70)
    assert other == [own[:70] for own in tokens]


@pytest.mark.slow
def test_a_mean_is_that_of_the_configured_drafts(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    for speculation, mean in ((SHAPES["block"], 3.3), (SHAPES["tree"], 2.4)):
        _, metrics, _ = run(toy_engine, toy, replace(speculation, simulate_accept_length=mean))
        assert metrics["accept_length"] == pytest.approx(mean, rel=0.08)


def test_chosen_draft_lengths_see_the_same_probabilities(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0, 1, 2, 4 and 7 drafts in turn; tokens of both schedules agree where each draws its own lengths."""
    random_draft_lengths(monkeypatch)
    speculation = replace(SELF, draft_tokens="auto", draft_steps=7, simulate_accept=PROFILE)
    _, metrics, counts = run(toy_engine, toy, speculation)
    assert metrics["accept_length"] < PROFILE.accept_length() - 0.3
    assert counts["drafted"][0] > 1.5 * counts["drafted"][6] > 0
    for p, tried, right in zip(PROFILE.conditional, counts["tried"], counts["accepted"], strict=True):
        assert p_value([right, tried - right], [p * tried, (1 - p) * tried]) > 1e-3


def test_the_table_of_one_request_shows_the_model(toy_engine: Callable[..., Engine]) -> None:
    result = {"latency_s": 1.0, "tokens": 2, "accept_length": 6.3, "speed": 2.0}
    for changes, shown in (
        ({"simulate_accept_length": 6.35}, "simulated acceptance (geometric, mean 6.35)"),
        ({"simulate_accept": PROFILE}, "simulated acceptance (falling)"),
        ({}, ""),
    ):
        text = table({**result, "record": toy_engine(speculation=replace(SELF, **changes)).record().as_dict()})
        assert ("simulated" in text) is bool(shown)
        assert shown in text
