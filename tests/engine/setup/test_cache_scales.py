"""An engine's FP8 KV cache: scales of the checkpoint, divided as the KV heads, or computed ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from targets import TargetCheckpoint
from thread_ranks import on_ranks
from uncached import decoder_of

from specbatch.engine.setup.cache_scales import stored_cache
from specbatch.models.cache_calibration import CacheCalibration
from specbatch.weights import open_checkpoint

FILES = Path(__file__).parents[2] / "weights" / "real_writers" / "files"


@pytest.mark.parametrize("ranks", [2, 4])
def test_scales_of_a_checkpoint_are_divided_as_the_heads(ranks: int) -> None:
    """Two KV heads: with four ranks, neighbours have the same one."""
    checkpoint, lines = open_checkpoint(str(FILES / "llm-compressor-cache")), list[str]()
    whole = stored_cache(checkpoint, decoder_of(checkpoint), None, lines.append)
    assert lines == ["KV cache: FP8, keys / 0.00946 to 0.00995 and values / 0.00922 to 0.0118, the checkpoint's scales"]
    assert whole.k_offsets == {}
    parts = on_ranks(ranks, lambda one: stored_cache(checkpoint, decoder_of(checkpoint, ranks=one), one, print))
    for rank, part in enumerate(parts):
        head = rank * 2 // ranks
        assert torch.equal(part.k_scales, whole.k_scales[:, head : head + 1])
        assert torch.equal(part.v_scales, whole.v_scales[:, head : head + 1])


def test_each_rank_computes_those_of_its_heads() -> None:
    checkpoint, lines = TargetCheckpoint("llama"), list[str]()
    whole = stored_cache(checkpoint, decoder_of(checkpoint), None, lines.append)
    assert "computed from 512 tokens in" in lines[0]
    first, second = on_ranks(2, lambda one: stored_cache(checkpoint, decoder_of(checkpoint, ranks=one), one, print))
    assert isinstance(first, CacheCalibration)
    assert torch.equal(torch.cat([first.k_scales, second.k_scales], 1), whole.k_scales)
    assert torch.equal(torch.cat([first.v_scales, second.v_scales], 1), whole.v_scales)
    for layer, offset in whole.k_offsets.items():
        torch.testing.assert_close(torch.cat([first.k_offsets[layer], second.k_offsets[layer]]), offset)
