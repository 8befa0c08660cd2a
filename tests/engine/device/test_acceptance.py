"""Acceptance of draft chains is lossless: exact enumeration over a lattice of random numbers, chi-square tests with the
real ones, and mutants of the rule that both must catch. Greedy verification against a plain loop."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import distance_ratio, smallest_p_value
from crossed import first_quick
from exact_acceptance import Rule, Text, Toy, lattice_of, mutant, sampling_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from specbatch.core import sampling as sampling_module
from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.engine.device import acceptance
from specbatch.engine.device.acceptance import accept_ref, token_logprobs
from specbatch.kernels.sampling.rng import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref

LARGEST = 1 - 2.0**-53  # random number
by_block = partial(accept_ref, verification="block")
MUTANTS = {
    "bonus from the row before": ("at = accepted[:, None, None]", "at = (accepted - 1).clamp(min=0)[:, None, None]"),
    "bonus from the last row": ("residual = residuals.gather(1, at)[:, 0]", "residual = residuals[:, -1]"),
    "nothing subtracted": ("residuals = (p - q_next).clamp(min=0)", "residuals = p"),
    "always accepted": ("u * drafts_q < drafts_p", "drafts_p > 0"),
    "accepted by p alone": ("u * drafts_q < drafts_p", "u < drafts_p"),
    "q at another temperature": ("drafts_q = q.gather", "drafts_q = (q.sqrt() / q.sqrt().sum(-1, True)).gather"),
    "one number to accept and to sample": (
        "positions.gather(1, accepted[:, None]), RESIDUAL)",
        "verify_keys(positions.gather(1, accepted[:, None]), positions[:, :1] - 1), ACCEPT)",
    ),
    "drafted ignored": ("correct & (place < drafted[:, None])", "correct"),
    "subtracted after the last draft": (
        "q_next = torch.where(is_drafted[..., None], torch.cat([q, torch.zeros_like(q[:, :1])], 1), 0.0)",
        "q_next = torch.cat([q, torch.zeros_like(q[:, :1])], 1)",
    ),
}


# -- exact enumeration ------------------------------------------------------------------------------------------------


def emitted(toy: Toy, rule: Rule, drafts: Sequence[int], drafted: int, sampled: bool) -> dict[Text, float]:
    """Probability of each emitted text for one chain of drafts, over all random numbers."""
    rows = len(drafts) + 1
    numbers = toy.numbers(rows)
    # A verify samples once from the residual: that number may be the same at all positions.
    sampling = lattice_of({TARGET: numbers, ACCEPT: numbers, RESIDUAL: numbers[:, -1:].expand_as(numbers)})
    prefixes = [tuple(drafts[:place]) for place in range(rows)]
    p = torch.tensor([toy.target(prefix) for prefix in prefixes], dtype=torch.float64)
    q = torch.tensor([toy.draft(prefix) for prefix in prefixes[:-1]], dtype=torch.float64)
    count = len(numbers)
    proposal = Proposal(
        torch.tensor(drafts).expand(count, -1),
        torch.full((count,), drafted),
        q.expand(count, -1, -1) if sampled else None,
    )
    result = rule(p.expand(count, -1, -1), proposal, torch.arange(1, rows + 1).expand(count, -1), sampling)
    assert result.accepted.max() <= rows - 1
    return toy.emitted(result)


def error_of_sampled_drafts(toy: Toy, rule: Rule, count: int, drafted: int) -> float:
    """`count` drafts, of which the first `drafted` are samples of the draft and the others are ignored."""
    whole: dict[Text, float] = defaultdict(float)
    for drawn in itertools.product(range(toy.vocabulary), repeat=drafted):
        chance = math.prod(toy.draft(drawn[:place])[token] for place, token in enumerate(drawn))
        if chance:
            drafts = drawn + (toy.seed % toy.vocabulary,) * (count - drafted)
            for run, share in emitted(toy, rule, drafts, drafted, sampled=True).items():
                whole[run] += chance * share
    return toy.error(whole, count + 1)


@pytest.mark.parametrize(
    ("toy", "count"),
    [
        *first_quick(1, ((Toy(seed, 5, 4), 2) for seed in range(8))),
        *first_quick(1, ((Toy(seed, 8, 6), 1) for seed in range(8))),
        *first_quick(0, [(Toy(0, 4, 5), 2), (Toy(0, 5, 4), 3), (Toy(1, 6, 3), 3)]),
    ],
    ids=str,
)
def test_sampled_drafts_are_lossless(toy: Toy, count: int) -> None:
    for drafted in range(count + 1):
        assert error_of_sampled_drafts(toy, accept_ref, count, drafted) < 1e-12, f"{drafted} drafted"


@pytest.mark.parametrize(
    ("toy", "count"),
    first_quick(
        2, [(Toy(0, 5, 4), 2), (Toy(1, 8, 6), 1), *((Toy(seed, 5, 4), 2) for seed in (1, 2)), (Toy(0, 5, 3), 3)]
    ),
    ids=str,
)
def test_any_deterministic_draft_is_lossless(toy: Toy, count: int) -> None:
    for drafts in itertools.product(range(toy.vocabulary), repeat=count):
        drafted = sum(drafts) % (count + 1)
        assert toy.error(emitted(toy, accept_ref, drafts, drafted, sampled=False), count + 1) < 1e-12, drafts


def test_wrong_rules_are_variants_of_the_code_as_it_is() -> None:
    for changes in MUTANTS.values():
        mutant(acceptance, *changes)


@pytest.mark.parametrize("name", first_quick(3, MUTANTS))
def test_enumeration_catches_a_wrong_rejection_rule(name: str) -> None:
    rule = mutant(acceptance, *MUTANTS[name])
    errors = (error_of_sampled_drafts(Toy(seed, 5, 4), rule, 2, drafted) for seed in (4, 5) for drafted in (1, 2))
    assert any(error > 1e-3 for error in errors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sample(logits, positions, TARGET)", "sample(logits, positions[:, :1].expand_as(positions), TARGET)"),
        ("sample(logits, positions, TARGET)", "sample(logits.roll(1, 1), positions, TARGET)"),
        ("tokens[:, :-1] == proposal.tokens", "tokens[:, 1:] == proposal.tokens"),
        ("tokens[:, :-1] == proposal.tokens", "logits[:, :-1].argmax(-1) == proposal.tokens"),
        (".long().cumprod(-1).sum(-1)", ".long().sum(-1)"),
    ],
    ids=["one number", "row before", "draft of the next row", "accept the argmax", "accept after an error"],
)
def test_enumeration_catches_a_wrong_deterministic_rule(old: str, new: str) -> None:
    rule, toy = mutant(acceptance, old, new), Toy(0, 5, 4)
    chains = itertools.product(range(toy.vocabulary), repeat=2)
    assert any(toy.error(emitted(toy, rule, drafts, 2, sampled=False), 3) > 1e-3 for drafts in chains)


# -- extreme random numbers -------------------------------------------------------------------------------------------


def emits_the_impossible(rule: Rule, number: float) -> bool:
    """Whether any emitted token has probability 0 when every random number has this one value."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.25, 0.75, 0.0]], dtype=torch.float64)
    p = p.expand(16, -1, -1)
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.25, 0.25]], dtype=torch.float64)
    chains = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    numbers, drafted = torch.full((16, 3), number, dtype=torch.float64), torch.full((16,), 2)
    sampling = lattice_of({TARGET: numbers, ACCEPT: numbers, RESIDUAL: numbers})
    for distribution in (q.expand(16, -1, -1), None):
        proposal = Proposal(chains, drafted, distribution)
        result = rule(p, proposal, torch.arange(1, 4).expand(16, -1), sampling)
        kept = torch.arange(3) <= result.accepted[:, None]
        if (kept & (p.gather(-1, result.tokens[..., None])[..., 0] == 0)).any():
            return True
    return False


