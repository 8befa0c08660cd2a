"""The loss of XPress drafts by its formula in plain loops, and their refiner by the tested one of the engine."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specbatch.models.heads.xpress import Refiner, XPressConfig
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import weight_shapes
from specbatch.training.data import Batch
from specbatch.training.xpress import BASE_WEIGHT, PASS_WEIGHT, PASSES, XPressHead

from .conftest import CPU, MAX_LEN, VOCABULARY

BLOCK, RANK, MASK = 4, 5, VOCABULARY - 1


@pytest.fixture
def head(target):
    """Every parameter is random and large enough to matter."""
    sizes = {"layers": 1, "block": BLOCK, "anchors": MAX_LEN, "mask_token": MASK, "max_len": MAX_LEN, "seed": 3}
    made = XPressHead(target, rank=RANK, token_weight=0.1, **sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
    return made


@pytest.mark.parametrize(("progress", "share"), [(1.0, 0.1), (0.5, 0.55)])
@torch.no_grad()
def test_loss_follows_the_formula(head, target, examples, progress, share):
    """All anchors are drawn."""
    batch = Batch.of(sorted(examples, key=lambda item: len(item.tokens))[:2], CPU)
    head.progress = progress
    scores = head.score(batch, target, torch.Generator().manual_seed(1))
    last, aux = target.features(batch, head.aux)
    losses, hits = ([[] for _ in range(BLOCK - 1)] for _ in "12")
    for example in range(2):
        prompt, end, tokens = int(batch.prompts[example]), int(batch.lengths[example]), batch.tokens[example]
        for anchor in range(prompt, end - 1):
            block = torch.tensor([int(tokens[anchor]), *[MASK] * (BLOCK - 1)])
            places = torch.arange(anchor, anchor + BLOCK)
            hidden = head(aux[[example]], target.embedding[block][None, None], places[None, None])[0, 0]
            base = hidden @ target.head.T

            def refined(before, base=base, hidden=hidden):
                known = F.pad(torch.as_tensor(before), (0, BLOCK - len(before)))
                return base + head.xpress_head.w2(head.xpress_head(hidden[None], known[None])[0])

            passes, chosen = [], base
            for _ in range(PASSES):
                choices = chosen[1:-1].argmax(-1).tolist()
                chosen = refined([int(tokens[anchor - 1]), int(tokens[anchor]), *choices])
                passes.append(chosen)
            taught = refined(tokens[anchor - 1 : anchor + BLOCK - 1])
            for row in range(1, min(BLOCK, end - anchor)):
                p, wanted = target.logits(last[example, anchor + row - 1][None])[0].softmax(-1), tokens[anchor + row]

                def loss(logits, row=row, p=p, wanted=wanted):
                    distance = (logits[row].softmax(-1) - p).abs().sum() / 2
                    return share * F.cross_entropy(logits[row], wanted) + (1 - share) * distance

                own = torch.stack([loss(logits) for logits in passes]).mean()
                losses[row - 1].append(loss(taught) + BASE_WEIGHT * loss(base) + PASS_WEIGHT * own)
                hits[row - 1].append(bool(taught[row].argmax() == wanted))
    means = torch.tensor([sum(row) / len(row) for row in losses])
    weights = torch.exp(-torch.arange(BLOCK - 1) / (BLOCK / 2))
    torch.testing.assert_close(scores.loss, (means * weights).sum() / weights.sum())
    assert scores.sums[1].tolist() == [sum(row) for row in hits]


def test_gradients_reach_every_parameter(head, target, examples):
    head.score(Batch.of(examples[:4], CPU), target, torch.Generator().manual_seed(1)).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


@torch.no_grad()
def test_refiner_matches_the_engine(head):
    tensors = head.tensors()
    config = XPressConfig.from_dict(head.config())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == weight_shapes(config)
    own = Refiner(Reader(config, tensors.__getitem__, torch.float32, CPU, of_draft=True), config)
    hidden, before = torch.randn(3, BLOCK, 24), torch.randint(VOCABULARY, (3, BLOCK))
    found = own.latents(own.fixed(hidden) + own.embedding[before], 0)
    torch.testing.assert_close(found, head.xpress_head(hidden, before), rtol=1e-4, atol=1e-5)
