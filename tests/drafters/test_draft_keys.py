"""The draft KV in shared prefix pages matches KV recomputed from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from uncached import run_text

from specbatch import Engine, SamplingParams
from specbatch.config import Speculation


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize(
    "shape", [{"draft_tokens": 3}, {"draft_topk": 2, "draft_steps": 3, "draft_tokens": 6}], ids=str
)
def test_shared_pages_hold_the_draft_models_keys(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str, shape: dict[str, int]
) -> None:
    """For any acceptance: full acceptance, as here, leaves the most positions without draft KV."""
    speculation = Speculation("standalone", schedule, draft="toy", **shape)  # type: ignore[arg-type]
    prompts = [[index, *prompt] for index, prompt in enumerate(toy.prompts()[:4])]
    for limit in (8, 9, 10, 11):  # the last verify ends before, at and after the limit
        engine = toy_engine(speculation=speculation, page_size=1)
        done = engine.generate(prompts, SamplingParams(max_new_tokens=limit, ignore_eos=True))
        assert engine.record().metrics["accept_length"] > 2.5
        drafter = engine._worker.prefill_step._drafter
        for item in done:
            text = (*item.prompt_token_ids, *item.token_ids)
            pages = torch.tensor([node.page for node in engine._scheduler._cache.path(list(text), len(text))])
            assert len(text) - 8 <= len(pages) < len(text), "the newest positions may be missing, but no others"
            _, fresh = run_text(drafter._model, text)
            for ours, theirs in zip((*drafter._cache.k, *drafter._cache.v), (*fresh.k, *fresh.v), strict=True):
                torch.testing.assert_close(ours[pages, 0], theirs[1, : len(pages)], rtol=1e-4, atol=1e-5)
