"""MTP with a layer per draft in an engine: what it leaves to the prefix cache. Parity is tested in `heads`."""

from __future__ import annotations

import pytest
import torch
from targets import Targets
from uncached import features_of

from specbatch import SamplingParams
from specbatch.drafters.mtp_layers import LayerChain
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import AttentionInputs
from specbatch.models.full_forward import UncachedContext


@pytest.mark.parametrize("how", [{}, {"draft_tokens": "auto"}], ids=["fixed", "auto"])
def test_shared_pages_hold_the_keys_of_all_layers(targets: Targets, how: dict[str, str]) -> None:
    """They are those of the text, not of rejected drafts. With v2 an iteration in flight would complete them. Pages for
    which the draft has not run are marked, and there are none if it runs in every step."""
    engine = targets.engine("llama", "mtp-layers", "v1", how, page_size=1, load_format="dummy", max_model_len=60)
    prompts = [prompt for prompt in targets.prompts("llama") if len(prompt) != 11]  # these share a prefix
    done = engine.generate(
        prompts, [SamplingParams(max_new_tokens=12 + place, ignore_eos=True) for place in range(len(prompts))]
    )
    drafter = engine.parts.worker.prefill_step.drafter
    assert isinstance(drafter, LayerChain)
    head, cache, model, cached = drafter.head, drafter.cache, engine.parts.model, engine.parts.scheduler.cache
    assert head.depths == 3
    assert cached is not None
    for item in done:
        text = torch.tensor([*item.prompt_token_ids, *item.token_ids])
        pages = torch.tensor([node.page for node in cached.path(text.tolist(), len(text))])
        assert len(text) - 7 <= len(pages) < len(text), "the newest positions may be missing, but no others"
        written = torch.tensor([int(page) not in engine.parts.scheduler.draft_kv.undrafted for page in pages])
        assert how or written.all()
        hidden = features_of(model, text).last
        for depth in range(3):
            count = len(text) - 1 - depth
            positions, heads = torch.arange(count), head.heads_of(depth)
            x, qkv = head.start(depth, head.embed(text[1 + depth :]), hidden[:count])
            keys, values = (torch.zeros(1, count, *part.shape[2:]) for part in (cache.k[depth], cache.v[depth]))
            split_qkv_rope(AttentionInputs(qkv, heads, positions, keys, values), positions)
            for ours, theirs in ((cache.k[depth], keys), (cache.v[depth], values)):
                torch.testing.assert_close(
                    ours[pages, 0][written], theirs[0, : len(pages)][written], rtol=1e-4, atol=1e-5
                )
            hidden = head.finish(depth, x, UncachedContext(model, 1, count).attend(0, qkv, heads, positions))


def test_a_prompt_begins_without_the_features_of_one_that_ended_with_its_first_token(targets: Targets) -> None:
    """The cached prefix of the last prompt is as long as the whole prompt before it, in the same slot."""
    how = {"max_running": 1, "load_format": "dummy", "prefill_chunk": 8}
    engine = targets.engine("llama", "mtp-layers", "v1", page_size=4, **how)
    known, other = list(range(1, 9)), list(range(11, 19))
    first = SamplingParams(max_new_tokens=1)
    ready = engine.parts.worker.prefill_step.drafter._ready
    engine.generate([[*known, 3]], first)
    assert int(ready[1]) == 3, "two of the chunk before the last token"
    engine.generate([other], first)
    (done,) = engine.generate([[*known, 4]], first)
    assert done.metrics.cached_tokens == 8
    assert int(ready[1]) == 1