def test_impossible_tokens_are_never_emitted() -> None:
    for rule in (accept_ref, by_block):
        assert not emits_the_impossible(rule, 0.0)
        assert not emits_the_impossible(rule, LARGEST)
    # The check itself can fail.
    assert emits_the_impossible(mutant(acceptance, "u * drafts_q < drafts_p", "u * drafts_q <= drafts_p"), 0.0)
    assert emits_the_impossible(accept_ref, 1.0), "random numbers are below 1"


def test_empty_residual_falls_back_to_the_target() -> None:
    """Rounding can leave nothing of p - q although a draft was rejected."""
    q = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    p = q * (1 - 2.0**-20)
    numbers = torch.tensor([[LARGEST, 0.0]] * 2 + [[LARGEST, 0.9]] * 2, dtype=torch.float64)
    sampling = lattice_of({ACCEPT: numbers, RESIDUAL: numbers.flip(1)})
    proposal = Proposal(torch.tensor([[1], [2], [1], [2]]), torch.ones(4, dtype=torch.int64), q.expand(4, 1, 3))
    result = accept_ref(p.expand(4, 2, 3), proposal, torch.tensor([[1, 2]] * 4), sampling)
    assert result.accepted.tolist() == [0] * 4
    assert result.tokens[:, 0].tolist() == [1, 1, 2, 2]


