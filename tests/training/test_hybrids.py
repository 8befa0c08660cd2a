"""Training of heads for recurrent, MoE and latent-attention targets, and the trained heads in the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from crossed import slow_but
from targets import HYBRIDS, LATENT
from uncached import decoder_of

from specbatch.kernels.attention.qkv import split_qkv_rope_ref
from specbatch.models.heads.mtp import Mtp, mtp_config
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.training.chain import Memory, ahead
from specbatch.training.data import Batch, Example
from specbatch.training.mtp import MtpHead
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target
from specbatch.training.trainer import make_head

from .conftest import CPU

LENGTH = 40


@pytest.mark.parametrize("name", slow_but(("qwen3-next", "nemotron-h-moe", "deepseek-v3"), HYBRIDS | LATENT))
def test_target_features_match_decoding(targets, name):
    """A batch of texts of several lengths: each has its own recurrent states."""
    target = Target(targets.checkpoint(name), torch.float32, CPU, LENGTH)
    pairs = list(zip(targets.prompts(name), targets.greedy(name, 9), strict=True))
    examples = [Example((*prompt, *answer), len(prompt)) for prompt, answer in pairs]
    last, aux = target.features(Batch.of(examples, CPU), (0, 2))
    assert aux is not None
    assert aux.shape == (*last.shape[:2], 2 * last.shape[2])
    for row, (prompt, answer) in zip(last, pairs, strict=True):
        likeliest = target.logits(row[len(prompt) - 1 : len(prompt) + 8]).argmax(-1)
        assert likeliest.tolist() == answer


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "nemotron-h"])
def test_engine_runs_the_trained_mtp_head(targets, name):
    """A quarter of each head's channels turn in the first two, none in the last. Its MLP is dense beside experts."""
    checkpoint = targets.checkpoint(name)
    target = Target(checkpoint, torch.float32, CPU, LENGTH)
    head = MtpHead(target, steps=1, max_len=LENGTH, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in head.parameters():
        parameter += torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    tokens = torch.randint(3, 37, (1, 12), generator=generator)
    last, _ = target.features(Batch.of([Example(tuple(tokens[0].tolist()), 1)], CPU), ())
    embedded = F.embedding(ahead(tokens, 1, 0), target.embedding)
    expected = head.advance(embedded, last, Memory(head.rotary, torch.arange(12)))[0]

    tensors = head.tensors()
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    config = mtp_config(checkpoint.config, found)
    assert found == tensor_shapes(config)
    ours = Mtp(Reader(config, tensors.__getitem__, torch.float32, CPU, of_draft=True), decoder_of(checkpoint), LENGTH)
    x, qkv = ours.enter(embedded[0], last[0])
    q, k, v = (part.transpose(0, 1)[None] for part in split_qkv_rope_ref(qkv, ours.heads, torch.arange(12)))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours.leave(x, attended[0].transpose(0, 1).flatten(1)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "mtp"])
def test_heads_train_on_recurrent_targets(targets, algorithm):
    target = Target(targets.checkpoint("nemotron-h"), torch.float32, CPU, LENGTH)
    sizes = {"draft_layers": 1, "block_size": 4} if algorithm == "dflash" else {"unroll": 2}
    examples = [Example(tuple(range(3, 30)), 5), Example(tuple(range(9, 27)), 2)]
    head = make_head(Recipe(algorithm=algorithm, max_len=LENGTH, **sizes), target, examples, 35)
    loss = head.score(Batch.of(examples, CPU), target, torch.Generator().manual_seed(1)).loss
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())
