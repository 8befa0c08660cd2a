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
from specbatch.core.step_input import Proposal
from specbatch.draft_shape import DraftShape
from specbatch.drafters.dflash import DFlashDrafter, DFlashTree
from specbatch.drafters.tree import expand_block
from specbatch.models.decoder import Decoder


class Watch:
    """Compares every proposal of an engine over the toy with the reference over uncached features."""

    drafter: type[DFlashDrafter] = DFlashDrafter

    def __init__(self, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = toy.checkpoint
        cpu = torch.device("cpu")
        target = Decoder(found.config, found.tensor, dtype=torch.float32, device=cpu, max_positions=120)
        self.target = target.with_aux((2, 0))  # the layers of the draft's config
        self.reference = Reference(toy.block_config, toy.block().tensors, target)
        self.compared = 0
        propose = self.drafter.propose

        def watched(drafter: DFlashDrafter, step: Any) -> Any:
            proposal = propose(drafter, step)
            rows = enumerate(zip(step.slots.tolist(), step.lengths.tolist(), strict=True))
            running = {place: step.batch.tokens[row, : length + 1].tolist() for place, (row, length) in rows if row}
            if running:  # none while graphs are captured
                self.compare([*running.values()], proposal, [*running])
            return proposal

        monkeypatch.setattr(self.drafter, "propose", watched)

    def compare(self, texts: list[list[int]], proposal: Proposal, places: list[int]) -> None:
        features, _ = prefill_texts(self.target, [text[:-1] for text in texts])
        for own, text, drafts in zip(features, texts, proposal.tokens[places], strict=True):
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


TREE = DraftShape(3, 3, 7)


class WatchTrees(Watch):
    drafter = DFlashTree

    def compare(self, texts: list[list[int]], proposal: Proposal, places: list[int]) -> None:
        features, _ = prefill_texts(self.target, [text[:-1] for text in texts])
        words = proposal.ancestors
        assert words is not None
        for own, text, place in zip(features, texts, places, strict=True):
            logits = self.reference.logits(own.aux, text[-1], TREE.steps, [0] * TREE.steps)
            best = logits.log_softmax(-1).topk(TREE.topk)
            every = expand_block(best.values[None].float(), best.indices[None], TREE._replace(tokens=20))
            found = [paths(proposal.tokens[place], words[place]), paths(every[0][0], every[1][0])]
            scores = [
                sum(float(logits[depth].log_softmax(-1)[token]) for depth, token in enumerate(t)) for t in found[1]
            ]
            if scores[TREE.tokens - 1] - scores[TREE.tokens] > 1e-3:
                assert set(found[0]) == set(found[1][: TREE.tokens])
                self.compared += 1


def paths(tokens: torch.Tensor, words: torch.Tensor) -> list[tuple[int, ...]]:
    """The text of each node."""
    seen = [[at for at in range(1, len(words)) if int(word) >> at & 1] for word in words[1:]]
    return [tuple(int(tokens[node - 1]) for node in nodes) for nodes in seen]


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_trees_match_the_reference_after_accepted_paths(
    toy: Any, toy_engine: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Accepted nodes of a tree are not the first rows of a verify. Their features are the context of later drafts."""
    watch = WatchTrees(toy, monkeypatch)
    shape = dict(zip(("draft_steps", "draft_topk", "draft_tokens"), TREE, strict=True))
    engine = toy_engine(speculation=Speculation("dflash", schedule, draft="toy-block", **shape), page_size=3)
    prompts = [list(prompt) for prompt in (*toy.prompts()[6:9], *toy.prompts()[-3:])]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:20] for prompt in prompts]
    assert watch.compared > 50
    assert engine.record().metrics["accept_length"] > 1.05
