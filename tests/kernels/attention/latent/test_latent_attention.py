"""Latent attention: the kernels match the references, for prompts, chains and trees of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from crossed import crossed, first_quick, slow_but
from dtypes import DTYPES
from shared_prefixes import shared

from specbatch.kernels.attention.deterministic.span_latents_triton import span_latent_prefill, span_latent_verify
from specbatch.kernels.attention.latent.latent_attention import (
    LatentDecodeRef,
    latent_decode_attention,
    latent_prefill_ref,
)
from specbatch.kernels.attention.latent.latent_attention_configs import (
    LatentTile,
    latent_prefix_bytes,
    prefix_launch,
    tile_for,
)
from specbatch.kernels.attention.latent.latent_attention_triton import latent_prefill, latent_verify, token_slots
from specbatch.kernels.attention.queries import AttentionInputs, DecodeAttention, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify.verify_attention import wrap_packed_rows
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.packed_rows import pack_rows
from specbatch.kernels.elementwise.rope import rope_table
from specbatch.kernels.sampling.tree_verify import ancestor_words, tree_depths

PAGE, PAGES, WIDTH = 4, 60, 9
# Query heads, rank, rotated channels, whether they are interleaved.
LAYOUTS = {"one-head": (1, 16, 8, True), "odd": (5, 20, 6, False), "wide": (20, 32, 16, True)}


def layout(name: str) -> LatentLayout:
    count, rank, rope, interleaved = LAYOUTS[name]
    cos, sin = rope_table(0.3 ** torch.arange(rope // 2), PAGE * WIDTH, 1.1)
    sizes: dict[str, Any] = {"rank": rank, "scale": 0.17, "interleaved": interleaved}
    return LatentLayout(count, 1, rank + rope, None, None, 1e-6, cos, sin, **sizes)


def caches(heads: LatentLayout) -> list[torch.Tensor]:
    return [torch.randn(PAGES + 1, PAGE, 1, dim) for dim in (heads.dim - heads.rank, heads.rank)]


def page_table() -> torch.Tensor:
    table = torch.zeros(5, WIDTH, dtype=torch.int64)
    table[1:] = (torch.randperm(PAGES) + 1)[: 4 * WIDTH].view(4, WIDTH)
    return table


@pytest.fixture(autouse=True)
def on_device(device: torch.device) -> Iterator[None]:
    torch.manual_seed(0)
    with device:
        yield


def default(queries: DecodeQueries, splits: int) -> DecodeAttention:
    return partial(latent_verify, queries, token_slots(queries), splits=splits, tile=LatentTile(16, 16, 1, 1))


def spans(queries: DecodeQueries, splits: int) -> DecodeAttention:
    """Of deterministic mode."""
    return partial(span_latent_verify(queries), splits=splits, span=16)


Kernel = Callable[[DecodeQueries, int], DecodeAttention]


@pytest.mark.parametrize(
    ("kernel", "count", "splits", "name"),
    crossed(
        [(default, 1, 1), (default, 4, 3), (default, 7, 2), (spans, 1, 1), (spans, 3, 2)], ["one-head", "odd", "wide"]
    ),
)
def test_verify_matches_reference(name: str, kernel: Kernel, count: int, splits: int) -> None:
    heads, table = layout(name), page_table()
    lengths = torch.tensor([0, 17, PAGE * WIDTH - count, 5])
    queries = DecodeQueries(table, torch.tensor([3, 1, 4, 2]), lengths, count, PAGE)
    compare(queries, heads, (lengths[:, None] + torch.arange(count)).flatten(), kernel(queries, splits))


@pytest.mark.parametrize(("first", "splits", "kernel"), crossed([0, 2], [3, 1], [default, spans]))
def test_tree_matches_reference(first: int, splits: int, kernel: Kernel) -> None:
    """As a whole, or its last nodes after the first two are in the cache."""
    words = ancestor_words(torch.tensor([[0, 0, 1, 1, 3], [0, 1, 2, 2, 0], [0, 0, 0, 1, 2]]), 5)
    lengths = torch.tensor([9, 0, 21])
    positions = (lengths[:, None] + tree_depths(words))[:, first:].flatten()
    queries = DecodeQueries(
        page_table(), torch.tensor([2, 4, 1]), lengths, 6 - first, PAGE, None, words[:, first:].contiguous(), first
    )
    compare(queries, layout("odd"), positions, kernel(queries, splits))


def high(queries: DecodeQueries, splits: int) -> DecodeAttention:
    """Tiles of more query rows."""
    return partial(latent_verify, queries, token_slots(queries), splits=splits, tile=LatentTile(64, 16, 1, 1))


@pytest.mark.parametrize("kernel", [default, high, spans])
def test_an_fp8_cache(kernel: Kernel) -> None:
    lengths = torch.tensor([11, 3])
    queries = DecodeQueries(page_table(), torch.tensor([2, 1]), lengths, 2, PAGE)
    positions = (lengths[:, None] + torch.arange(2)).flatten()
    heads = layout("odd")
    heads.cos.fill_(1), heads.sin.fill_(0)  # the interpreter rounds to FP8 differently
    compare(queries, heads, positions, kernel(queries, 2), torch.float8_e4m3fn)
    compare(queries, heads, positions, kernel(queries, 2), torch.float8_e4m3fn, scales=(0.5, 4.0))
    compare(queries, heads, positions, kernel(queries, 1), scales=(1.3, 0.7))


PREFIX_TILE = LatentTile(16, 16, 1, 1)
TWO = [([0, 3, 4], 16), ([5, 1], 8)]  # sequences that share, and the keys of their prefix; the third has none


def sharing(
    count: int, *, first: int = 0, words: torch.Tensor | None = None, groups: list[tuple[list[int], int]] | None = None
) -> DecodeQueries:
    table = torch.zeros(7, WIDTH, dtype=torch.int64)
    table[1:] = (torch.randperm(PAGES) + 1)[: 6 * WIDTH].view(6, WIDTH)
    slots = torch.tensor([3, 1, 4, 2, 6, 5])
    prefixes = shared(table, slots, TWO if groups is None else groups, PAGE)
    lengths = torch.tensor([16, 8, 5, 28, 30, 27])
    return DecodeQueries(table, slots, lengths, count, PAGE, None, words, first, prefixes=prefixes)


def once(queries: DecodeQueries, splits: int) -> DecodeAttention:
    options: dict[str, Any] = {"tile": LatentTile(16, 16, 1, 1), "prefix_tile": PREFIX_TILE, "works": {}}
    return partial(latent_verify, queries, token_slots(queries), splits=splits, **options)


def chain(queries: DecodeQueries) -> torch.Tensor:
    return (queries.lengths[:, None] + torch.arange(queries.num_queries)).flatten()


@pytest.mark.parametrize(("name", "count", "splits"), crossed(LAYOUTS, [1, 4], [1, 2]))
def test_shared_prefixes(name: str, count: int, splits: int) -> None:
    queries = sharing(count)
    compare(queries, layout(name), chain(queries), once(queries, splits))


@pytest.mark.parametrize(
    "groups",
    first_quick(
        1, [[([0, 1], 4), ([3, 5, 4], 24)], [], [([0, 1], 4), ([3, 4], 28), ([2, 5], 4)], [([1, 4, 0, 5, 3], 8)]]
    ),
)
def test_groups_of_many_items(groups: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and splits; nothing shared."""
    monkeypatch.setattr("specbatch.kernels.attention.verify.prefix_attention_triton.LEAST_KEYS", 4)
    queries = sharing(3, groups=groups)
    compare(queries, layout("wide"), chain(queries), once(queries, 2))


