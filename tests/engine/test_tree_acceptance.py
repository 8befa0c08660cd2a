"""Losslessness of tree verification: exact enumeration over lattices of coins, chi-square with the real coins on trees
that grow from a draft's law, the tokens of plain decoding for every seed, and mutants that must be caught."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from crossed import first_quick
from scipy import stats

from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.draft_shape import DraftShape
from specbatch.drafters.tree import expand
from specbatch.engine import acceptance
from specbatch.engine.acceptance import RefResult, accept_ref
from specbatch.kernels.sampling import tree_verify
from specbatch.kernels.sampling.rng import TARGET
from specbatch.kernels.sampling.tree_verify import ancestor_words, tree_depths

Rule = Callable[..., RefResult]
Text = tuple[int, ...]
TREE, RULE = tree_verify, acceptance
MUTANTS = {
    "all nodes compared with the root's choice": (TREE, ".int().argmax(-1)", ".int().argmax(-1) * 0"),
    "a node without its ancestors": (TREE, "ancestors & ~good == 0", "good >> node & 1 == 1"),
    "any child will do": (TREE, "right = (drafts == chosen.gather(1, parents))", "right = (drafts >= 0)"),
    "the leaf of the last row": (TREE, ".argmax(1, keepdim=True)", ".argmin(1, keepdim=True)"),
    "tokens of the rows in order": (RULE, "tokens = tokens.gather(1, path)", "pass"),
    "row before": (RULE, "sample(logits, positions, TARGET)", "sample(logits.roll(1, 1), positions, TARGET)"),
    "one coin": (RULE, "sample(logits, positions, TARGET)", "sample(logits, positions * 0 + 1, TARGET)"),
    "accept the argmax": (RULE, "walk_tree_ref(tokens, ", "walk_tree_ref(logits.argmax(-1), "),
}


def mutant(name: str) -> Rule:
    """`accept_ref` with one piece of the text of its module, or of the walk's, replaced."""
    home, old, new = MUTANTS[name]
    sources = {module: inspect.getsource(module) for module in (TREE, RULE)}
    assert sources[home].count(old) == 1, f"the rule no longer says {old!r}: bring this mutant up to date"
    walk: dict[str, Any] = {"__name__": "mutant"}
    rule: dict[str, Any] = {"__name__": "mutant"}
    sources[home] = sources[home].replace(old, new)
    exec(sources[TREE], walk)
    exec(sources[RULE], rule)
    rule["walk_tree_ref"] = walk["walk_tree_ref"]
    changed: Rule = rule["accept_ref"]
    return changed


def sampling_of(rows: int, temperature: float = 1.0, **changes: Any) -> Sampling:
    values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    return Sampling(
        **{name: torch.as_tensor(value).expand(rows) for name, value in values.items()},
        seeds=torch.arange(rows),
        flags=SamplingFlags(sampled=True, truncated=bool(changes)),
    )


