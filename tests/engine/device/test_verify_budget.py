"""Verify budgets: the policy against brute force, exact losslessness by enumeration, and runs of engines."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from crossed import first_quick
from exact_acceptance import Text, Toy, lattice_of, sampling_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from watched_calls import Watch

from specbatch import Engine, SamplingParams, Speculation
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.ngram import NGram
from specbatch.engine.device.acceptance import accept_ref
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.device.verify_budget import VerifyBudget
from specbatch.kernels.sampling.rng import ACCEPT, RESIDUAL
from specbatch.kernels.sampling.verify_budget import MOST, verified_drafts
from specbatch.models.decoder import Decoder

BUDGET = Speculation("standalone", draft="self:skip=1", draft_tokens=4, verify_budget=2.5)

Confidence = Callable[[int, Text], float]  # of a request's last draft, given all of its drafts up to that one


# -- policy -----------------------------------------------------------------------------------------------------------


@examples(60)
@given(st.data())
def test_no_other_division_of_the_rows_has_a_larger_expectation(data: st.DataObject) -> None:
    batch, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chances = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    conditional = torch.tensor([[data.draw(chances) for _ in range(most)] for _ in range(batch)])
    drafted = torch.tensor([data.draw(st.integers(0, most)) for _ in range(batch)])
    total = data.draw(st.integers(0, batch * most))
    found = verified_drafts(conditional, drafted, total)
    assert int(found.sum()) == total
    assert int(found.max()) <= most

    values = conditional.cumprod(1) * (torch.arange(most) < drafted[:, None])

    def expected(counts: tuple[int, ...]) -> float:
        return sum(float(row[:count].sum()) for row, count in zip(values, counts, strict=True))

    divisions = itertools.product(range(most + 1), repeat=batch)
    best = max(expected(counts) for counts in divisions if sum(counts) == total)
    assert expected(tuple(found.tolist())) == pytest.approx(best)


def test_equal_values_go_to_earlier_drafts() -> None:
    ones, three = torch.ones(3, 4), torch.tensor([4, 4, 4])
    assert verified_drafts(ones, three, 5).tolist() == [2, 2, 1]
    assert verified_drafts(0 * ones, three, 4).tolist() == [2, 1, 1]
    assert verified_drafts(ones, torch.tensor([0, 4, 1]), 5).tolist() == [0, 4, 1]
    assert verified_drafts(ones, torch.tensor([0, 1, 1]), 5).tolist() == [2, 2, 1]  # nothing else takes the rows


def test_rows_are_rounded_up() -> None:
    budget = VerifyBudget.of(1.1, 8, torch.device("cpu"), mixes_seeds=False)
    assert [budget.rows(batch) for batch in (1, 8, 10)] == [2, 9, 11]


# -- exact enumeration ------------------------------------------------------------------------------------------------


@cache
def emitted(toy: Toy, drafts: Text, drafted: int) -> dict[Text, float]:
    """Probability of each emitted text for one chain of which `drafted` are verified, over all random numbers."""
    rows = len(drafts) + 1
    numbers = toy.numbers(rows)
    sampling = lattice_of({ACCEPT: numbers, RESIDUAL: numbers[:, -1:].expand_as(numbers)})
    p = torch.tensor([toy.target(drafts[:place]) for place in range(rows)], dtype=torch.float64)
    q = torch.tensor([toy.draft(drafts[:place]) for place in range(rows - 1)], dtype=torch.float64)
    count = len(numbers)
    proposal = Proposal(torch.tensor(drafts).expand(count, -1), torch.full((count,), drafted), q.expand(count, -1, -1))
    result = accept_ref(p.expand(count, -1, -1), proposal, torch.arange(1, rows + 1).expand(count, -1), sampling)
    return toy.emitted(result)


def texts_of(
    toys: tuple[Toy, Toy],
    confidence: Confidence,
    most: int,
    total: int | Callable[[list[list[float]]], int],
    *,
    same_numbers: bool = False,
) -> tuple[dict[tuple[Text, Text], float], set[int]]:
    """The joint distribution of the texts of `most` + 1 tokens of two requests, which have `most` drafts each and
    verify `total` of them, and how many the first one verifies. total: given, or by the confidence in all drafts of
    the step; same_numbers: both draw the same drafts."""
    vocabulary, length = toys[0].vocabulary, most + 1
    found: dict[tuple[Text, Text], float] = defaultdict(float)
    counts_seen: set[int] = set()
    for chains in itertools.product(itertools.product(range(vocabulary), repeat=most), repeat=2):
        if same_numbers and chains[0] != chains[1]:
            continue
        drawn = list(zip(toys, chains, strict=True))[: 1 if same_numbers else 2]
        chance = math.prod(toy.draft(chain[:at])[token] for toy, chain in drawn for at, token in enumerate(chain))
        if not chance:
            continue
        conditional = [
            [confidence(number, chain[: at + 1]) for at in range(most)] for number, chain in enumerate(chains)
        ]
        number = total if isinstance(total, int) else total(conditional)
        counts = verified_drafts(torch.tensor(conditional), torch.tensor([most, most]), number).tolist()
        counts_seen.add(counts[0])
        each = [completed(toy, chain, count, length) for toy, chain, count in zip(toys, chains, counts, strict=True)]
        for (one, share), (other, other_share) in itertools.product(*(texts.items() for texts in each)):
            found[one, other] += chance * share * other_share
    return found, counts_seen


@cache
def completed(toy: Toy, drafts: Text, drafted: int, length: int) -> dict[Text, float]:
    """What is emitted, continued by plain sampling."""
    whole: dict[Text, float] = defaultdict(float)
    for run, chance in emitted(toy, drafts, drafted).items():
        for rest in itertools.product(range(toy.vocabulary), repeat=length - len(run)):
            whole[run + rest] += chance * toy.probability(run + rest, len(run))
    return whole


def error(toys: tuple[Toy, Toy], found: dict[tuple[Text, Text], float], length: int) -> float:
    """Largest difference to independent texts of the two targets."""
    texts = itertools.product(range(toys[0].vocabulary), repeat=length)
    return max(
        abs(found.get((one, other), 0.0) - toys[0].probability(one) * toys[1].probability(other))
        for one, other in itertools.product(texts, repeat=2)
    )


def before(number: int, drafts: Text) -> float:
    """Depends on the drafts before the last one."""
    if len(drafts) == 1:
        return (1.0, 0.5)[number]
    return random.Random(f"{number} {drafts[:-1]}").choice([0.2, 0.8, 1.0])


def itself(number: int, drafts: Text) -> float:
    """Depends on the draft, as the probability of the drafted token would."""
    return random.Random(f"{number} {drafts}").choice([0.2, 0.8, 1.0])


def toys_of(seed: int) -> tuple[Toy, Toy]:
    return Toy(seed, 3, 4), Toy(seed + 9, 3, 4)


@pytest.mark.parametrize(
    ("seed", "most", "total"),
    first_quick(2, [(0, 2, 2), (1, 2, 3), *((seed, 2, total) for seed in range(2, 8) for total in (2, 3)), (0, 3, 4)]),
)
def test_confidence_in_drafts_that_are_not_sampled_yet_is_lossless(seed: int, most: int, total: int) -> None:
    toys = toys_of(seed)
    found, counts = texts_of(toys, before, most, total)
    assert len(counts) > 1, "the division must depend on the drafts"
    assert error(toys, found, most + 1) < 1e-12


def test_enumeration_catches_confidence_in_the_draft_itself() -> None:
    toys = toys_of(0)
    assert error(toys, texts_of(toys, itself, 2, 2)[0], 3) > 1e-3


def test_enumeration_catches_a_budget_that_depends_on_drafts_of_its_step() -> None:
    """The confidence in a draft depends on the drafts before it only, but it decides on these if it sets the budget."""
    toys = toys_of(0)
    found, _ = texts_of(toys, before, 2, lambda confidence: 1 + (confidence[1][1] == 1.0))
    assert error(toys, found, 3) > 1e-3


def test_enumeration_catches_the_same_random_numbers_in_two_requests() -> None:
    """The second request has the smaller value, and its first draft is verified depending on that very token."""
    toy = Toy(0, 3, 4)
    found, _ = texts_of((toy, toy), before, 2, 2, same_numbers=True)
    own: dict[Text, float] = defaultdict(float)
    for (_, text), chance in found.items():
        own[text] += chance
    assert toy.error(own, 3) > 1e-3


# -- engines ----------------------------------------------------------------------------------------------------------


def test_target_computes_the_rows_of_the_budget(toy: Any, toy_engine: Callable[..., Engine], watch: Watch) -> None:
    rows, verifying = list[int](), list[bool]()
    watch(DecodeStep, "verify", before=lambda *_: verifying.append(True), after=lambda *_: verifying.clear())
    watch(Decoder, "enter", before=lambda model, tokens, *_, **__: rows.extend([len(tokens)] * len(verifying)))
    prompts, params = [list(prompt) for prompt in toy.prompts()[4:7]], SamplingParams(max_new_tokens=9, ignore_eos=True)
    engine = toy_engine(speculation=BUDGET, max_running=4)
    done = engine.generate(prompts, params)
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:9] for prompt in prompts]
    assert set(rows) <= {math.ceil(2.5 * batch) for batch in (1, 2, 3)}
    assert max(rows) == 8

    record = engine.record()
    metrics, counts = record.metrics, [item.metrics for item in done]
    assert record.caps["verify_budget"] == 2.5
    mean = sum(item.budget_rows for item in counts) / sum(item.verify_steps for item in counts)
    assert metrics["rows_per_verify"] == pytest.approx(mean)
    assert 2 < mean <= 3
    assert metrics["drafted_tokens"] <= sum(item.budget_rows - item.verify_steps for item in counts)
    assert metrics["accept_rate"] == metrics["accepted_tokens"] / metrics["drafted_tokens"]
    assert toy_engine(speculation=replace(BUDGET, verify_budget=None)).record().metrics["rows_per_verify"] is None


def _step(slots: list[int], sampled: bool = True) -> Any:
    sampling = sampling_of(len(slots), temperature=float(sampled), seeds=torch.full((len(slots),), 7))
    return StepInput(None, torch.tensor(slots), torch.ones(len(slots)), 2, 4, 9, sampling)  # type: ignore[arg-type]


def _chosen(budget: VerifyBudget, step: StepInput, proposal: Proposal) -> list[int]:
    return budget.spend(step, proposal).drafted.tolist()


def test_rows_go_to_the_request_whose_drafts_were_accepted() -> None:
    budget = VerifyBudget.of(2, 2, torch.device("cpu"), mixes_seeds=False)
    step, drafts = _step([1, 2, 0]), Proposal(torch.ones(3, 4, dtype=torch.int64), torch.tensor([4, 4, 4]))
    assert _chosen(budget, step, drafts) == [2, 1, 0]  # the padding request comes last
    for _ in range(4):
        spent = budget.spend(step, drafts)
        budget.learn(step, spent, torch.tensor([0, int(spent.drafted[1]), 0]))
    assert _chosen(budget, step, drafts) == [0, 3, 0]
    budget.admit([1, 2])
    assert len(set(_chosen(budget, step, drafts)[:2])) == 2


def test_confidence_counts_as_much_as_it_was_right() -> None:
    """Of greedy and of sampled requests."""
    budget = VerifyBudget.of(1.5, 2, torch.device("cpu"), mixes_seeds=False)
    sure = torch.tensor([[0.95], [0.55]])
    drafts = Proposal(torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), confidence=sure)
    step, greedy = _step([1, 2]), _step([1, 2], sampled=False)
    assert _chosen(budget, step, drafts) == [1, 0]
    for _ in range(9):
        budget.learn(step, budget.spend(step, drafts), torch.tensor([0, 0]))
    assert _chosen(budget, step, drafts) == [0, 1]
    assert _chosen(budget, greedy, drafts) == [1, 0]
    budget.counts.fill_(MOST - 1)
    budget.learn(greedy, budget.spend(greedy, drafts), torch.tensor([1, 0]))
    assert budget.counts.unique().tolist() == [MOST // 2, MOST - 1]  # of the level that was full
    nothing = drafts._replace(confidence=torch.full((2, 1), math.nan))
    assert _chosen(budget, greedy, nothing) == [1, 0]


def test_requests_with_the_same_seed_sample_independent_drafts() -> None:
    by_rejection = VerifyBudget.of(2, 4, torch.device("cpu"), mixes_seeds=True)
    assert len(set(by_rejection.begin(_step([1, 2, 3])).sampling.seeds.tolist())) == 3
    assert set(by_rejection.begin(_step([1, 2, 3], sampled=False)).sampling.seeds.tolist()) == {7}
    by_comparison = VerifyBudget.of(2, 4, torch.device("cpu"), mixes_seeds=False)
    assert set(by_comparison.begin(_step([1, 2, 3])).sampling.seeds.tolist()) == {7}


def test_more_drafts_are_accepted_than_with_a_fixed_length_and_as_many_rows(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for a head, whose drafts are right as often as it says."""
    prompts, chance = [list(prompt) for prompt in toy.prompts()[:12]], random.Random(3)
    answers = [prompt + list(toy.greedy(tuple(prompt))) for prompt in prompts]

    def propose(self: NGram, step: StepInput) -> Proposal:
        drafts, confidence = [], []
        for slot, length in zip(step.slots.tolist(), step.lengths.tolist(), strict=True):
            text = step.batch.tokens[slot, : length + 1].tolist()
            answer = next(answer for answer in answers if answer[: length + 1] == text)
            sure = [chance.choice([0.2, 0.9])] * step.num_drafts
            right = (answer[length + 1 :] + [0] * step.num_drafts)[: step.num_drafts]
            drafts.append([abs(token - (chance.random() > share)) for token, share in zip(right, sure, strict=True)])
            confidence.append(sure)
        drafted = torch.full((len(drafts),), step.num_drafts)
        return Proposal(torch.tensor(drafts), drafted, confidence=torch.tensor(confidence))

    monkeypatch.setattr(NGram, "propose", propose)

    def accept_length(**drafting: Any) -> float:
        engine = toy_engine(speculation=Speculation("ngram", **drafting), max_running=12)
        done = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert [prompt + item.token_ids for prompt, item in zip(prompts, done, strict=True)] == [
            answer[: len(prompt) + 24] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        metrics = engine.record().metrics
        assert (metrics["rows_per_verify"] or 3.0) <= 3.0
        return float(metrics["accept_length"] or 0.0)

    assert accept_length(draft_tokens=6, verify_budget=3) > accept_length(draft_tokens=2) + 0.2
