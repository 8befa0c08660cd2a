"""Latent attention: the kernels match the references, for prompts, chains and trees of any sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.kernels.attention.latent_attention import LatentDecodeRef, LatentLayout, latent_prefill_ref
from specbatch.kernels.attention.latent_attention_triton import LatentTile, latent_prefill, latent_verify
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify_attention import DecodeQueries, Mask
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.kernels.sampling.tree_verify import ancestor_words, tree_depths

PAGE, PAGES, WIDTH = 4, 40, 9
CPU = torch.device("cpu")


def layout(count: int, rank: int, rope: int, *, interleaved: bool) -> LatentLayout:
    cos, sin = rope_table(0.3 ** torch.arange(rope // 2), PAGE * WIDTH, 1.1)
    sizes: dict[str, Any] = {"rank": rank, "scale": 0.17, "interleaved": interleaved}
    return LatentLayout(count, 1, rank + rope, None, None, 1e-6, cos, sin, **sizes)


def caches(heads: LatentLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The padding page and pages of no sequence hold what must not matter."""
    return tuple(torch.randn(PAGES + 1, PAGE, 1, dim) for dim in (heads.dim - heads.rank, heads.rank))  # type: ignore[return-value]


def page_table() -> torch.Tensor:
    table = torch.zeros(5, WIDTH, dtype=torch.int64)
    table[1:] = (torch.randperm(PAGES) + 1)[: 4 * WIDTH].view(4, WIDTH)
    return table


LAYOUTS = {
    "one-head": layout(1, 16, 8, interleaved=True),
    "odd": layout(5, 20, 6, interleaved=False),
    "wide": layout(20, 32, 16, interleaved=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("count", "splits"), [(1, 1), (4, 3), (7, 2)])
def test_verify_matches_reference(name: str, count: int, splits: int) -> None:
    heads, table = LAYOUTS[name], page_table()
    lengths = torch.tensor([0, 17, PAGE * WIDTH - count, 5])
    queries = DecodeQueries(table, torch.tensor([3, 1, 4, 2]), lengths, count, PAGE)
    compare(queries, heads, (lengths[:, None] + torch.arange(count)).flatten(), splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_tree_matches_reference(first: int, splits: int) -> None:
    """As a whole, or its last nodes after the first two are in the cache."""
    words = ancestor_words(torch.tensor([[0, 0, 1, 1, 3], [0, 1, 2, 2, 0], [0, 0, 0, 1, 2]]), 5)
    lengths = torch.tensor([9, 0, 21])
    positions = (lengths[:, None] + tree_depths(words))[:, first:].flatten()
    queries = DecodeQueries(
        page_table(), torch.tensor([2, 4, 1]), lengths, 6 - first, PAGE, None, words[:, first:].contiguous(), first
    )
    compare(queries, LAYOUTS["odd"], positions, splits)


def compare(queries: DecodeQueries, heads: LatentLayout, positions: torch.Tensor, splits: int) -> None:
    projected, (k, v) = torch.randn(len(positions), heads.width), caches(heads)
    expected_k, expected_v = k.clone(), v.clone()
    reference = LatentDecodeRef(queries, heads.count, torch.float32)
    expected = reference(projected.clone(), heads, positions, expected_k, expected_v, Mask())
    tile = LatentTile(16, 16, 1, 1)
    found = latent_verify(queries, projected, heads, positions, k, v, Mask(), splits=splits, tile=tile)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, expected_k, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v, expected_v, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_prefill_matches_reference(name: str) -> None:
    """Prompts, and a chunk after a prefix."""
    heads, table = LAYOUTS[name], page_table()
    spans = RaggedBatch([0, 13, 0], [9, 20, 1], [3, 1, 2], table, PAGE)
    positions = torch.cat([torch.arange(*bounds) for bounds in ((0, 9), (13, 20), (0, 1))])
    slots = kv_slots(table, torch.tensor([3] * 9 + [1] * 7 + [2]), positions, PAGE)
    projected, (k, v) = torch.randn(len(positions), heads.width), caches(heads)
    expected = latent_prefill_ref(projected.clone(), heads, positions, slots, k.clone(), v.clone(), spans)
    found = latent_prefill(projected, heads, positions, slots, k, v, spans, tile=LatentTile(16, 16, 1, 1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
