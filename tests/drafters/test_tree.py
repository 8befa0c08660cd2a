"""Draft trees match a best-first search in Python over distributions that depend on the whole text."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from specbatch.config.draft_shape import DraftShape
from specbatch.drafters.tree import Beams, expand, expand_block

Text = tuple[int, ...]


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


def run_expansion(seeds: list[int], vocabulary: int, shape: DraftShape) -> list[list[Text]]:
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

    tokens, words = expand(logits([[()] for _ in seeds])[:, 0], shape, run)
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


@examples(20)
@given(case=shapes(), seed=st.integers(0, 10_000))
def test_tree_matches_a_python_search(case: tuple[int, DraftShape], seed: int) -> None:
    vocabulary, shape = case
    seeds = [seed, seed + 1, seed + 2]
    for own, found in zip(seeds, run_expansion(seeds, vocabulary, shape), strict=True):
        assert len(set(found)) == shape.tokens
        assert set(found) == set(search(own, vocabulary, shape))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [DraftShape(3, 4, 4), DraftShape(4, 3, 3), DraftShape(2, 5, 4)], ids=str)
def test_full_beam_tree_holds_the_most_likely_texts(seed: int, shape: DraftShape) -> None:
    """An exhaustive search over all texts gives the expected ones."""
    texts = [t for length in range(1, shape.steps + 1) for t in itertools.product(range(5), repeat=length)]
    wanted = sorted(texts, key=lambda text: -score(seed, 5, text))[: shape.tokens]
    [found] = run_expansion([seed], 5, shape)
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


@examples(30)
@given(steps=st.integers(1, 6), topk=st.integers(2, 5), tokens=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_tree_of_a_block_holds_the_largest_products(steps: int, topk: int, tokens: int, seed: int) -> None:
    """Of all texts of the most likely tokens of each depth, within beams of `topk`; without that limit where no depth
    of the best tree has more nodes with children."""
    tokens = min(tokens, topk + (steps - 1) * topk * topk)
    drawn = torch.rand(2, steps, topk, generator=torch.Generator().manual_seed(seed)).log().sort(-1, descending=True)
    ids = torch.arange(steps * topk).view(steps, topk).expand(2, -1, -1)
    found, words = expand_block(drawn.values, ids, DraftShape(steps, topk, tokens))
    for row, table in enumerate(drawn.values.tolist()):
        known = {(): 0.0} | {
            text: sum(table[depth][place] for depth, place in enumerate(text))
            for length in range(1, steps + 1)
            for text in itertools.product(range(topk), repeat=length)
        }
        beams, pool = [()], []
        for _ in range(steps):
            children = [(*beam, place) for beam in beams for place in range(topk)]
            pool += children
            beams = sorted(children, key=lambda text: -known[text])[:topk]
        expected = set(sorted(pool, key=lambda text: -known[text])[:tokens])
        texts: list[Text] = [()]
        for node in range(1, tokens + 1):
            seen = [at for at in range(64) if int(words[row, node]) >> at & 1]
            texts.append((*texts[seen[-2]], int(found[row, node - 1]) % topk))
            assert int(found[row, node - 1]) // topk == len(seen) - 2  # a token of its depth
        assert set(texts[1:]) == expected
        best = set(sorted(known.keys() - {()}, key=lambda text: -known[text])[:tokens])
        parents = [len({text[:-1] for text in best if len(text) == depth + 1}) for depth in range(steps)]
        assert best == expected or max(parents) > topk
