"""Acceptance of draft trees is lossless: exact enumeration over a lattice of random numbers, chi-square tests on trees
that a draft model expands, equality with the baseline for every seed, and mutants that must be caught."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from chi_square import smallest_p_value
from crossed import first_quick
from exact_acceptance import Rule, Text, Toy, lattice_of, mutant, sampling_of

from specbatch.config.draft_shape import DraftShape
from specbatch.core.sampling import Sampling
from specbatch.core.step_input import Proposal
from specbatch.drafters.tree import expand
from specbatch.engine.device import acceptance
from specbatch.engine.device.acceptance import accept_ref
from specbatch.kernels.sampling import tree_verify
from specbatch.kernels.sampling.rng import TARGET
from specbatch.kernels.sampling.tree_verify import ancestor_words, tree_depths

MUTANTS = {
    "all nodes compared with the root's token": (tree_verify, ".int().argmax(-1)", ".int().argmax(-1) * 0"),
    "a node without its ancestors": (tree_verify, "ancestors & ~good == 0", "good >> node & 1 == 1"),
    "any child": (tree_verify, "right = (drafts == chosen.gather(1, parents))", "right = (drafts >= 0)"),
    "the leaf of the last row": (tree_verify, ".argmax(1, keepdim=True)", ".argmin(1, keepdim=True)"),
    "tokens of the rows in order": (acceptance, "tokens = tokens.gather(1, path)\n    return", "pass\n    return"),
    "row before": (acceptance, "sample(logits, positions, TARGET)", "sample(logits.roll(1, 1), positions, TARGET)"),
    "one number": (acceptance, "sample(logits, positions, TARGET)", "sample(logits, positions * 0 + 1, TARGET)"),
    "accept the argmax": (acceptance, "walk_tree_ref(tokens, ", "walk_tree_ref(logits.argmax(-1), "),
}


# -- exact enumeration ------------------------------------------------------------------------------------------------


def error(toy: Toy, rule: Rule, nodes: list[Text], drafted: int) -> float:
    """Of texts one longer than the deepest node. nodes: the texts of a tree, parents first."""
    depth = max(map(len, nodes))
    numbers = toy.numbers(depth + 1)
    rows = len(numbers)
    parents = torch.tensor([[0 if len(node) == 1 else nodes.index(node[:-1]) + 1 for node in nodes]])
    words = ancestor_words(parents, depth)
    drafts = torch.tensor([[node[-1] for node in nodes]]).expand(rows, -1)
    proposal = Proposal(drafts, torch.full((rows,), drafted), ancestors=words.expand(rows, -1))
    p = torch.tensor([[toy.target(text) for text in [(), *nodes]]], dtype=torch.float64).expand(rows, -1, -1)
    result = rule(p, proposal, (tree_depths(words) + 1).expand(rows, -1), lattice_of({TARGET: numbers}))
    if result.accepted.max() > depth:
        return 1.0
    width = depth + 1  # of a path; the other rows are ignored
    return toy.error(toy.emitted(result._replace(tokens=result.tokens[:, :width])), width)


def random_nodes(seed: int, vocabulary: int, count: int, depth: int) -> list[Text]:
    randomness = Random(seed)
    nodes: list[Text] = []
    while len(nodes) < count:
        parent = randomness.choice([(), *(node for node in nodes if len(node) < depth)])
        node = (*parent, randomness.randrange(vocabulary))
        if node not in nodes:
            nodes.append(node)
    return nodes


CROWNS = [(8, 2), (6, 3), (3, 1), (1, 1), (5, 2)]  # nodes, and the depth that they may reach


@pytest.mark.parametrize(
    ("toy", "count", "depth"),
    [
        *first_quick(
            2, ((toy, *crown) for toy in [*(Toy(n, 4, 4) for n in range(3)), Toy(8, 8, 3)] for crown in CROWNS)
        ),
        *first_quick(1, ((Toy(7, 3, 5), *crown) for crown in [(3, 1), (8, 2), (1, 1)])),  # 60 cells per random number
    ],
    ids=str,
)
def test_any_tree_is_lossless(toy: Toy, count: int, depth: int) -> None:
    nodes = random_nodes(toy.seed + count, toy.vocabulary, min(count, toy.vocabulary**depth), depth)
    for drafted in {len(nodes), toy.seed % (len(nodes) + 1)}:
        assert error(toy, accept_ref, nodes, drafted) < 1e-12


def test_a_tree_of_all_texts_is_lossless() -> None:
    nodes = [text for length in (1, 2) for text in itertools.product(range(3), repeat=length)]
    assert error(Toy(3, 3, 4), accept_ref, nodes, len(nodes)) < 1e-12


def test_wrong_rules_are_variants_of_the_code_as_it_is() -> None:
    for changes in MUTANTS.values():
        mutant(*changes)


@pytest.mark.parametrize("name", first_quick(2, MUTANTS))
def test_enumeration_catches_a_wrong_rule(name: str) -> None:
    rule = mutant(*MUTANTS[name])
    trees = ((Toy(seed, 4, 4), random_nodes(seed, 4, 7, 2)) for seed in range(4))
    assert any(error(toy, rule, nodes, len(nodes)) > 1e-3 for toy, nodes in trees)


# -- chi-square tests -------------------------------------------------------------------------------------------------

VOCABULARY = 6
_GENERATOR = torch.Generator().manual_seed(5)
# Logits after each token.
TARGET_LOGITS, DRAFT_LOGITS = (torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR) * 1.3 for _ in range(2))
TARGET_LOGITS[1, 2] = TARGET_LOGITS[4, 0] = -torch.inf


def generate(rule: Rule, sampling: Sampling, shape: DraftShape | None) -> tuple[torch.Tensor, float]:
    """The first three tokens of each request after token 0, and the share of verifies that accepted a draft."""
    rows = len(sampling.seeds)
    every, roots, lengths = torch.arange(rows), torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 10)
    out = torch.zeros(rows, 40, dtype=torch.int64)
    accepting = 0.0
    for _ in range(3):
        if shape is None:
            proposal = Proposal(roots.new_empty(rows, 0), roots * 0)
            words = torch.ones(rows, 1, dtype=torch.int64)
        else:
            drafts, words = expand(DRAFT_LOGITS[roots], shape, lambda beams: DRAFT_LOGITS[beams.tokens])
            proposal = Proposal(drafts, torch.full_like(roots, shape.tokens), ancestors=words)
        nodes = torch.cat([roots[:, None], proposal.tokens], 1)
        result = rule(TARGET_LOGITS[nodes], proposal, lengths[:, None] + tree_depths(words) + 1, sampling)
        out[every[:, None], lengths[:, None] - 10 + torch.arange(result.tokens.shape[1])] = result.tokens
        roots = result.tokens.gather(1, result.accepted[:, None])[:, 0]
        lengths = lengths + result.accepted + 1
        accepting += float((result.accepted > 0).double().mean()) / 3
        assert result.finite.all()
    return out[:, :3], accepting


def target_distribution(temperature: float, **changes: Any) -> torch.Tensor:
    """Probability [V, V, V] of three tokens after token 0."""
    p = sampling_of(1, temperature, **changes).probabilities(TARGET_LOGITS[None])[0].double()
    p = p / p.sum(-1, keepdim=True)
    return p[0][:, None, None] * p[:, :, None] * p[None]


SHAPES = [DraftShape(3, 2, 6), DraftShape(1, 4, 4), DraftShape(5, 3, 7)]
SETTINGS: list[dict[str, Any]] = [{"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1.0}]


@pytest.mark.parametrize(("shape", "setting"), first_quick(1, itertools.product(SHAPES, SETTINGS)), ids=str)
def test_tokens_follow_the_target(shape: DraftShape, setting: dict[str, Any]) -> None:
    tokens, accepting = generate(accept_ref, sampling_of(20_000, **setting), shape)
    assert 0.2 < accepting < 0.95
    assert smallest_p_value(tokens, target_distribution(**setting)) > 1e-4


@pytest.mark.parametrize("name", first_quick(1, MUTANTS))
def test_chi_square_catches_a_wrong_rule(name: str) -> None:
    tokens, _ = generate(mutant(*MUTANTS[name]), sampling_of(20_000), SHAPES[0])
    assert smallest_p_value(tokens, target_distribution(1.0)) < 1e-6


@pytest.mark.parametrize("shape", first_quick(1, SHAPES), ids=str)
def test_a_seed_gives_the_tokens_of_the_baseline(shape: DraftShape) -> None:
    """Whatever is drafted, and in a batch with greedy requests."""
    sampling = sampling_of(3000, torch.arange(3000) % 4 / 3, top_k=torch.arange(3000) % 5)
    plain, accepting = generate(accept_ref, sampling, None)
    assert accepting == 0
    assert torch.equal(generate(accept_ref, sampling, shape)[0], plain)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_non_finite_logits_are_flagged(bad: float, temperature: float) -> None:
    """In every node, accepted or not, and for that request alone."""
    words = ancestor_words(torch.tensor([[0, 0, 1]]), 2).expand(5, -1)
    logits = torch.randn(5, 4, 9, generator=torch.Generator().manual_seed(1))
    for node in range(4):
        logits[node, node, 3] = bad
    proposal = Proposal(torch.tensor([[1, 2, 3]]).expand(5, -1), torch.full((5,), 3), ancestors=words)
    result = accept_ref(logits, proposal, tree_depths(words) + 4, sampling_of(5, temperature))
    assert result.finite.tolist() == [False] * 4 + [True]
