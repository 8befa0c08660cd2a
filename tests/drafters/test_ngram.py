"""N-gram drafts match a Python search over many iterations of a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ngram_search import continuations

from specbatch.config.draft_shape import DraftShape
from specbatch.drafters.base import NoDraft
from specbatch.drafters.ngram import NGram


@pytest.mark.parametrize(
    ("count", "shortest", "longest"), [(1, 1, 1), (1, 1, 16), (4, 2, 4), (3, 1, 3), (7, 2, 16), (2, 3, 3)]
)
def test_drafts_match_a_python_search(bench: Any, count: int, shortest: int, longest: int) -> None:
    randomness = random.Random(count)
    prompts = [[randomness.randrange(3) for _ in range(length)] for length in (2, 3, 9, 20, 5)]
    here = bench(prompts)
    drafter = NGram(DraftShape(count, 1, count), shortest, longest)
    found = missed = 0
    for turn in range(8):
        step = here.step(count, spare=(0, 5)[turn % 2])
        before = here.batch.tokens.clone()
        proposal = drafter.propose(step)
        assert torch.equal(here.batch.tokens, before)
        assert proposal.probabilities is None
        assert proposal.tokens.shape == (5, count)
        for index, text in enumerate(here.texts):
            expected = next(iter(continuations(text, longest, shortest, count)), [])
            assert proposal.drafted[index] == len(expected)
            assert proposal.tokens[index].tolist() == (expected or [text[-1]] * count)
            found, missed = found + bool(expected), missed + (not expected)
        accepted = [randomness.randint(0, int(number)) for number in proposal.drafted]
        here.commit(proposal.tokens, accepted, [randomness.randrange(3) for _ in prompts])
    assert found
    assert missed


def test_tree_holds_continuations_of_the_best_matches(bench: Any) -> None:
    here = bench([[1, 2, 5, 1, 2, 6, 7, 1, 2, 5, 8, 1, 2], [3], [4, 4, 4], [1, 2, 5, 1, 2, 5, 1, 2]])
    proposal = NGram(DraftShape(2, 3, 5), 1, 3).propose(here.step(5))
    assert proposal.drafted.tolist() == [5, 0, 2, 2]
    assert proposal.tokens[0].tolist() == [5, 8, 6, 7, 1]  # latest first: (5, 8), (6, 7), (5, 1)
    assert proposal.ancestors is not None
    assert proposal.ancestors[0].tolist() == [1, 3, 7, 9, 25, 35]
    assert proposal.tokens[2, :2].tolist() == [4, 4]
    assert proposal.tokens[3, :2].tolist() == [5, 1]
    assert proposal.probabilities is None


def test_baseline_drafts_nothing(bench: Any) -> None:
    here = bench([[1, 2], [1, 2, 1, 2, 1]])
    proposal = NoDraft().propose(here.step(0))
    assert proposal.tokens.shape == (2, 0)
    assert proposal.tokens.dtype == torch.int64
    assert proposal.drafted.tolist() == [0, 0]
    assert proposal.probabilities is None
