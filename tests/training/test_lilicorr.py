"""The loss of LiLiCorr drafts by its formula in plain loops, and their head by the tested one of the engine."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specbatch.models.heads.lilicorr import LatticeHead, LiLiCorrConfig
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import weight_shapes
from specbatch.training.data import Batch
from specbatch.training.lilicorr import HEAD_WEIGHT, LiLiCorrHead

from .conftest import CPU, MAX_LEN, VOCABULARY

BLOCK, MASK = 4, VOCABULARY - 1


@pytest.fixture
def head(target):
    """Every parameter is random and large enough to matter."""
    sizes = {"layers": 1, "block": BLOCK, "anchors": MAX_LEN, "mask_token": MASK, "max_len": MAX_LEN, "seed": 3}
    made = LiLiCorrHead(target, width=16, **sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
    return made


@torch.no_grad()
def test_loss_follows_the_formula(head, target, examples):
    """All anchors are drawn."""
    batch = Batch.of(sorted(examples, key=lambda item: len(item.tokens))[:2], CPU)
    scores = head.score(batch, target, torch.Generator().manual_seed(1))
    last, aux = target.features(batch, head.aux)
    losses, hits, chains = ([[] for _ in range(BLOCK - 1)] for _ in "123")
    absent = 0
    for example in range(2):
        prompt, end, tokens = int(batch.prompts[example]), int(batch.lengths[example]), batch.tokens[example]
        for anchor in range(prompt, end - 1):
            block = torch.tensor([int(tokens[anchor]), *[MASK] * (BLOCK - 1)])
            places = torch.arange(anchor, anchor + BLOCK)
            hidden = head(aux[[example]], target.embedding[block][None, None], places[None, None])[0, 0]
            base = hidden[1:] @ target.head.T
            known, found = base.log_softmax(-1).topk(8)
            given = head.hidden_norm(head.fc(aux[example, anchor - 1]))
            lattice = head.lilicorr(target.embedding[found][None], known[None], hidden[None, 1:], given[None])[0]
            covered = alive = True
            before = 0
            for row in range(1, min(BLOCK, end - anchor)):
                wanted, best = tokens[anchor + row], found[row - 1].tolist()
                loss, covered = F.cross_entropy(base[row - 1], wanted), covered and int(wanted) in best
                hit = False
                if covered:
                    transitions, place = lattice[row - 1, before], best.index(int(wanted))
                    theirs = target.logits(last[example, anchor + row - 1][None])[0]
                    penalty = sum(
                        float(share) * max(float(theirs[wanted] - theirs[token]), 0)
                        for share, token in zip(transitions.softmax(0), best, strict=True)
                    )
                    loss = loss + HEAD_WEIGHT * (F.cross_entropy(transitions, torch.tensor(place)) + penalty)
                    hit, before = bool(transitions.argmax() == place), place
                absent, alive = absent + (not covered), alive and hit
                losses[row - 1].append(loss), hits[row - 1].append(hit), chains[row - 1].append(alive)
    means = torch.tensor([sum(row) / len(row) for row in losses])
    weights = torch.exp(-torch.arange(BLOCK - 1) / (BLOCK / 2))
    torch.testing.assert_close(scores.loss, (means * weights).sum() / weights.sum())
    assert scores.sums[1:3].tolist() == [[sum(row) for row in hits], [sum(row) for row in chains]]
    assert absent


def test_gradients_reach_every_parameter(head, target, examples):
    head.score(Batch.of(examples[:4], CPU), target, torch.Generator().manual_seed(1)).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


@torch.no_grad()
def test_head_matches_the_engine(head):
    tensors = head.tensors()
    config = LiLiCorrConfig.from_dict(head.config())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == weight_shapes(config)
    own = LatticeHead(Reader(config, tensors.__getitem__, torch.float32, CPU, of_draft=True), config)
    given = (
        torch.randn(2, BLOCK - 1, 8, 24),
        torch.randn(2, BLOCK - 1, 8).sort(descending=True).values,
        torch.randn(2, BLOCK - 1, 24),
        torch.randn(2, 24),
    )
    torch.testing.assert_close(own.scores(*given), head.lilicorr(*given), rtol=1e-4, atol=1e-5)