@pytest.mark.parametrize("first", slow_but([2], [0, 2]))
def test_a_tree_shares_prefixes(first: int) -> None:
    words = ancestor_words(torch.tensor([[0, 0, 1, 1, 3], [0, 1, 2, 2, 0], [0, 0, 0, 1, 2]] * 2), 5)
    queries = sharing(6 - first, first=first, words=words[:, first:].contiguous())
    positions = (queries.lengths[:, None] + tree_depths(words))[:, first:].flatten()
    compare(queries, layout("odd"), positions, once(queries, 2))


@pytest.mark.parametrize(("dtype", "scales"), first_quick(1, [(DTYPES[-1], (0.5, 4.0)), (torch.float32, None)]))
def test_an_fp8_cache_shares_prefixes(dtype: torch.dtype, scales: tuple[float, float] | None) -> None:
    queries, heads = sharing(2), layout("odd")
    heads.cos.fill_(1), heads.sin.fill_(0)
    compare(queries, heads, chain(queries), once(queries, 2), torch.float8_e4m3fn, scales, dtype)


def test_packed_rows_share_prefixes() -> None:
    """As the engine prepares a pass: tiles of the rules, and divided work that layers have in common."""
    counts, most, heads = [1, 3, 2, 4, 2, 1], 4, layout("odd")
    queries = sharing(most)
    packed = pack_rows(torch.tensor(counts), most, sum(counts))
    queries = replace(queries, packed=packed)
    positions, (k, v) = packed.pack(chain(queries)), caches(heads)
    whole = replace(queries, prefixes=None)
    reference = wrap_packed_rows(LatentDecodeRef(whole), whole)
    attend = latent_decode_attention(queries)
    for _ in range(2):
        projected = torch.randn(len(positions), heads.width)
        inputs = AttentionInputs(projected.double(), exact(heads), positions, k.double(), v.double())
        expected = reference(inputs, Mask())
        found = attend(AttentionInputs(projected, heads, positions, k, v), Mask())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_padding_that_seems_to_share() -> None:
    """A recording warms up with rows of padding, while the table is that of requests."""
    heads, queries = layout("odd"), sharing(2)
    padding = replace(queries, slots=torch.zeros_like(queries.slots), lengths=torch.zeros_like(queries.lengths))
    projected, (k, v) = torch.randn(12, heads.width), caches(heads)
    assert once(padding, 2)(AttentionInputs(projected, heads, chain(padding), k, v), Mask()).isfinite().all()


