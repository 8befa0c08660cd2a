"""Simulated accept length: its distribution, the mean in a record, equal tokens of both schedules, and the note in
tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import slow_but

from specbatch import Engine, SamplingParams, Speculation
from specbatch.jobs.send_one import table
from specbatch.kernels.sampling.rng import simulated_accept_ref

SELF = Speculation("standalone", draft="self:skip=1", draft_tokens=7)


@pytest.mark.parametrize("mean", [1.0, 1.03, 2.4, 4.0, 6.35, 7.999, 8.0])
def test_lengths_are_two_neighbours_with_the_mean(mean: float) -> None:
    lengths = torch.arange(40_000)
    accepted = simulated_accept_ref(torch.full_like(lengths, 5), lengths, torch.full_like(lengths, 7), mean)
    assert accepted.dtype == torch.int64
    assert set(accepted.tolist()) <= {int(mean) - 1, int(mean)}
    assert (accepted + 1).double().mean().item() == pytest.approx(mean, abs=0.01)


def test_at_most_the_drafts_are_accepted() -> None:
    drafted = torch.tensor([0, 1, 2, 3, 7])
    assert simulated_accept_ref(torch.arange(5), torch.arange(5), drafted, 4.0).tolist() == [0, 1, 2, 3, 3]


def test_random_numbers_depend_on_seed_and_length() -> None:
    seeds, lengths = torch.arange(30).repeat_interleave(40), torch.arange(40).repeat(30)
    accepted = simulated_accept_ref(seeds, lengths, torch.full_like(seeds, 7), 2.5).view(30, 40)
    assert len(accepted.unique(dim=0)) == 30
    assert len(accepted.unique(dim=1).t()) == 40


def run(
    toy_engine: Callable[..., Engine],
    toy: Any,
    mean: float,
    schedule: str,
    temperature: float,
    speculation: Speculation,
    tokens: int = 220,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens and metrics of 4 long answers."""
    asked = replace(speculation, schedule=schedule, simulate_accept_length=mean)
    engine = toy_engine(speculation=asked, max_running=4, max_model_len=500)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=temperature)
    completions = engine.generate([list(prompt) for prompt in toy.prompts()[::7]], params)
    return [item.token_ids for item in completions], engine.record().metrics


@pytest.mark.parametrize(("mean", "temperature"), slow_but([(6.35, 1.0)], [(2.4, 0.0), (6.35, 1.0), (6.35, 0.0)]))
def test_a_record_shows_the_mean_and_the_schedules_agree(
    toy: Any, toy_engine: Callable[..., Engine], mean: float, temperature: float
) -> None:
    tokens, metrics = run(toy_engine, toy, mean, "v1", temperature, SELF)
    assert metrics["accept_length"] == pytest.approx(mean, rel=0.02)
    assert metrics["verify_steps"] > 110
    assert run(toy_engine, toy, mean, "v2", temperature, SELF)[0] == tokens


@pytest.mark.parametrize("schedule", [pytest.param("v1", marks=pytest.mark.slow), "v2"])
def test_a_tree_has_the_simulated_accept_length(toy: Any, toy_engine: Callable[..., Engine], schedule: str) -> None:
    tree = replace(SELF, draft_steps=5, draft_topk=3)
    tokens, metrics = run(toy_engine, toy, 3.3, schedule, 0.0, tree)
    assert metrics["accept_length"] == pytest.approx(3.3, rel=0.02)
    # Up to 5 levels of the last two trees of each request are cut off at the limit.
    most = 7 * metrics["verify_steps"]
    assert most - 2 * 5 * len(tokens) <= metrics["drafted_tokens"] < most
    assert all(len(item) == 220 for item in tokens)


def test_ngram_has_the_simulated_accept_length_where_it_drafts(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    speculation = Speculation("ngram", draft_tokens=7, ngram_min=1)
    _, metrics = run(toy_engine, toy, 2.4, "v2", 0.0, speculation, tokens=440)
    drafting = metrics["drafted_tokens"] / 7
    assert 150 < drafting < metrics["verify_steps"]
    assert metrics["accepted_tokens"] / drafting + 1 == pytest.approx(2.4, rel=0.02)


def test_the_table_of_one_request_shows_the_simulation(toy_engine: Callable[..., Engine]) -> None:
    result = {"latency_s": 1.0, "tokens": 2, "accept_length": 6.3, "speed": 2.0}
    for mean, shown in ((6.35, True), (None, False)):
        record = toy_engine(speculation=replace(SELF, simulate_accept_length=mean)).record()
        assert ("simulated accept length 6.35" in table({**result, "record": record.as_dict()})) is shown
