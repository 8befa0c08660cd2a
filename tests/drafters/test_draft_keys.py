"""The draft KV in shared prefix pages matches KV recomputed from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import crossed
from uncached import run_texts

from specbatch import Engine, SamplingParams
from specbatch.config.speculation import Speculation

TREE = {"draft_topk": 2, "draft_steps": 3, "draft_tokens": 6}


@pytest.mark.parametrize(("schedule", "shape"), crossed(["v1", "v2"], [{"draft_tokens": 3}, TREE]))
def test_shared_pages_hold_the_draft_models_keys(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str, shape: dict[str, int]
) -> None:
    """For any acceptance: full acceptance, as here, leaves the most positions without draft KV."""
    speculation = Speculation("standalone", schedule, draft="toy", **shape)  # type: ignore[arg-type]
    engine = toy_engine(speculation=speculation, page_size=1)
    prompts = [[index, *prompt] for index, prompt in enumerate(toy.prompts()[:4])]
    # The last verify ends before, at and after the limit.
    done = engine.generate(prompts, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (8, 9, 10, 11)])
    assert engine.record().metrics["accept_length"] > 2.5
    drafter = engine.parts.worker.prefill_step.drafter
    texts = [(*item.prompt_token_ids, *item.token_ids) for item in done]
    _, fresh = run_texts(drafter.model, texts)
    for index, text in enumerate(texts, 1):
        pages = torch.tensor([node.page for node in engine.parts.scheduler.cache.path(list(text), len(text))])
        assert len(text) - 8 <= len(pages) < len(text), "the newest positions may be missing, but no others"
        for ours, theirs in zip((*drafter.cache.k, *drafter.cache.v), (*fresh.k, *fresh.v), strict=True):
            torch.testing.assert_close(ours[pages, 0], theirs[index, : len(pages)], rtol=1e-4, atol=1e-5)