def test_a_draft_from_the_target_is_always_accepted() -> None:
    logits = torch.randn(4000, 3, 7, generator=torch.Generator().manual_seed(0))
    sampling = sampling_of(4000, 0.8, top_p=0.9)
    positions = torch.arange(9, 12).expand(4000, -1)
    q = sampling.probabilities(logits[:, :2])
    drafts = sample_ref(q, sampling.uniform(positions[:, :2], DRAFT))
    for rule in (accept_ref, by_block):
        result = rule(logits, Proposal(drafts, torch.full((4000,), 2), q), positions, sampling)
        assert result.accepted.tolist() == [2] * 4000
        assert torch.equal(result.tokens[:, :2], drafts)


# -- chi-square tests -------------------------------------------------------------------------------------------------

VOCABULARY = 6
DRAFTS = 3
STATES = 1 + VOCABULARY + VOCABULARY**2  # logits after (), (a) and (a, b), the last two tokens


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits [STATES, VOCABULARY]: with impossible tokens in either, and states where they agree."""
    generator = torch.Generator().manual_seed(8)
    target, draft = (torch.randn(STATES, VOCABULARY, generator=generator) * 1.5 for _ in range(2))
    target[1::3, 2], target[::4, 5] = -torch.inf, -torch.inf
    draft[1::4, 0], draft[::3, 5] = -torch.inf, -torch.inf
    draft[2::5] = target[2::5]
    return target, draft


TARGET_LOGITS, DRAFT_LOGITS = tables()


def after(state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    newest = torch.where(state == 0, -1, (state - 1) % VOCABULARY)  # the last token of (a) and of (a, b) alike
    return 1 + torch.where(newest < 0, token, VOCABULARY * (newest + 1) + token)


def generate(
    rule: Rule,
    sampling: Sampling,
    *,
    drafts_by: str,
    mix: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
    draft_keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = verify_keys,
    always: int | None = None,
) -> torch.Tensor:
    """The first three tokens of each request, by three steps on the path that engines take.

    drafts_by: "sampling", "argmax" or "nothing". mix: changes the q that the rule receives. draft_keys: of the random
    numbers of drafts. always: how many drafts count, in all rows and steps.
    """
    rows = len(sampling.seeds)
    every = torch.arange(rows)
    lengths, states = torch.full((rows,), 10), torch.zeros(rows, dtype=torch.int64)
    out = torch.zeros(rows, 3 * (DRAFTS + 1), dtype=torch.int64)
    for step in range(3):
        at, logits, drafts, distributions = states, [TARGET_LOGITS[states]], [], []
        for index in range(0 if drafts_by == "nothing" else DRAFTS):
            if drafts_by == "sampling":
                q = sampling.probabilities(DRAFT_LOGITS[at][:, None])
                distributions.append(mix(q))
                drafts.append(sample_ref(q, sampling.uniform(draft_keys(lengths + 1 + index, lengths)[:, None], DRAFT)))
            else:
                drafts.append(DRAFT_LOGITS[at].argmax(-1, keepdim=True))
            at = after(at, drafts[-1][:, 0])
            logits.append(TARGET_LOGITS[at])
        # The number of valid drafts changes from row to row and from step to step.
        valid = (sampling.seeds // 7 + step) % (DRAFTS + 1) if drafts else torch.zeros_like(every)
        valid = valid if always is None else torch.full_like(valid, always)
        proposal = Proposal(
            torch.cat(drafts, 1) if drafts else every.new_empty(rows, 0),
            valid,
            torch.cat(distributions, 1) if distributions else None,
        )
        predicted = lengths[:, None] + torch.arange(1, len(logits) + 1)
        result = rule(torch.stack(logits, 1), proposal, predicted, sampling)
        out[every[:, None], predicted - 11] = result.tokens
        for index in range(len(logits)):
            states = torch.where(index <= result.accepted, after(states, result.tokens[:, index]), states)
        lengths = lengths + result.accepted + 1
        assert result.finite.all()
        assert rule is not accept_ref or (result.accepted <= valid).all()
    return out[:, :3]


def target_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probability of three tokens: float64 [V, V, V], filtered the plain way."""
    found = []
    for row in TARGET_LOGITS.double().numpy():
        order = np.argsort(-row, kind="stable")
        p = np.exp((row[order] - row[order[0]]) / (temperature or 1e-3))
        if top_k:
            p[top_k:] = 0
        p /= p.sum()
        keep = (np.cumsum(p) - p < top_p) & (p >= min_p * p[0])
        keep[0] = True
        filtered = np.zeros(VOCABULARY)
        filtered[order] = p * keep
        found.append(filtered / filtered.sum())
    first, pairs, triples = torch.tensor(np.array(found)).split([1, VOCABULARY, VOCABULARY**2])
    return first[0][:, None, None] * pairs[:, :, None] * triples.view((VOCABULARY,) * 3)