# -- exact enumeration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lattice(Sampling):
    """Takes laws for logits, and its coins from a grid [B, positions 1..]."""

    grid: torch.Tensor

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def uniform(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        assert stream == TARGET
        return self.grid.gather(1, positions - 1)


@dataclass(frozen=True)
class Toy:
    """A target whose laws are whole multiples of 1 / units, different after every text: the midpoints of a lattice of
    lcm(1..units) cells stand for all coins, and counting them integrates exactly."""

    seed: int
    vocabulary: int
    units: int

    def law(self, text: Text) -> list[float]:
        randomness = random.Random(f"{self.seed} {text}")
        parts = [randomness.randrange(self.vocabulary) for _ in range(self.units)]
        return [parts.count(token) / self.units for token in range(self.vocabulary)]

    def chance(self, text: Text) -> float:
        return math.prod(self.law(text[:place])[token] for place, token in enumerate(text))

    def error(self, rule: Rule, nodes: list[Text], drafted: int) -> float:
        """Largest difference to the target's law of texts one longer than the deepest node, when what is emitted is
        continued by plain sampling. nodes: the texts of a tree, parents first."""
        depth = max(map(len, nodes))
        cells = math.lcm(*range(1, self.units + 1))
        midpoints = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        coins = torch.cartesian_prod(*[midpoints] * (depth + 1)).view(-1, depth + 1)
        plain, rows = sampling_of(1), len(coins)
        sampling = Lattice(**{name: getattr(plain, name) for name in plain.__dataclass_fields__}, grid=coins)
        parents = torch.tensor([[0 if len(node) == 1 else nodes.index(node[:-1]) + 1 for node in nodes]])
        words = ancestor_words(parents, depth)
        proposal = Proposal(
            torch.tensor([[node[-1] for node in nodes]]).expand(rows, -1),
            torch.full((rows,), drafted),
            ancestors=words.expand(rows, -1),
        )
        laws = torch.tensor([[self.law(text) for text in [(), *nodes]]], dtype=torch.float64)
        verdict = rule(laws.expand(rows, -1, -1), proposal, (tree_depths(words) + 1).expand(rows, -1), sampling)
        emitted: dict[Text, float] = defaultdict(float)
        for tokens, accepted in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True):
            emitted[tuple(tokens[: accepted + 1])] += 1 / rows
        whole: dict[Text, float] = defaultdict(float)
        for run, chance in emitted.items():
            if len(run) > depth + 1:
                return 1.0
            for rest in itertools.product(range(self.vocabulary), repeat=depth + 1 - len(run)):
                whole[run + rest] += chance * math.prod(
                    self.law((run + rest)[:place])[(run + rest)[place]] for place in range(len(run), depth + 1)
                )
        texts = itertools.product(range(self.vocabulary), repeat=depth + 1)
        return max(abs(whole[text] - self.chance(text)) for text in texts)


def random_nodes(seed: int, vocabulary: int, count: int, depth: int) -> list[Text]:
    randomness = random.Random(seed)
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
            3, ((toy, *crown) for toy in [*(Toy(n, 4, 4) for n in range(3)), Toy(8, 8, 3)] for crown in CROWNS)
        ),
        *first_quick(2, ((Toy(7, 3, 5), *crown) for crown in [(3, 1), (8, 2), (1, 1)])),  # 60 cells per random number
    ],
    ids=str,
)
def test_any_tree_is_lossless(toy: Toy, count: int, depth: int) -> None:
    nodes = random_nodes(toy.seed + count, toy.vocabulary, min(count, toy.vocabulary**depth), depth)
    for drafted in {len(nodes), toy.seed % (len(nodes) + 1)}:
        assert toy.error(accept_ref, nodes, drafted) < 1e-12


def test_a_tree_of_all_texts_is_lossless_and_always_right() -> None:
    nodes = [text for length in (1, 2) for text in itertools.product(range(3), repeat=length)]
    assert Toy(3, 3, 4).error(accept_ref, nodes, len(nodes)) < 1e-12


@pytest.mark.parametrize("name", first_quick(2, MUTANTS))
def test_enumeration_catches_a_wrong_rule(name: str) -> None:
    rule = mutant(name)
    trees = [(Toy(seed, 4, 4), random_nodes(seed, 4, 7, 2)) for seed in range(4)]
    assert max(toy.error(rule, nodes, len(nodes)) for toy, nodes in trees) > 1e-3


# -- the real path --------------------------------------------------------------------------------------------

VOCABULARY = 6
_GENERATOR = torch.Generator().manual_seed(5)
# Logits behind each token.
TARGET_LOGITS, DRAFT_LOGITS = (torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR) * 1.3 for _ in range(2))
TARGET_LOGITS[1, 2] = TARGET_LOGITS[4, 0] = -torch.inf


