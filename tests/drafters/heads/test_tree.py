"""Trees of every head match the reference equations over each node's own text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import draft_heads as heads
import pytest
import torch
from crossed import crossed

from specbatch.config.draft_shape import DraftShape
from specbatch.drafters.tree import Beams, expand

LENGTHS = (2, 3, 6, 13)
SHAPES = [DraftShape(3, 2, 5), DraftShape(1, 3, 3), DraftShape(4, 3, 9)]


def expected(
    reference: Any, features: Any, text: list[int], ids: torch.Tensor | None, shape: DraftShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tree after a text; the logits of each node come from a pass over its whole prefix."""

    def logits_after(path: list[int]) -> torch.Tensor:
        return reference.drafts(features, text, [*path, 0], ids)[-1]

    paths: list[list[int]] = [[]]

    def run(beams: Beams) -> torch.Tensor:
        nonlocal paths
        nodes = zip(beams.origin[0].tolist(), beams.tokens[0].tolist(), strict=True)
        paths = [[*paths[origin], token] for origin, token in nodes]
        return torch.stack([logits_after(path) for path in paths])[None]

    tokens, ancestors = expand(logits_after([])[None], shape, run)
    return tokens[0], ancestors[0]


def walk(ancestors: torch.Tensor, randomness: random.Random) -> list[int]:
    """Rows of a random path down from the root, which may end at any node."""
    words, way = ancestors.tolist(), [0]
    while True:
        below = [row for row, word in enumerate(words) if word & ~(1 << row) == words[way[-1]] and row not in way]
        if not below or randomness.random() < 0.25:
            return way
        way.append(randomness.choice(below))


@pytest.mark.parametrize(("shape", "algorithm"), crossed(SHAPES, ["eagle", "eagle3", "mtp"]), ids=str)
def test_tree_holds_the_most_likely_nodes_after_any_acceptance(
    bench: Any, write: Callable[..., str], algorithm: str, shape: DraftShape
) -> None:
    stub, folder, reference, ids = heads.usual(algorithm, write)
    randomness = random.Random(4)
    here = bench([[randomness.randrange(13) for _ in range(length)] for length in LENGTHS])
    run = heads.Run(here, stub, algorithm, shape.tokens, folder, draft_steps=shape.steps, draft_topk=shape.topk)
    assert run.plan.uncached_tail == shape.steps + 1
    run.prefill(5)
    for turn in range(4):
        step = here.step(shape.tokens, spare=8, temperature=float(turn % 2))
        proposal = run.drafter.propose(step)
        assert proposal.probabilities is None
        features = heads.features_of(run.target, [text[:-1] for text in here.texts])
        for index, text in enumerate(here.texts):
            tokens, ancestors = expected(reference, features[index], text, ids, shape)
            assert proposal.tokens[index].tolist() == tokens.tolist()
            assert proposal.ancestors[index].tolist() == ancestors.tolist()
        ways = [walk(words, randomness) for words in proposal.ancestors]
        rows = range(shape.tokens + 1)
        path = torch.tensor([[*way, *(row for row in rows if row not in way)] for way in ways])
        verify(run, step, proposal, path, [len(way) - 1 for way in ways], [randomness.randrange(13) for _ in ways])


def verify(run: Any, step: Any, proposal: Any, path: torch.Tensor, accepted: list[int], bonus: list[int]) -> None:
    here, rows = run.here, path.shape[1]
    tokens, positions = here.batch.stage(step.slots, proposal.tokens, proposal.ancestors)
    metadata = step.decode_metadata(step.lengths, rows, proposal.ancestors)
    features = run.target.forward(tokens, positions, metadata.bind(run.cache))
    counts = torch.tensor(accepted)
    run.cache.commit(step.verified(counts), path)
    here.commit(proposal.tokens.gather(1, path[:, 1:] - 1), accepted, bonus)
    run.drafter.update(step, features, counts, path)