PLAIN = target_distribution(1.0, 0, 1.0, 0.0)
SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.6, 3, 1.0, 0.0),
    (1.4, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 4, 0.9, 0.1),
    (0.0, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("drafts_by", first_quick(2, ["sampling", "block", "argmax", "nothing"]))
def test_tokens_follow_the_target_in_a_batch_of_all_settings(drafts_by: str) -> None:
    rule, drafts_by = (by_block, "sampling") if drafts_by == "block" else (accept_ref, drafts_by)
    names, count = ("temperature", "top_k", "top_p", "min_p"), 6_000
    columns = {name: torch.tensor([row[n] for row in SETTINGS]).repeat(count) for n, name in enumerate(names)}
    tokens = generate(rule, sampling_of(count * len(SETTINGS), **columns), drafts_by=drafts_by)
    for index, setting in enumerate(SETTINGS):
        own, expected = tokens[index :: len(SETTINGS)], target_distribution(*setting)
        assert smallest_p_value(own, expected) > 1e-4, setting
        assert distance_ratio(own, expected) < 1.5, setting


@pytest.mark.parametrize("drafts_by", first_quick(1, ["sampling", "argmax"]))
def test_tokens_follow_the_target_over_many_seeds(drafts_by: str) -> None:
    tokens = generate(accept_ref, sampling_of(60_000), drafts_by=drafts_by)
    assert smallest_p_value(tokens, PLAIN) > 1e-4
    assert distance_ratio(tokens, PLAIN) < 1.5


@pytest.mark.parametrize("name", first_quick(2, MUTANTS))
def test_chi_square_catches_a_wrong_rejection_rule(name: str) -> None:
    tokens = generate(mutant(acceptance, *MUTANTS[name]), sampling_of(30_000), drafts_by="sampling")
    assert smallest_p_value(tokens, PLAIN) < 1e-6
    assert distance_ratio(tokens, PLAIN) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["", "drafts", "acceptance"])
