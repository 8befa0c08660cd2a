"""Drafts of DFlash in whole engines over the toy model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_drafts import Reference
from crossed import crossed
from stand_ins import fake_graphs
from uncached import prefill_texts

from specbatch import SamplingParams, Speculation
from specbatch.config import Graphs
from specbatch.drafters.dflash import DFlashDrafter
from specbatch.models.decoder import Decoder


class Watch:
    """Compares every proposal of an engine over the toy with the reference over uncached features."""

    def __init__(self, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = toy.checkpoint
        cpu = torch.device("cpu")
        target = Decoder(found.config, found.tensor, dtype=torch.float32, device=cpu, max_positions=120)
        self.target = target.with_aux((2, 0))  # the layers of the draft's config
        self.reference = Reference(toy.block_config, toy.block().tensors, target)
        self.compared = 0
        propose = DFlashDrafter.propose

        def watched(drafter: DFlashDrafter, step: Any) -> Any:
            proposal = propose(drafter, step)
            rows = zip(step.slots.tolist(), step.lengths.tolist(), proposal.tokens, strict=True)
            running = [(row, length, drafts) for row, length, drafts in rows if row]
            texts = [step.batch.tokens[row, : length + 1].tolist() for row, length, _ in running]
            if texts:  # none while graphs are captured
                self.compare(texts, [drafts for *_, drafts in running])
            return proposal

        monkeypatch.setattr(DFlashDrafter, "propose", watched)

    def compare(self, texts: list[list[int]], proposed: list[torch.Tensor]) -> None:
        features, _ = prefill_texts(self.target, [text[:-1] for text in texts])
        for own, text, drafts in zip(features, texts, proposed, strict=True):
            logits = self.reference.logits(own.aux, text[-1], len(drafts), drafts.tolist())
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
    toy: Any, toy_engine: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], schedule: str
) -> None:
    """Some prompts share a prefix: the second takes its context from the pages of the first."""
    if settings.get("graphs"):
        settings = settings | {"graphs": Graphs("whole", "piecewise")}
        fake_graphs(monkeypatch)
    watch = Watch(toy, monkeypatch)
    prompts = [list(prompt) for prompt in (*toy.prompts()[6:9], *toy.prompts()[-3:])]
    engine = toy_engine(speculation=Speculation("dflash", schedule, draft="toy-block"), **settings)
    for part in (prompts[:2], prompts):  # the second time with pages of the first
        done = engine.generate(part, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:8] for prompt in part]
    assert watch.compared > 150
