"""DFlash in whole engines over the toy model: drafts and acceptance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from stand_ins import fake_graphs

from specbatch import SamplingParams, Speculation
from specbatch.config import Graphs
from specbatch.drafters.dflash import DFlashDrafter
from specbatch.models.decoder import Decoder


def transformers_toy(toy: Any) -> Any:
    # Not above: it imports Triton, and tests/kernels decides how that runs before it is imported.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(toy.checkpoint.tensors, strict=False)
    return model


class Watch:
    """Every proposal of an engine over the toy, compared with the equations over transformers' hidden states."""

    def __init__(self, toy: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = transformers_toy(toy)
        target = Decoder(
            toy.checkpoint.config,
            toy.checkpoint.tensor,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_positions=8,
        )
        self.reference = reference(toy.block_config, toy.block().tensors, target)
        self.compared = 0
        propose = DFlashDrafter.propose

        def watched(drafter: DFlashDrafter, step: Any) -> Any:
            proposal = propose(drafter, step)
            for row, length, drafts in zip(step.slots.tolist(), step.lengths.tolist(), proposal.tokens, strict=True):
                if row:
                    self.compare(step.batch.tokens[row, : length + 1].tolist(), drafts)
            return proposal

        monkeypatch.setattr(DFlashDrafter, "propose", watched)

    @torch.inference_mode()
    def compare(self, text: list[int], drafts: torch.Tensor) -> None:
        states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[3][0], states[1][0]], -1)  # after layers 2 and 0
        logits = self.reference.logits(features, text[-1], len(drafts))
        best = logits.topk(2, -1).values
        clear = best[:, 0] - best[:, 1] > 1e-3
        assert torch.equal(drafts[clear], logits.argmax(-1)[clear])
        self.compared += int(clear.sum())


@pytest.mark.parametrize(
    ("settings", "schedule"),
    crossed(
        [{"prefill_chunk": 7, "page_size": 3}, {"graphs": "both"}, {"prefix_cache": False, "max_running": 3}],
        ["v1", "v2"],
    ),
)
def test_engine_drafts_match_reference(
    toy: Any,
    toy_engine: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    schedule: str,
) -> None:
    """Prompts with a prefix in common among them: its context comes from the pages of whoever was first."""
    if settings.get("graphs"):
        settings = settings | {"graphs": Graphs("whole", "piecewise")}
        fake_graphs(monkeypatch)
    watch = Watch(toy, reference, monkeypatch)
    prompts = [list(prompt) for prompt in (*toy.prompts()[6:9], *toy.prompts()[-3:])]
    engine = toy_engine(speculation=Speculation("dflash", schedule, draft="toy-block"), **settings)
    for part in (prompts[:2], prompts):  # the second time with pages of the first
        done = engine.generate(part, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:8] for prompt in part]
    assert watch.compared > 150


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_matching_drafts_are_accepted(toy: Any, toy_engine: Any, schedule: str) -> None:
    """It drafts 34 and nothing else, so that a prompt's accept length follows from how often the toy repeats it."""
    prompts = [prompt for prompt in toy.prompts() if toy.greedy(prompt).count(34) > 8]
    engine = toy_engine(speculation=Speculation("dflash", schedule, draft="toy-block-34"))
    done = engine.generate([list(prompt) for prompt in prompts], SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert engine.record().config["speculation"]["draft_tokens"] == 4  # the draft's blocks decide
    assert len(prompts) > 2
    for prompt, item in zip(prompts, done, strict=True):
        tokens, at, verifies = toy.greedy(prompt), 1, 0
        while at < 40:
            run = next((i for i, token in enumerate(tokens[at : at + 4]) if token != 34), len(tokens[at : at + 4]))
            at, verifies = at + run + 1, verifies + 1
        assert tuple(item.token_ids) == tokens
        assert item.metrics.verify_steps == verifies < 39
        assert item.metrics.accept_length > 1.05


@pytest.mark.parametrize("name", ["toy-block", "toy-block-34"])
def test_engine_acceptance_matches_the_authors_package(
    toy: Any, toy_engine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its own loop, verify by verify, over the same weights."""
    authors = pytest.importorskip("dflash.model")
    monkeypatch.setattr(authors, "_cuda_time", lambda: 0.0)
    draft = authors.DFlashDraftModel(authors.Qwen3Config(**toy.block_config))
    draft.load_state_dict(toy.block(name).tensors)
    engine = toy_engine(speculation=Speculation("dflash", "v1", draft=name))
    for prompt in toy.prompts()[:6]:
        theirs = authors.dflash_generate(
            draft.eval(), transformers_toy(toy), torch.tensor([prompt]), 25, None, return_stats=True
        )
        [ours] = engine.generate([list(prompt)], SamplingParams(max_new_tokens=25, ignore_eos=True))
        assert ours.token_ids == theirs.output_ids[0, len(prompt) :].tolist()
        assert ours.metrics.verify_steps == len(theirs.acceptance_lengths)
