"""Whole iterations in distribution: model, cache, drafter, verification and coins together give the target's law."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from crossed import slow_but
from scipy import stats

from specbatch.draft_shape import DraftShape
from specbatch.drafters.base import Drafter, NoDraft
from specbatch.drafters.dflash import DFlashDrafter
from specbatch.drafters.draft_model import DraftModelChain, DraftModelTree
from specbatch.drafters.ngram import NGram
from specbatch.engine.step import DecodeStep
from specbatch.models.decoder import Decoder
from specbatch.models.dflash import DFlash, DFlashConfig

VOCABULARY, ROWS, DRAFTS = 5, 12_000, 2
PROMPT = [1, 4, 0, 2, 1, 4]  # the last token is the root; it and the one before occurred already


class Run:
    """The first three tokens behind the prompt for many seeds, and their law under the target."""

    def __init__(
        self, bench: Any, tiny: Any, target: Decoder, drafter: str, temperature: float, rows: int = ROWS
    ) -> None:
        here = bench([PROMPT] * rows, width=20)
        here.batch.tokens %= VOCABULARY  # what is stale was a token, too
        drafters: dict[str, Drafter] = {"none": NoDraft(), "ngram": NGram(DraftShape(DRAFTS, 1, DRAFTS), 1, 3)}
        drafters["ngram-tree"] = NGram(DraftShape(2, 2, DRAFTS), 1, 3)
        draft = tiny(VOCABULARY, layers=1)
        if drafter == "standalone":
            drafters[drafter] = DraftModelChain(draft, *here.way_of(draft), VOCABULARY)
        if drafter == "dflash":
            drafters[drafter] = block_draft(here, target)
            target = target.with_aux((0, 1))
        if drafter == "standalone-tree":
            shape = DraftShape(2, 2, DRAFTS)
            drafters[drafter] = DraftModelTree(draft, *here.way_of(draft), shape, VOCABULARY, rows + 3)
        cache = here.cache_for(target)
        here.prefill(drafters[drafter], target=(target, cache))
        iteration = DecodeStep(target, cache, drafters[drafter])
        drafts = 0 if drafter == "none" else DRAFTS
        self.accepted = self.drafted = 0
        for _ in range(3):
            result, _ = iteration(here.step(drafts, temperature=temperature))
            accepted, drafted, sound = result[:, drafts + 1 :].unbind(1)
            assert sound.all()
            self.accepted += int(accepted.sum())
            self.drafted += int(drafted.sum())
        self.tokens = here.batch.tokens[here.rows, len(PROMPT) : len(PROMPT) + 3]


def block_draft(here: Any, target: Decoder) -> DFlashDrafter:
    """A random one of two layers, the second of which slides."""
    config = DFlashConfig.from_dict(
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": target.config.hidden_size,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 4,
            "block_size": DRAFTS + 1,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
        }
    )
    generator = torch.Generator().manual_seed(6)
    tensors = {
        name: 1 + torch.randn(shape, generator=generator) / 4
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in config.tensor_shapes().items()
    }
    return DFlashDrafter(DFlash(config, tensors.__getitem__, target, 64), here.cache_of(config, 2), DRAFTS)


def target_law(bench: Any, target: Decoder, temperature: float) -> torch.Tensor:
    """Chance [V, V, V] of each three tokens, from prompts that hold them all."""
    triples = list(itertools.product(range(VOCABULARY), repeat=3))
    here = bench([[*PROMPT, *triple] for triple in triples], width=20)
    seen: list[torch.Tensor] = []

    class Reader(NoDraft):
        def prefill(self, batch: Any, metadata: Any, features: Any) -> None:
            tokens = batch.tokens[metadata.slots, metadata.positions]
            seen.append(target.logits(target.forward(tokens, metadata.positions, metadata.bind(cache)).last))

    cache = here.cache_for(target)
    here.prefill(Reader())
    laws = (seen[0].view(len(triples), len(PROMPT) + 2, VOCABULARY)[:, -3:].double() / temperature).softmax(-1)
    return laws.gather(-1, torch.tensor(triples)[..., None]).prod(1).view((VOCABULARY,) * 3)


@pytest.mark.parametrize(
    "drafter",
    slow_but(
        ["standalone-tree", "dflash"],
        ["none", "ngram", "standalone", "ngram-tree", "standalone-tree", "dflash"],
    ),
)
def test_tokens_follow_the_target(bench: Any, tiny: Any, drafter: str) -> None:
    target = tiny(VOCABULARY, layers=2)
    run = Run(bench, tiny, target, drafter, temperature=1.3)
    if drafter != "none":
        assert 0.05 < run.accepted / run.drafted < 0.95, "both outcomes must be there to be tested"
    law = target_law(bench, target, 1.3)
    for width in (1, 2, 3):
        code = (run.tokens[:, :width] * VOCABULARY ** torch.arange(width - 1, -1, -1)).sum(-1)
        counts = code.bincount(minlength=VOCABULARY**width).double()
        expected = law.reshape(VOCABULARY**width, -1).sum(1) * ROWS
        rare = expected < 5
        observed, wanted = counts[~rare], expected[~rare]
        if expected[rare].sum() >= 5:
            observed = torch.cat([observed, counts[rare].sum()[None]])
            wanted = torch.cat([wanted, expected[rare].sum()[None]])
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4, f"{width} tokens"


@pytest.mark.parametrize("drafter", slow_but(["standalone-tree"], ["ngram", "ngram-tree", "standalone-tree"]))
def test_deterministic_drafts_leave_the_tokens_of_a_seed_as_they_are(bench: Any, tiny: Any, drafter: str) -> None:
    target = tiny(VOCABULARY, layers=2)
    plain, drafted = (Run(bench, tiny, target, name, 1.0, rows=3000).tokens for name in ("none", drafter))
    # Other shapes of the same products round differently, and a draw may hang on it once in a million.
    assert (plain == drafted).all(1).double().mean() > 0.999
