"""Trees of a draft model match the same model without a cache, over many iterations of a batch."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossed import crossed
from uncached import run_texts

from specbatch.config.draft_shape import DraftShape
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.drafters.draft_model import DraftModelTree, plan
from specbatch.drafters.draft_vocabulary import SameVocabulary
from specbatch.drafters.tree import expand
from specbatch.kernels.sampling.accept import commit_ref
from specbatch.kernels.sampling.tree_verify import walk_tree_ref
from specbatch.models.decoder import Decoder, Features

VOCABULARY = 13
LENGTHS = (2, 3, 5, 6, 13, 21)
FIELDS = ("draft_steps", "draft_topk", "draft_tokens")
SHAPES = [DraftShape(1, 3, 2), DraftShape(3, 2, 6), DraftShape(4, 3, 5), DraftShape(2, 3, 12)]


def wanted_trees(model: Decoder, texts: list[list[int]], shape: DraftShape) -> list[set[tuple[int, ...]]]:
    """The texts of each tree's nodes, by the same expansion over uncached logits."""
    nodes: list[list[list[int]]] = [[[]] for _ in texts]

    def run(beams: Any) -> torch.Tensor:
        width = beams.tokens.shape[1]
        for own, origins, tokens in zip(nodes, beams.origin.tolist(), beams.tokens.tolist(), strict=True):
            parents = own[-width:] if beams.first > 1 else own
            own += [[*parents[origin], token] for origin, token in zip(origins, tokens, strict=True)]
        longer = [text + node for text, own in zip(texts, nodes, strict=True) for node in own[-width:]]
        return run_texts(model, longer)[0].view(len(texts), width, -1)

    return trees_of(*expand(run_texts(model, texts)[0], shape, run))


def trees_of(tokens: torch.Tensor, ancestors: torch.Tensor) -> list[set[tuple[int, ...]]]:
    return [texts_of(*row) for row in zip(tokens.tolist(), ancestors.tolist(), strict=True)]


def texts_of(tokens: list[int], words: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at - 1] for at in range(1, 64) if word >> at & 1) for word in words[1:]}


