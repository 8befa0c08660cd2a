"""The loss of DFlash 2 drafts by its formula in plain loops, and their network by the tested one of the engine."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specbatch.models.decoder import Decoder
from specbatch.models.heads.dflash2 import DFlash2, DFlash2Config
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import weight_shapes
from specbatch.training.data import Batch
from specbatch.training.dflash2 import Convolution, DFlash2Head

from .conftest import CPU, MAX_LEN, VOCABULARY

BLOCK, RANK, MASK = 4, 5, VOCABULARY - 1


@pytest.fixture
def head(target):
    """Every parameter is random and large enough to matter."""
    made = DFlash2Head(target, rank=RANK, layers=1, block=BLOCK, anchors=MAX_LEN, mask_token=MASK, max_len=64, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
        made.candidate_selector.successor_codebook *= 100  # so that a token that is no candidate may score best
    return made


@torch.no_grad()
def test_loss_follows_the_formula(head, target, examples):
    """Cross entropy of all tokens, and of the candidates given the token before; all anchors are drawn."""
    batch = Batch.of(sorted(examples, key=lambda item: len(item.tokens))[:2], CPU)
    scores = head.score(batch, target, torch.Generator().manual_seed(1))
    _, aux = target.features(batch, head.aux)
    selector, losses, hits, chains, absent = (
        head.candidate_selector,
        *([[] for _ in range(BLOCK - 1)] for _ in "123"),
        0,
    )
    for example in range(2):
        prompt, end, tokens = int(batch.prompts[example]), int(batch.lengths[example]), batch.tokens[example]
        for anchor in range(prompt, end - 1):  # every token of an answer but the last
            block = torch.tensor([int(tokens[anchor]), *[MASK] * (BLOCK - 1)])
            places = torch.arange(anchor, anchor + BLOCK)
            hidden = head(aux[[example]], target.embedding[block][None, None], places[None, None])[0, 0]
            alive = True
            for row in range(1, min(BLOCK, end - anchor)):
                logits, wanted = target.head @ hidden[row], int(tokens[anchor + row])
                best = logits.topk(16).indices.tolist()
                weights = selector.hidden_projection.weight @ hidden[row]
                weights = weights * selector.predecessor_codebook[tokens[anchor + row - 1]]
                every = logits + selector.successor_codebook @ weights
                hit = max(best, key=lambda token: float(every[token])) == wanted
                if wanted not in best:
                    absent, best = absent + 1, [*best[:-1], wanted]
                loss = F.cross_entropy(logits, tokens[anchor + row])
                losses[row - 1].append(loss + F.cross_entropy(every[best], torch.tensor(best.index(wanted))))
                alive = alive and hit
                hits[row - 1].append(hit), chains[row - 1].append(alive)
    means = torch.tensor([sum(row) / len(row) for row in losses])
    weights = torch.exp(-torch.arange(BLOCK - 1) / (BLOCK / 2))
    torch.testing.assert_close(scores.loss, (means * weights).sum() / weights.sum())
    assert scores.sums[1:].tolist() == [[sum(row) for row in hits], [sum(row) for row in chains], list(map(len, hits))]
    assert absent


def test_gradients_reach_every_parameter(head, target, examples):
    head.score(Batch.of(examples[:4], CPU), target, torch.Generator().manual_seed(1)).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


@torch.no_grad()
def test_an_untrained_draft_is_one_of_dflash(target):
    """Its convolutions are the identity, and its selector adds nothing."""
    head = DFlash2Head(target, rank=RANK, layers=2, block=BLOCK, anchors=4, mask_token=MASK, max_len=64, seed=3)
    x, read = torch.randn(2, 3, BLOCK, 24), torch.randn(2, 3, BLOCK, 24)
    for layer in head.layers:
        assert all(
            torch.equal(conv(x, read, side), x) for conv in (layer.attention_conv, layer.mlp_conv) for side in (0, 1)
        )
    assert not head.candidate_selector(torch.randn(7, 24), torch.zeros(7, 3, dtype=torch.int64), torch.arange(7)).any()


@torch.no_grad()
def test_scores_of_candidates_match_the_engine(head, target):
    """The hidden states are compared in `test_roundtrip`, by the drafts that an engine accepts."""
    tensors = head.tensors()
    config = DFlash2Config.from_dict(head.config())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == weight_shapes(config)
    model: Decoder = target._model
    own = DFlash2(Reader(config, tensors.__getitem__, torch.float32, CPU, of_draft=True), model, 64)
    hidden, before = torch.randn(6, 24, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    tokens, known, weights = own.candidates(model.logits(hidden), hidden)
    every = own.scores(tokens, known, weights, own.predecessors[before])
    added = head.candidate_selector(hidden, tokens, before)
    # Sums of a few large terms: an error in the last place of a term is larger than one of a small sum.
    torch.testing.assert_close(every.gather(1, tokens), known + added, rtol=1e-5, atol=1e-4)


def test_convolution_reads_earlier_rows_of_its_block_only():
    conv = Convolution(8, 3, 4)
    torch.nn.init.normal_(conv.base_kernel), torch.nn.init.normal_(conv.kernel_projection.weight)
    x, read = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8)
    conv(x, read, 0)[1, 3].sum().backward()
    touched = x.grad.abs().sum(-1) > 0
    assert touched.nonzero().tolist() == [[1, 1], [1, 2], [1, 3]]
