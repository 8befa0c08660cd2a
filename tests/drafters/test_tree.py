"""Draft trees match a best-first search in plain Python over distributions that depend on the whole text."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbatch.draft_shape import DraftShape
from specbatch.drafters import tree
from specbatch.drafters.tree import Beams, expand
from specbatch.kernels.drafting import tree_draft as rules
from specbatch.kernels.sampling import argmax_topk

Text = tuple[int, ...]
Expand = Callable[[torch.Tensor, DraftShape, Callable[[Beams], torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


@cache
def logits_after(seed: int, vocabulary: int, text: Text) -> list[float]:
    """Logits after a text without ties; about every third distribution is sharp."""
    randomness = random.Random(f"{seed} {text}")
    sharp = 6.0 if randomness.random() < 0.3 else 1.0
    return [randomness.gauss(0, sharp) for _ in range(vocabulary)]


def score(seed: int, vocabulary: int, text: Text) -> float:
    """Log probability of a text."""
    total = 0.0
    for place, token in enumerate(text):
        logits = logits_after(seed, vocabulary, text[:place])
        total += logits[token] - math.log(sum(map(math.exp, logits)))
    return total


def search(seed: int, vocabulary: int, shape: DraftShape) -> list[Text]:
    """The texts of the kept nodes: beams of the best `topk` per level, then the best of all their children."""
    pool: list[Text] = []
    beams: list[Text] = [()]
    for _ in range(shape.steps):
        children = []
        for beam in beams:
            logits = logits_after(seed, vocabulary, beam)
            order = sorted(range(vocabulary), key=lambda token: -logits[token])
            children += [(*beam, token) for token in order[: shape.topk]]
        pool += children
        beams = sorted(children, key=lambda text: -score(seed, vocabulary, text))[: shape.topk]
    return sorted(pool, key=lambda text: -score(seed, vocabulary, text))[: shape.tokens]


def run_expansion(rule: Expand, seeds: list[int], vocabulary: int, shape: DraftShape) -> list[list[Text]]:
    """The texts of the nodes of each sequence's tree; also checks the beams given to the draft."""
    known: list[list[Text]] = [[()] for _ in seeds]  # of the nodes that were run, the root first
    width = [1]

    def logits(texts: list[list[Text]]) -> torch.Tensor:
        return torch.tensor(
            [[logits_after(seed, vocabulary, t) for t in row] for seed, row in zip(seeds, texts, strict=True)]
        )

    def run(beams: Beams) -> torch.Tensor:
        assert beams.first == len(known[0])
        assert beams.tokens.shape == beams.origin.shape == beams.ancestors.shape == (len(seeds), shape.topk)
        texts = []
        for row, nodes in enumerate(known):
            parents = nodes[-width[-1] :]
            texts.append([])
            for place in range(shape.topk):
                own = (*parents[int(beams.origin[row, place])], int(beams.tokens[row, place]))
                assert len(own) == beams.depth
                seen = [at for at in range(64) if int(beams.ancestors[row, place]) >> at & 1]
                assert seen[-1] == beams.first + place
                assert [nodes[at] for at in seen[:-1]] == [own[:depth] for depth in range(len(own))]
                texts[-1].append(own)
        for nodes, fresh in zip(known, texts, strict=True):
            nodes += fresh
        width.append(shape.topk)
        return logits(texts)

    tokens, words = rule(logits([[()] for _ in seeds])[:, 0], shape, run)
    assert tokens.shape == (len(seeds), shape.tokens)
    assert words.shape == (len(seeds), shape.tokens + 1)
    assert len(known[0]) == shape.draft_slots
    trees = []
    for row in range(len(seeds)):
        texts = [()]
        for node in range(1, shape.tokens + 1):
            seen = [at for at in range(64) if int(words[row, node]) >> at & 1]
            assert seen[-1] == node, "parents come before children"
            assert seen[0] == 0
            texts.append((*texts[seen[-2]], int(tokens[row, node - 1])))
            assert int(words[row, node]) == (int(words[row, seen[-2]]) | 1 << node) - (1 << 64) * (node == 63)
        trees.append(texts[1:])
    return trees


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, DraftShape]:
    vocabulary = draw(st.integers(2, 9))
    topk = draw(st.integers(2, min(vocabulary, 5)))
    steps = draw(st.integers(1, 6))
    pool = topk + (steps - 1) * topk * topk
    return vocabulary, DraftShape(steps, topk, draw(st.integers(1, min(pool, 63))))