def generate(rule: Rule, sampling: Sampling, shape: DraftShape | None) -> tuple[torch.Tensor, float]:
    """The first three tokens of each row behind token 0, and the share of verifies that accepted a draft."""
    rows = len(sampling.seeds)
    every, roots = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    lengths = torch.full((rows,), 10)
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
        positions = lengths[:, None] + tree_depths(words) + 1
        verdict = rule(TARGET_LOGITS[nodes], proposal, positions, sampling)
        count = verdict.tokens.shape[1]
        out[every[:, None], lengths[:, None] - 10 + torch.arange(count)] = verdict.tokens
        roots = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        lengths = lengths + verdict.accepted + 1
        accepting += float((verdict.accepted > 0).double().mean()) / 3
        assert verdict.finite.all()
    return out[:, :3], accepting


def target_law(temperature: float, **changes: Any) -> torch.Tensor:
    """Chance [V, V, V] of three tokens behind token 0."""
    p = sampling_of(1, temperature, **changes).probabilities(TARGET_LOGITS[None])[0].double()
    p = p / p.sum(-1, keepdim=True)
    return p[0][:, None, None] * p[:, :, None] * p[None]


def smallest_p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Of chi-square tests on first tokens, pairs and triples."""
    worst = 1.0
    for width in (1, 2, 3):
        code = (tokens[:, :width] * VOCABULARY ** torch.arange(width - 1, -1, -1)).sum(-1)
        counts = code.bincount(minlength=VOCABULARY**width).double()
        wanted = law.reshape(VOCABULARY**width, -1).sum(1) * len(tokens)
        if counts[wanted == 0].any():
            return 0.0
        rare = wanted < 5
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
        if wanted[-1] < 5:
            counts, wanted = counts[:-1], wanted[:-1] * counts[:-1].sum() / wanted[:-1].sum()
        worst = min(worst, float(stats.chisquare(counts, wanted).pvalue))
    return worst


SHAPES = [DraftShape(3, 2, 6), DraftShape(1, 4, 4), DraftShape(5, 3, 7)]
SETTINGS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05}]


@pytest.mark.parametrize("setting", first_quick(1, reversed(SETTINGS)), ids=str)
@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])], ids=str
)
def test_tokens_follow_the_target(shape: DraftShape, setting: dict[str, Any]) -> None:
    tokens, accepting = generate(accept_ref, sampling_of(60_000, **setting), shape)
    assert 0.2 < accepting < 0.95
    assert smallest_p_value(tokens, target_law(**setting)) > 1e-4


@pytest.mark.parametrize("name", first_quick(2, MUTANTS))
def test_chi_square_catches_a_wrong_rule(name: str) -> None:
    tokens, _ = generate(mutant(name), sampling_of(20_000), SHAPES[0])
    assert smallest_p_value(tokens, target_law(1.0)) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_seed_gives_the_tokens_of_plain_decoding(shape: DraftShape) -> None:
    """Also in a batch with greedy rows; whatever is drafted."""
    sampling = sampling_of(5000, torch.arange(5000) % 4 / 3, top_k=torch.arange(5000) % 5)
    plain, accepting = generate(accept_ref, sampling, None)
    assert accepting == 0
    assert torch.equal(generate(accept_ref, sampling, shape)[0], plain)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_are_flagged(bad: float, temperature: float) -> None:
    """In every node, reached or not, and for that row alone."""
    words = ancestor_words(torch.tensor([[0, 0, 1]]), 2).expand(5, -1)
    logits = torch.randn(5, 4, 9, generator=torch.Generator().manual_seed(1))
    for node in range(4):
        logits[node, node, 3] = bad
    proposal = Proposal(torch.tensor([[1, 2, 3]]).expand(5, -1), torch.full((5,), 3), ancestors=words)
    sampling = sampling_of(5, temperature)
    if not temperature:
        sampling = Sampling(**{**sampling.__dict__, "flags": SamplingFlags()})
    verdict = accept_ref(logits, proposal, tree_depths(words) + 4, sampling)
    assert verdict.finite.tolist() == [False] * 4 + [True]
