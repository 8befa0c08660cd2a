"""Keys and values of a draft model that a prefix cache shares, against those recomputed from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbatch import Engine, SamplingParams
from specbatch.config import Speculation
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.kernels.attention.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder


def recomputed(model: Decoder, text: tuple[int, ...]) -> KVCache:
    """A cache with one page per token that holds the keys and values of a text."""
    cpu = torch.device("cpu")
    backend = prefill_backend("torch", cpu, torch.float32, model.config.head_dim)
    cache = KVCache(model.config, len(model.layers), 1, len(text), torch.float32, cpu, backend)
    metadata = PrefillMetadata(torch.ones(1, 1, dtype=torch.int64), [PromptChunk(0, 0, len(text))], len(text))
    model.forward(torch.tensor(text), metadata.positions, metadata.bind(cache))
    return cache


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize(
    "shape", [{"draft_tokens": 3}, {"draft_topk": 2, "draft_steps": 3, "draft_tokens": 6}], ids=str
)
def test_shared_pages_hold_the_draft_models_keys(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str, shape: dict[str, int]
) -> None:
    """Whatever the last verify accepted: all of it, as here, leaves most positions without keys of the draft's own."""
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
            fresh = recomputed(drafter._model, text)
            for ours, theirs in zip((*drafter._cache.k, *drafter._cache.v), (*fresh.k, *fresh.v), strict=True):
                torch.testing.assert_close(ours[pages, 0], theirs[1, : len(pages)], rtol=1e-4, atol=1e-5)