class Run:
    """Iterations whose verify accepts a given path."""

    def __init__(self, bench: Any, tiny: Any, shape: DraftShape, chunk: int = 1000) -> None:
        self.randomness = random.Random(shape.tokens)
        self.model, self.shape = tiny(VOCABULARY), shape
        prompts = [[self.randomness.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
        self.here = bench(prompts)
        forward, self.cache = self.here.forward_of(self.model)
        self.drafter = DraftModelTree(
            self.model, forward, self.cache, shape, SameVocabulary(VOCABULARY, VOCABULARY), len(self.here.batch.lengths)
        )
        self.here.prefill(self.drafter, chunk)

    def propose(self) -> tuple[Any, Any]:
        # Room for what the draft runs: it may be more than is verified.
        step = self.here.step(self.shape.tokens, spare=max(self.shape.draft_slots - self.shape.tokens, 0))
        return step, self.drafter.propose(step)

    def accept(self, step: Any, proposal: Any, least: int) -> None:
        """Each row accepts a path of some node, the deepest where `least` is its depth."""
        chosen = torch.randint(0, VOCABULARY, proposal.ancestors.shape)
        for row, words in enumerate(proposal.ancestors.tolist()):
            deep = [node for node, word in enumerate(words) if word.bit_count() > least] or [0]
            node = self.randomness.choice(deep)
            path = [at for at in range(64) if words[node] >> at & 1]
            for parent, child in pairwise(path):
                chosen[row, parent] = proposal.tokens[row, child - 1]
        accepted, path = walk_tree_ref(chosen, proposal.tokens, proposal.drafted, proposal.ancestors)
        commit_ref(self.here.batch.rows(self.here.rows), chosen.gather(1, path), accepted)
        for row, text in enumerate(self.here.texts):
            text += chosen.gather(1, path)[row, : int(accepted[row]) + 1].tolist()
        self.drafter.update(step, Features(torch.empty(0), None), accepted, path)


@pytest.mark.parametrize(("shape", "chunk"), crossed(SHAPES, [1000, 3]), ids=str)
def test_tree_matches_uncached_model(bench: Any, tiny: Any, shape: DraftShape, chunk: int) -> None:
    run = Run(bench, tiny, shape, chunk)
    for turn in range(4):
        before = run.here.batch.tokens.clone()
        step, proposal = run.propose()
        assert torch.equal(run.here.batch.tokens, before)
        assert proposal.probabilities is None
        assert proposal.drafted.tolist() == [shape.tokens] * len(LENGTHS)
        assert trees_of(proposal.tokens, proposal.ancestors) == wanted_trees(run.model, run.here.texts, shape)
        run.accept(step, proposal, least=(0, shape.steps, shape.steps, 1)[turn])


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_cached_keys_match_uncached_model(bench: Any, tiny: Any, shape: DraftShape) -> None:
    """Up to the root once the draft has run, and before that all but the positions that the plan counts as missing."""
    run = Run(bench, tiny, shape)
    speculation = Speculation("standalone", draft="self:skip=0", **dict(zip(FIELDS, shape, strict=True)))
    target: Any = SimpleNamespace(config=run.model.config)
    missing = plan(target, EngineConfig(speculation=speculation), print).uncached_tail
    for turn in range(5):
        step, proposal = run.propose()
        run.here.check_keys(run.model, run.cache)
        run.accept(step, proposal, least=(shape.steps, 0)[turn % 2])
        run.here.check_keys(run.model, run.cache, 1 + missing)  # nor is the root


def test_reused_row_starts_fresh(bench: Any, tiny: Any) -> None:
    """The prefill of a new request clears what the previous one had accepted."""
    run = Run(bench, tiny, SHAPES[1])
    for _ in range(2):
        step, proposal = run.propose()
        run.accept(step, proposal, least=3)
    assert run.drafter._new[run.here.rows].max() > 3
    for row, text in zip(run.here.rows.tolist(), run.here.texts, strict=True):
        text[:] = [text[0], 5]
        run.here.batch.tokens[row, :2] = torch.tensor(text)
        run.here.batch.lengths[row] = 1
    run.here.prefill(run.drafter)
    _, proposal = run.propose()
    assert trees_of(proposal.tokens, proposal.ancestors) == wanted_trees(run.model, run.here.texts, run.shape)


def test_padding_rows_stay_within_their_page(bench: Any, tiny: Any) -> None:
    """For any number of accepted drafts."""
    run = Run(bench, tiny, SHAPES[1])
    run.here.rows = torch.zeros(len(LENGTHS), dtype=torch.int64)
    kept = [item[1:].clone() for item in (*run.cache.k, *run.cache.v)]
    for _ in range(3):
        step, proposal = run.propose()
        run.drafter.update(step, Features(torch.empty(0), None), torch.full((len(LENGTHS),), 3), proposal.ancestors)
    assert all(torch.equal(item[1:], old) for item, old in zip((*run.cache.k, *run.cache.v), kept, strict=True))
    assert int(run.drafter._new[0]) == 1


@pytest.mark.parametrize("vocabulary", [11, 16])
def test_draft_with_another_padded_vocabulary(bench: Any, tiny: Any, vocabulary: int) -> None:
    run = Run(bench, tiny, SHAPES[2])
    own = run.drafter
    run.drafter = DraftModelTree(
        run.model, own._forward, run.cache, SHAPES[2], SameVocabulary(vocabulary, VOCABULARY), 20
    )
    step, proposal = run.propose()
    assert proposal.tokens.min() >= 0
    assert proposal.tokens.max() < min(vocabulary, VOCABULARY)
    assert step.slots.shape == proposal.drafted.shape
