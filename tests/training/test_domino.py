"""The loss of Domino drafts by its formula in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specbatch.models.heads.domino import DominoConfig
from specbatch.models.weight_shapes import weight_shapes
from specbatch.training.data import Batch
from specbatch.training.domino import DominoHead

from .conftest import CPU, MAX_LEN, VOCABULARY

BLOCK, MASK = 3, VOCABULARY - 1


@pytest.fixture
def head(target):
    sizes = {"layers": 1, "block": BLOCK, "anchors": MAX_LEN, "mask_token": MASK, "max_len": MAX_LEN, "seed": 3}
    made = DominoHead(target, gru_size=7, rank=5, **sizes)
    with torch.no_grad():
        last = made.embed_proj[2].weight
        last += torch.randn(last.shape, generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize("progress", [1.0, 0.3, 0.0])
@torch.no_grad()
def test_loss_follows_the_formula(head, target, examples, progress):
    """All anchors are drawn. Only the rows after the anchor's are corrected."""
    batch = Batch.of(sorted(examples, key=lambda item: len(item.tokens))[:2], CPU)
    head.progress = progress
    scores = head.score(batch, target, torch.Generator().manual_seed(1))
    _, aux = target.features(batch, head.aux)
    losses, hits = ([[] for _ in range(BLOCK)] for _ in "12")
    for example in range(2):
        prompt, end, tokens = int(batch.prompts[example]), int(batch.lengths[example]), batch.tokens[example]
        for anchor in range(prompt, end - 1):
            block = torch.tensor([int(tokens[anchor]), *[MASK] * (BLOCK - 1)])
            places = torch.arange(anchor, anchor + BLOCK)
            hidden = head(aux[[example]], target.embedding[block][None, None], places[None, None])[0, 0]
            for row in range(min(BLOCK, end - 1 - anchor)):
                base, wanted = target.head @ hidden[row], tokens[anchor + row + 1]
                read = target.embedding[tokens[anchor : anchor + row + 1]][None]
                state = head.prefix_gru(read)[1][0, 0]
                logits = base + head.embed_proj(torch.cat([hidden[row], state])) if row else base
                first, second = F.cross_entropy(base, wanted), F.cross_entropy(logits, wanted)
                losses[row].append((1 - progress) * first + progress * second)
                hits[row].append(bool(logits.argmax() == wanted))
    means = torch.tensor([sum(row) / len(row) for row in losses])
    weights = torch.tensor([math.exp(-2 * row / (BLOCK + 1)) for row in range(BLOCK)])
    torch.testing.assert_close(scores.loss, (means * weights).sum() / weights.sum())
    assert scores.sums[1].tolist() == [sum(row) for row in hits]


def test_gradients_reach_every_parameter_and_the_file_has_all(head, target, examples):
    head.progress = 0.5
    head.score(Batch.of(examples[:4], CPU), target, torch.Generator().manual_seed(1)).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in head.tensors().items()}
    assert shapes == weight_shapes(DominoConfig.from_dict(head.config()))
