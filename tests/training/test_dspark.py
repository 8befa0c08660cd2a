"""The loss of DSpark drafts is that of DeepSpec, by the formulas in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specbatch.training.data import Batch
from specbatch.training.dspark import DSparkHead

from .conftest import CPU, MAX_LEN, VOCABULARY

BLOCK, RANK = 3, 5


@pytest.mark.parametrize(("progress", "weight"), [(1.0, 0.1), (0.5, 0.55), (0.0, 1.0)])
def test_loss_follows_the_formulas(target, examples, progress, weight):
    batch = Batch.of(sorted(examples, key=lambda item: len(item.tokens))[:2], CPU)
    sizes = {"layers": 1, "anchors": MAX_LEN, "mask_token": VOCABULARY - 1, "max_len": MAX_LEN}
    head = DSparkHead(target, rank=RANK, token_weight=0.1, block=BLOCK, seed=3, **sizes)
    head.progress = progress
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (*head.markov_head.parameters(), *head.confidence_head.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        scores = head.score(batch, target, generator)
        last, aux = target.features(batch, head.aux)
        losses = [[] for _ in range(BLOCK)]
        for example in range(2):
            prompt, end, tokens = int(batch.prompts[example]), int(batch.lengths[example]), batch.tokens[example]
            for anchor in range(prompt, end - 1):  # every token of an answer but the last
                block = torch.tensor([int(tokens[anchor]), *[VOCABULARY - 1] * (BLOCK - 1)])
                places = torch.arange(anchor, anchor + BLOCK)
                hidden = head(aux[[example]], target.embedding[block][None, None], places[None, None])[0, 0]
                for row in range(min(BLOCK, end - 1 - anchor)):
                    e = head.markov_head.markov_w1.weight[tokens[anchor + row]]
                    logits = target.head @ hidden[row] + head.markov_head.markov_w2.weight @ e
                    p = target.logits(last[example, anchor + row][None])[0].softmax(-1)
                    distance = float((logits.softmax(-1) - p).abs().sum())
                    confidence = torch.sigmoid(head.confidence_head.proj(torch.cat([hidden[row], e])))[0]
                    chance = 1 - distance / 2
                    cross_entropy = float(F.cross_entropy(logits, tokens[anchor + row + 1]))
                    loss = weight * cross_entropy + (1 - weight) * distance
                    loss -= chance * math.log(confidence) + (1 - chance) * math.log(1 - confidence)
                    losses[row].append(loss)
    means = torch.tensor([sum(row) / len(row) for row in losses])
    weights = torch.exp(-torch.arange(BLOCK) / 4.0)
    torch.testing.assert_close(scores.loss, (means * weights).sum() / weights.sum(), rtol=1e-4, atol=0)
    assert scores.sums[3].tolist() == [len(row) for row in losses]