def test_block_verification_needs_random_numbers_of_its_own(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides by drafts after the accepted ones, too, which the next verify draws again."""

    def by_position(positions: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        return positions

    if wrong == "acceptance":
        monkeypatch.setattr(acceptance, "verify_keys", by_position)
    keys = by_position if wrong == "drafts" else verify_keys
    tokens = generate(by_block, sampling_of(240_000), drafts_by="sampling", draft_keys=keys, always=DRAFTS)
    found = smallest_p_value(tokens, PLAIN)
    assert found < 1e-6 if wrong else found > 1e-4


def test_chi_square_catches_a_wrong_draft_distribution() -> None:
    tokens = generate(
        accept_ref, sampling_of(60_000), drafts_by="sampling", mix=lambda q: q.sqrt() / q.sqrt().sum(-1, keepdim=True)
    )
    assert smallest_p_value(tokens, PLAIN) < 1e-6


WRONG_NUMBERS: dict[str, Any] = {
    "one stream": lambda seeds, positions, stream: uniform_ref(seeds, positions, TARGET),
    "position ignored": lambda seeds, positions, stream: uniform_ref(seeds, positions * 0, stream),
    "one number for two positions": lambda seeds, positions, stream: uniform_ref(seeds, positions // 2, stream),
    "seeds shared": lambda seeds, positions, stream: uniform_ref(seeds // 1000, positions, stream),
    "not uniform": lambda seeds, positions, stream: uniform_ref(seeds, positions, stream) ** 1.02,
}


@pytest.mark.parametrize("name", first_quick(1, WRONG_NUMBERS))
def test_chi_square_catches_wrong_random_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "uniform_ref", WRONG_NUMBERS[name])
    tokens = generate(accept_ref, sampling_of(60_000), drafts_by="sampling")
    assert smallest_p_value(tokens, PLAIN) < 1e-6


def test_deterministic_drafts_do_not_change_the_tokens_of_a_seed() -> None:
    sampling = sampling_of(5000, torch.arange(5000) % 5 / 3, top_k=torch.arange(5000) % 4)
    plain = generate(accept_ref, sampling, drafts_by="nothing")
    assert torch.equal(generate(accept_ref, sampling, drafts_by="argmax"), plain)


@pytest.mark.parametrize("drafts_by", ["sampling", "argmax"])
def test_tokens_do_not_depend_on_the_batch(drafts_by: str) -> None:
    """Tokens depend on a request's own seed and settings, not on its slot or on the other requests."""
    temperature, top_k = torch.arange(600) % 4 / 3, torch.arange(600) % 3
    together = generate(accept_ref, sampling_of(600, temperature, top_k=top_k), drafts_by=drafts_by)
    for part in (torch.arange(0, 600, 12), torch.arange(7, 600, 24).flip(0), torch.tensor([4]), torch.tensor([5])):
        alone = sampling_of(len(part), temperature[part], top_k=top_k[part], seeds=part)
        assert torch.equal(generate(accept_ref, alone, drafts_by=drafts_by), together[part])


# -- greedy -----------------------------------------------------------------------------------------------------------


def greedy(logits: list[list[float]], drafts: list[int], drafted: int) -> list[int]:
    """What one row emits: the drafts that are the argmax (the lowest of equals) and one token more."""
    found = []
    for place, row in enumerate(logits):
        found.append(row.index(max(row)))
        if place == drafted or found[-1] != drafts[place]:
            break
    return found


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[float]]], list[list[int]], list[int]]:
    rows, count, vocabulary = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
    logit = st.integers(-2, 2).map(float) | st.just(-math.inf)
    row = st.lists(logit, min_size=vocabulary, max_size=vocabulary).filter(lambda values: max(values) > -math.inf)
    logits = draw(st.lists(st.lists(row, min_size=count + 1, max_size=count + 1), min_size=rows, max_size=rows))
    drafts = [
        [draw(st.sampled_from([values.index(max(values))] * 3 + list(range(vocabulary)))) for values in chain[:-1]]
        for chain in logits
    ]
    return logits, drafts, [draw(st.integers(0, count)) for _ in range(rows)]