@given(case=shapes(), seed=st.integers(0, 10_000))
def test_tree_matches_plain_python_search(case: tuple[int, DraftShape], seed: int) -> None:
    vocabulary, shape = case
    seeds = [seed, seed + 1, seed + 2]
    for own, found in zip(seeds, run_expansion(expand, seeds, vocabulary, shape), strict=True):
        assert len(set(found)) == shape.tokens
        assert set(found) == set(search(own, vocabulary, shape))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", [DraftShape(3, 4, 4), DraftShape(4, 3, 3), DraftShape(2, 5, 4)], ids=str)
def test_full_beam_tree_holds_the_most_likely_texts(seed: int, shape: DraftShape) -> None:
    """An exhaustive search over all texts gives the expected ones."""
    texts = [t for length in range(1, shape.steps + 1) for t in itertools.product(range(5), repeat=length)]
    wanted = sorted(texts, key=lambda text: -score(seed, 5, text))[: shape.tokens]
    [found] = run_expansion(expand, [seed], 5, shape)
    assert set(found) == set(wanted)


def test_ties_keep_parents_before_children() -> None:
    """A certain draft gives its children exactly the parent's score; the others have -inf."""
    shape = DraftShape(4, 2, 5)

    def run(beams: Beams) -> torch.Tensor:
        return torch.tensor([0.0, -torch.inf, -torch.inf]).expand(1, 2, 3)

    tokens, words = expand(torch.tensor([[0.0, -torch.inf, -torch.inf]]), shape, run)
    assert words[0, :5].tolist() == [1, 3, 7, 15, 31]  # the certain chain, from the root down
    assert tokens[0, :4].tolist() == [0] * 4


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_still_make_a_valid_tree(poison: float) -> None:
    shape = DraftShape(4, 3, 7)
    tokens, words = expand(torch.full((2, 6), poison), shape, lambda beams: torch.full((2, 3, 6), poison))
    assert tokens.min() >= 0
    assert tokens.max() < 6
    for row in words.tolist():
        for node, word in enumerate(row):
            assert word & 1
            assert word.bit_length() == node + 1


MUTANTS = {
    "children without their parent's score": (rules, "scores + above.scores[:, :, None]", "scores"),
    "beams of the best parent alone": (
        rules,
        "best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]",
        "best = scores[:, :topk].sort(dim=1, descending=True, stable=True).indices[:, :topk]",
    ),
    "the worst are kept": (rules, "stable=True).indices[:, :count]", "stable=True).indices[:, -count:]"),
    "children before parents": (rules, "indices[:, :count]", "indices[:, :count].flip(1)"),
    "parents counted without the root": (rules, "numbers=best + start + 1", "numbers=best + start"),
    "origin by token": (rules, "best // topk", "best % topk"),
    "words of a beam's own place": (rules, "ancestors.gather(1, origin)", "ancestors.expand_as(origin)"),
    "only the last level is kept": (tree, "start += topk * topk", "candidates.scores[:, :start] -= 9"),
    "logits for scores": (argmax_topk, " - wide.logsumexp(-1, keepdim=True)", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutated_expansion_is_detected(name: str) -> None:
    where, old, new = MUTANTS[name]
    source = inspect.getsource(where)
    assert source.count(old) == 1, f"the expansion no longer contains {old!r}: bring this mutant up to date"
    mutant: dict[str, Any] = {"__name__": "mutant"}
    exec(source.replace(old, new), mutant)
    module = mutant
    if where is not tree:
        module = {"__name__": "expansion with a mutant"}
        exec(inspect.getsource(tree), module)
        if where is rules:
            module |= {"tree_draft": SimpleNamespace(**mutant), "Candidates": mutant["Candidates"]}
        else:
            module["topk_logprobs"] = mutant["topk_logprobs"]

    def differs(seed: int) -> bool:
        shape = DraftShape(4, 3, 10)
        try:
            [found] = run_expansion(module["expand"], [seed], 6, shape)
        except (AssertionError, RuntimeError, IndexError):
            return True
        return set(found) != set(search(seed, 6, shape))

    assert any(differs(seed) for seed in range(10))
