"""Engines over the toy model whose every proposal of a block draft is compared with a float64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from block_drafts import Reference
from uncached import decoder_of, prefill_texts

from specbatch import SamplingParams, Speculation
from specbatch.config.draft_shape import DraftShape
from specbatch.core.step_input import Proposal
from specbatch.drafters.dflash import DFlashDrafter

Text = tuple[int, ...]
TREE = DraftShape(3, 4, 14)
CLEAR = 1e-3  # log-probabilities that differ by less may be in another order


class Watch:
    """Compares every proposal of an engine over the toy with the reference over uncached features."""

    def __init__(
        self,
        toy: Any,
        monkeypatch: pytest.MonkeyPatch,
        drafter: type[DFlashDrafter],
        reference: type[Reference],
        draft: str = "toy-block",
    ) -> None:
        """drafter: the class that the engine uses; reference: that of the draft, a name in `conftest.TOY_BLOCKS`."""
        found, block = toy.checkpoint, toy.block(draft)
        target = decoder_of(found)
        self.target = target.with_aux((1, 0))  # the layers of the draft's config
        self.reference = reference(block.raw, block.tensors, target)
        self.compared = 0
        propose = drafter.propose

        def watched(own: DFlashDrafter, step: Any) -> Any:
            proposal = propose(own, step)
            rows = enumerate(zip(step.slots.tolist(), step.lengths.tolist(), strict=True))
            running = {place: step.batch.tokens[row, : length + 1].tolist() for place, (row, length) in rows if row}
            if running:  # none while graphs are captured
                self.compare([*running.values()], proposal, [*running])
            return proposal

        monkeypatch.setattr(drafter, "propose", watched)

    def compare(self, texts: list[list[int]], proposal: Proposal, places: list[int]) -> None:
        features, _ = prefill_texts(self.target, [text[:-1] for text in texts])
        for own, text, drafts in zip(features, texts, proposal.tokens[places], strict=True):
            self.reference.predecessor = text[-2]
            logits = self.reference.logits(own.aux, text[-1], len(drafts), drafts.tolist())
            best = logits.topk(2, -1).values
            clear = best[:, 0] - best[:, 1] > 1e-3
            assert torch.equal(drafts[clear], logits.argmax(-1)[clear])
            self.compared += int(clear.sum())


class WatchTrees(Watch):
    def compare(self, texts: list[list[int]], proposal: Proposal, places: list[int]) -> None:
        features, _ = prefill_texts(self.target, [text[:-1] for text in texts])
        words, hidden = proposal.ancestors, self.reference.hidden
        assert words is not None
        for own, text, place in zip(features, texts, places, strict=True):
            self.reference.predecessor = text[-2]
            self.reference.hidden = cache(hidden)  # type: ignore[method-assign]
            expected, gap = self.likeliest(own.aux, text[-1])
            self.reference.hidden = hidden  # type: ignore[method-assign]
            if gap > CLEAR:
                assert paths(proposal.tokens[place], words[place]) == expected
                self.compared += 1

    def likeliest(self, features: torch.Tensor, root: int) -> tuple[set[Text], float]:
        """The texts of the best tree after a root, and the smallest difference that decided between two of them."""
        known, beams, gap = {(): 0.0}, [Text()], torch.inf

        def best(texts: list[Text], count: int) -> list[Text]:
            nonlocal gap
            ranked = sorted(texts, key=lambda text: -known[text])
            gap = min(gap, known[ranked[count - 1]] - known[ranked[count]]) if len(ranked) > count else gap
            return ranked[:count]

        for _ in range(TREE.steps):
            children: list[Text] = []
            for beam in beams:
                logits = self.reference.logits(features, root, TREE.steps, [*beam, 0])[-1].log_softmax(-1)
                below = {(*beam, token): known[beam] + float(score) for token, score in enumerate(logits)}
                known |= below
                children += best([*below], TREE.topk)
            beams = best(children, TREE.topk)
            known = {text: score for text, score in known.items() if len(text) < len(children[0]) or text in children}
        return set(best([text for text in known if text], TREE.tokens)), gap


def paths(tokens: torch.Tensor, words: torch.Tensor) -> set[Text]:
    """The text of each node."""
    seen = [[at for at in range(1, len(words)) if int(word) >> at & 1] for word in words[1:]]
    return {tuple(int(tokens[node - 1]) for node in nodes) for nodes in seen}


def check_trees(
    toy: Any,
    toy_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    drafter: type[DFlashDrafter],
    reference: type[Reference],
    speculation: Speculation,
) -> None:
    """Trees of a whole run. Accepted nodes of a tree are not the first rows of a verify; their features are the context
    of later drafts."""
    assert speculation.draft is not None
    watch = WatchTrees(toy, monkeypatch, drafter, reference, speculation.draft)
    asked = replace(speculation, draft_steps=TREE.steps, draft_topk=TREE.topk, draft_tokens=TREE.tokens)
    engine = toy_engine(speculation=asked, page_size=3)
    prompts = [list(prompt) for prompt in (*toy.prompts()[6:9], *toy.prompts()[-3:])]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:20] for prompt in prompts]
    assert watch.compared > 50
    assert engine.record().metrics["accept_length"] > 1.05