def test_memory_is_that_of_a_launch(device: torch.device) -> None:
    queries = sharing(3)
    lines = prefix_launch(queries, 16, 2).lines
    assert latent_prefix_bytes(6, 3, 4, 16, 512, device) == (lines * 513 + 6 * 3 * 16 * 513) * 4


@pytest.mark.parametrize(
    ("shared", "rows", "keys"),
    [(227, (16, 64), (64, 64)), (163, (16, 64), (32, 32)), (99, (16, 32), (32, 32))],  # H100, A100, RTX 4090
)
def test_tiles_fit_the_device(
    shared: int, rows: tuple[int, int], keys: tuple[int, int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    module = "specbatch.kernels.attention.latent.latent_attention_configs"
    monkeypatch.setattr(f"{module}._shared_memory", lambda device: shared << 10)
    found = [tile_for(count, 2, device) for count in (16, 17)]
    assert [(tile.block_m, tile.block_n) for tile in found] == list(zip(rows, keys, strict=True))


def exact(heads: LatentLayout) -> LatentLayout:
    return replace(heads, cos=heads.cos.double(), sin=heads.sin.double())


def compare(
    queries: DecodeQueries,
    heads: LatentLayout,
    positions: torch.Tensor,
    attend: DecodeAttention,
    dtype: torch.dtype = torch.float32,
    scales: tuple[float, float] | None = None,
    kind: torch.dtype = torch.float32,
) -> None:
    """With float64. dtype: of the cache, kind: of all else. Slots of no earlier key are poisoned."""
    held = torch.zeros(PAGES + 1, PAGE, dtype=torch.bool)
    for slot, length in zip(queries.slots.tolist(), queries.lengths.tolist(), strict=True):
        key = torch.arange(length + queries.first_node)
        held[queries.page_table[slot, key // PAGE], key % PAGE] = True
    projected, both, fp8 = torch.randn(len(positions), heads.width), caches(heads), dtype.itemsize == 1
    projected = (projected if not fp8 else (2 * projected).round() / 2).to(kind)  # in FP8 nothing is rounded
    stored = dtype if fp8 else kind
    k, v = (cache.masked_fill(~held[..., None, None], torch.nan).to(stored) for cache in both)
    expected_k, expected_v = (cache.double().nan_to_num(0).to(dtype if fp8 else torch.float64) for cache in (k, v))
    reference = LatentDecodeRef(queries)
    by = [] if scales is None else [torch.tensor([scale]) for scale in scales]
    wide = AttentionInputs(projected.double(), exact(heads), positions, expected_k, expected_v, *by)
    heads = replace(heads, cos=heads.cos.to(kind), sin=heads.sin.to(kind))
    expected, found = reference(wide, Mask()), attend(AttentionInputs(projected, heads, positions, k, v, *by), Mask())
    tolerance = 1e-5 if kind == torch.float32 else 2**-8 + 1e-3  # the result is rounded to BF16, by at most 2**-8
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    written = torch.zeros_like(held).flatten().index_fill(0, token_slots(queries), True).view_as(held)
    for cache, wanted in ((k, expected_k), (v, expected_v)):
        torch.testing.assert_close(cache.float()[written], wanted.float()[written], rtol=1e-6, atol=1e-6)
        assert cache.float()[~written & ~held].isnan().all()


@pytest.mark.parametrize(
    ("name", "prefill"),
    crossed(LAYOUTS, [partial(span_latent_prefill, span=16), partial(latent_prefill, tile=LatentTile(16, 16, 1, 1))]),
)
def test_prefill_matches_reference(name: str, prefill: Callable[..., torch.Tensor]) -> None:
    """Prompts, and a chunk after a prefix."""
    heads, table = layout(name), page_table()
    with torch.device("cpu"):  # where it makes its tables, before it copies them
        spans = RaggedBatch([0, 13, 0], [9, 20, 1], [3, 1, 2], table, PAGE)
    positions = torch.cat([torch.arange(*bounds) for bounds in ((0, 9), (13, 20), (0, 1))])
    slots = kv_slots(table, torch.tensor([3] * 9 + [1] * 7 + [2]), positions, PAGE)
    projected, (k, v) = torch.randn(len(positions), heads.width), caches(heads)
    copies = AttentionInputs(projected.clone(), heads, positions, k.clone(), v.clone())
    expected = latent_prefill_ref(copies, slots, spans)
    with torch.device("cpu"):
        found = prefill(AttentionInputs(projected, heads, positions, k, v), slots, spans)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize(
    ("batch", "groups", "dtype"),
    [
        (1, None, torch.bfloat16),
        (8, None, torch.bfloat16),
        (8, [([7, 0, 2, 5, 3], 512), ([4, 1], 16)], torch.bfloat16),
        (8, [([6, 0, 2], 208), ([4, 1], 560)], torch.float8_e4m3fn),
    ],
)
def test_published_sizes_on_a_gpu(
    batch: int, groups: list[tuple[list[int], int]] | None, dtype: torch.dtype, count: int, device: torch.device
) -> None:
    """16 heads of DeepSeek-V2-Lite in BF16, tiles and splits chosen by the sizes, against FP32."""
    size, width, bf16 = 16, 80, torch.bfloat16
    cos, sin = rope_table(1e4 ** -(torch.arange(32) / 32), size * width, 1.0)
    sizes: dict[str, Any] = {"rank": 512, "scale": 192**-0.5, "interleaved": True}
    heads = LatentLayout(16, 1, 576, None, None, 1e-6, cos.to(bf16), sin.to(bf16), **sizes)
    exact = LatentLayout(16, 1, 576, None, None, 1e-6, heads.cos.float(), heads.sin.float(), **sizes)
    table = torch.zeros(batch + 1, width, dtype=torch.int64)
    table[1:] = (torch.randperm(batch * width) + 1).view(batch, width)
    slots = torch.arange(batch) + 1
    prefixes = None if groups is None else shared(table, slots, groups, size)
    lengths = torch.randint(0 if groups is None else 560, size * width - count, (batch,))
    queries = DecodeQueries(table, slots, lengths, count, size, prefixes=prefixes)
    positions = (lengths[:, None] + torch.arange(count)).flatten()
    k, v = (torch.randn(batch * width + 1, size, 1, dim).to(dtype) for dim in (64, 512))
    projected = torch.randn(batch * count, heads.width).to(bf16)
    is_half = dtype == bf16
    stored = (cache.float() if is_half else cache.clone() for cache in (k, v))
    reference = LatentDecodeRef(queries)
    expected = reference(AttentionInputs(projected.float(), exact, positions, *stored), Mask())
    inputs = AttentionInputs(projected, heads, positions, k, v)
    found = latent_verify(queries, token_slots(queries), inputs, Mask())
    assert (found.float() - expected).norm() < (1e-2 if is_half else 2e-2) * expected.norm()
