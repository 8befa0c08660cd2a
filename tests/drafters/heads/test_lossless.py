"""Sampled drafts of heads, through whole iterations: the tokens follow the target's law, whatever the head knows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from crossed import slow_but
from scipy import stats

from specbatch.engine.step import DecodeStep

VOCABULARY, ROWS, DRAFTS, TEMPERATURE = 5, 6_000, 2, 1.3
PROMPT = [1, 4, 0, 2, 1, 4]  # the last token is the root


@pytest.mark.parametrize("algorithm", slow_but(["eagle3"], ["eagle3", "mtp"]))
def test_tokens_follow_the_target(kit: Any, write: Any, bench: Any, algorithm: str) -> None:
    """EAGLE-3 drafts 3 of the 5 tokens here; the others have probability 0 in its law."""
    here = bench([PROMPT] * ROWS, width=20)
    here.batch.tokens %= VOCABULARY  # what stands there from before is a token, too
    if algorithm == "eagle3":
        tensors = kit.eagle3(known=3, vocabulary=VOCABULARY)
        config = kit.llama(vocab_size=VOCABULARY, draft_vocab_size=3, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        run = kit.Run(here, kit.TargetStub(3, VOCABULARY), algorithm, DRAFTS, write(config, tensors))
    else:
        run = kit.Run(here, kit.TargetStub(1, VOCABULARY, kit.stored(kit.mtp())), algorithm, DRAFTS, None)
    run.prefill(1000)
    iteration = DecodeStep(run.target, run.cache, run.drafter)
    correct = 0
    for _ in range(3):
        result, _ = iteration(here.step(DRAFTS, temperature=TEMPERATURE))
        accepted, drafted, sound = result[:, DRAFTS + 1 :].unbind(1)
        assert sound.all()
        assert (drafted == DRAFTS).all()
        correct += int(accepted.sum())
    assert 0.05 < correct / (3 * DRAFTS * ROWS) < 0.95, "both outcomes must be there to be tested"
    tokens = here.batch.tokens[here.rows, len(PROMPT) : len(PROMPT) + 3]
    law = law_of(kit, run.target)
    for width in (1, 2, 3):
        code = (tokens[:, :width] * VOCABULARY ** torch.arange(width - 1, -1, -1)).sum(-1)
        counts = code.bincount(minlength=VOCABULARY**width).double()
        expected = law.reshape(VOCABULARY**width, -1).sum(1) * ROWS
        rare = expected < 5
        observed, wanted = counts[~rare], expected[~rare]
        if expected[rare].sum() >= 5:
            observed = torch.cat([observed, counts[rare].sum()[None]])
            wanted = torch.cat([wanted, expected[rare].sum()[None]])
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4, f"{width} tokens"


def law_of(kit: Any, target: Any) -> torch.Tensor:
    """Chance [V, V, V] of each three tokens behind the prompt."""
    law = torch.ones((VOCABULARY,) * 3, dtype=torch.float64)
    for triple in itertools.product(range(VOCABULARY), repeat=3):
        last = kit.features_of(target, [*PROMPT, *triple[:2]]).last[-3:]
        steps = (target.logits(last).double() / TEMPERATURE).softmax(-1)
        law[triple] = steps[range(3), list(triple)].prod()
    return law