def one_hot(drafts: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(drafts, vocabulary).float()


@examples(30)
@given(case=batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_greedy_matches_a_plain_loop(
    case: tuple[list[list[list[float]]], list[list[int]], list[int]], dtype: torch.dtype
) -> None:
    """Alone, and among sampled rows with deterministic drafts or one-hot distributions."""
    listed, chains, counts = case
    logits, drafted = torch.tensor(listed, dtype=dtype), torch.tensor(counts)
    drafts = torch.tensor(chains, dtype=torch.int64).view(len(chains), -1)
    positions, alone = torch.arange(logits.shape[1]).expand(len(listed), -1) + 5, sampling_of(len(listed), 0.0)
    mixed = replace(alone, flags=SamplingFlags(sampled=True))
    runs: list[tuple[Rule, Sampling, torch.Tensor | None]] = [(accept_ref, alone, None), (accept_ref, mixed, None)]
    if drafts.shape[1]:
        runs += [(rule, mixed, one_hot(drafts, logits.shape[2])) for rule in (accept_ref, by_block)]
    for rule, sampling, distribution in runs:
        result = rule(logits, Proposal(drafts, drafted, distribution), positions, sampling)
        assert result.finite.all()
        for row in range(len(listed)):
            expected = greedy(listed[row], chains[row], counts[row])
            assert result.accepted[row] == len(expected) - 1
            assert result.tokens[row, : len(expected)].tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("with_distribution", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_flagged(
    bad: float, dtype: torch.dtype, with_distribution: bool, temperature: float
) -> None:
    """Anywhere in the rows of a verify; the other rows are not affected."""
    places = list(itertools.product(range(3), (0, 4, 8)))
    logits = torch.randn(len(places) + 1, 3, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = logits.clone()
    for row, (place, token) in enumerate(places):
        logits[row, place, token] = bad
    drafts = clean[:, :2].argmax(-1)
    q = one_hot(drafts, 9) if with_distribution and temperature > 0 else None
    proposal = Proposal(drafts, torch.full((len(logits),), 2), q)
    positions, sampling = torch.arange(3).expand(len(logits), -1), sampling_of(len(logits), temperature)
    result = accept_ref(logits, proposal, positions, sampling)
    assert result.finite.tolist() == [False] * len(places) + [True]
    assert ((result.tokens >= 0) & (result.tokens < 9)).all()
    whole = accept_ref(clean, proposal, positions, sampling)
    assert whole.finite.all()
    assert result.accepted[-1] == whole.accepted[-1]
    assert torch.equal(result.tokens[-1], whole.tokens[-1])


@pytest.mark.parametrize("sampled", [True, False])
def test_logprobs_are_unfiltered(sampled: bool) -> None:
    """The model's own, before temperature and truncation, of every token that is emitted."""
    logits = torch.randn(50, 4, 30, generator=torch.Generator().manual_seed(3)) * 3
    sampling = sampling_of(50, 0.5, top_k=10, logprobs=True)
    positions = torch.arange(4).expand(50, -1)
    q = sampling.probabilities(logits[:, :3])
    drafts = sample_ref(q, sampling.uniform(positions[:, :3], DRAFT)) if sampled else q.argmax(-1)
    result = accept_ref(logits, Proposal(drafts, torch.full((50,), 3), q if sampled else None), positions, sampling)
    logprobs = token_logprobs(logits, result.tokens)
    assert logprobs.dtype == torch.float32
    wanted = logits.double().log_softmax(-1).gather(-1, result.tokens[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=1e-5)
