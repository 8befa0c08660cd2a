"""Paged prefill attention of ragged batches matches float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed, first_quick
from dtypes import DTYPES
from paged_prompts import Case

from specbatch.kernels.attention.prefill.prefill_attention_triton import Tiling, prefill_attention
from specbatch.kernels.attention.prefill.unpacked_cache_triton import unpacked
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import StaticRaggedBatch


@pytest.mark.parametrize(
    ("spans", "heads", "window", "page_size", "dtype"),
    crossed([
        ([(0, 1)], (4, 2, 32), 0, 16),
        ([(0, 70)], (4, 2, 16), 0, 16),
        ([(0, 33), (47, 80), (5, 6)], (9, 3, 24), 0, 16),
        ([(64, 97), (0, 17)], (3, 1, 80), 0, 8),
        ([(0, 100)], (2, 2, 16), 7, 16),
        ([(63, 101), (0, 40)], (6, 2, 32), 33, 4),
        ([(31, 64)], (16, 1, 48), 1, 1),
    ], DTYPES),
)  # fmt: skip
def test_prefill_attention_matches_reference(
    device: torch.device, dtype: torch.dtype, spans: list[tuple[int, int]], heads: tuple[int, int, int],
    window: int, page_size: int,
) -> None:  # fmt: skip
    case = Case(device, dtype, spans, heads, page_size)
    tile = Tiling(32, 16, 4, 2) if device.type == "cpu" else None  # small tiles reach more edges in less time
    case.check(prefill_attention(case.inputs(window), tile), window)


@pytest.mark.parametrize(("source", "window"), crossed(["rows", "pages"], [0, 21]))
def test_bulk_copies_match_reference(device: torch.device, source: str, window: int) -> None:
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    page_size = 7 if source == "rows" else 128
    spans = [(0, 37), (0, 1), (0, 20)] if source == "rows" else [(100, 137), (0, 20), (130, 133)]
    case = Case(device, dtype, spans, (8, 2, 64), page_size)
    if source == "rows":
        case.k_cache.fill_(torch.nan)  # not read
    tile = Tiling(32, 16, 4, 2) if device.type == "cpu" else None
    case.check(prefill_attention(case.inputs(window, own=True), tile), window)


@pytest.mark.parametrize("source", ["rows", "pages", "slots"])
def test_slots_past_the_sequence_are_ignored(device: torch.device, source: str) -> None:
    """Another prompt's values, or what a page held before, may be NaN."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    page_size = 128 if source == "pages" else 7
    case = Case(device, dtype, [(0, 20), (0, 37)], (8, 2, 64), page_size)
    tile = Tiling(32, 16, 4, 2) if device.type == "cpu" else None
    k_new, v_new = (x.clone() for x in case.new)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    for new in (k_new, v_new):
        new[20:] = torch.nan  # the second prompt
    for cache in (k_cache, v_cache):
        for row, end in zip(case.layout.rows, case.layout.ends, strict=True):
            last = int(case.layout.page_table[row, (end - 1) // page_size])
            cache[last, (end - 1) % page_size + 1 :] = torch.nan
    inputs = case.inputs(own=source == "rows")
    clean = prefill_attention(inputs, tile)
    new = {"k_new": k_new, "v_new": v_new} if source == "rows" else {}
    out = prefill_attention(inputs._replace(k_cache=k_cache, v_cache=v_cache, **new), tile)
    assert out[:20].isfinite().all()
    assert torch.equal(out[:20], clean[:20])
    assert source == "rows" or torch.equal(out, clean)


@pytest.mark.parametrize(
    ("spans", "window"), [([(0, 33), (47, 80), (5, 6)], 0), ([(63, 101), (0, 40)], 20), ([(1100, 1103), (0, 5)], 0)]
)
def test_sinks(device: torch.device, spans: list[tuple[int, int]], window: int) -> None:
    """The last keys are split."""
    case = Case(device, torch.float32, spans, (6, 2, 24))
    sinks = 2 * torch.randn(6, device=device)
    case.check(prefill_attention(case.inputs(window, sinks), Tiling(16, 64, 4, 2)), window, sinks)


@pytest.mark.parametrize("window", [0, 600])
def test_short_chunk_after_long_prefix_uses_split_kv(device: torch.device, window: int) -> None:
    case = Case(device, torch.float32, [(1500, 1503), (1100, 1101)], (4, 2, 16))
    tile = Tiling(16, 64, 4, 2)
    out = prefill_attention(case.inputs(window), tile)
    case.check(out, window)
    again = prefill_attention(case.inputs(window), tile)
    assert torch.equal(out, again)


def test_strided_queries(device: torch.device) -> None:
    case = Case(device, torch.float16, [(0, 20)], (4, 2, 16))
    buffer = torch.full((20, 8, 16), torch.nan, dtype=torch.float16, device=device)
    buffer[:, :4] = case.q
    case.check(prefill_attention(case.inputs()._replace(q=buffer[:, :4]), Tiling(32, 16, 4, 2)))


def test_head_dim_256_and_long_prompts(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("too much for the interpreter")
    for dtype in DTYPES:
        for heads in [(32, 8, 128), (4, 2, 256), (8, 8, 64)]:
            case = Case(device, dtype, [(0, 700), (900, 1030), (2040, 2047)], heads)
            case.check(prefill_attention(case.inputs()))


@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 1, 256)])
def test_fp8_kv_cache(device: torch.device, heads: tuple[int, int, int]) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter has no FP8 matmul")
    case = Case(device, torch.bfloat16, [(0, 70), (300, 421)], heads, stored=torch.float8_e4m3fn)
    case.check(prefill_attention(case.inputs()))


@pytest.mark.parametrize(
    ("spans", "stored"), crossed([[(0, 33), (47, 80)], [(1100, 1103), (0, 5)]], [None, torch.float8_e4m3fn])
)
def test_scales_of_a_cache(device: torch.device, stored: torch.dtype | None, spans: list[tuple[int, int]]) -> None:
    case = Case(device, torch.float32, spans, (6, 2, 24), stored=stored)
    case.scales = [torch.rand(2, device=device) + 0.5 for _ in range(2)]
    sinks = torch.randn(6, device=device)
    case.check(prefill_attention(case.inputs(sinks=sinks), Tiling(16, 64, 4, 2)), sinks=sinks)


@pytest.mark.parametrize("scaled", [False, True])
def test_long_chunks_read_a_converted_copy_of_an_fp8_cache(device: torch.device, scaled: bool) -> None:
    """Several layers use the tables of one pass; what pages hold after the last key is not read."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    case = Case(device, dtype, [(7, 290), (0, 130), (128, 256)], (4, 2, 24), stored=torch.float8_e4m3fn)
    case.scales = [torch.rand(2, device=device) + 0.5 for _ in range(2)] if scaled else [None, None]
    tile = Tiling(64, 64, 4, 2) if device.type == "cpu" else None
    for _ in range(1 + scaled):
        inputs = unpacked(case.inputs())
        assert inputs.k_cache.dtype == dtype
        assert inputs.spans.page_table.tolist()[2][:2] == [5, 6]
        case.check(prefill_attention(case.inputs(), tile))
    few = Case(device, dtype, [(280, 290), (0, 130)], (4, 2, 24), stored=torch.float8_e4m3fn)
    for kept in (few.inputs(), case.inputs(window=9), case.inputs()._replace(q=case.q.float())):
        assert unpacked(kept) is kept


def test_keys_of_the_pass_are_not_scaled(device: torch.device) -> None:
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    case = Case(device, dtype, [(0, 37), (0, 1)], (8, 2, 64), stored=torch.float8_e4m3fn)
    inputs = case.inputs(own=True)._replace(k_scale=torch.full((2,), torch.nan), v_scale=torch.full((2,), torch.nan))
    case.check(prefill_attention(inputs, Tiling(32, 16, 4, 2)))


FRESH = [(0, 30), (0, 1), (0, 17)], [(0, 48)], [(0, 16), (0, 31)]
PREFIXED = [(7, 37), (50, 51), (0, 17)], [(12, 60)], [(0, 16), (33, 64)]


@pytest.mark.parametrize(
    ("passes", "own"), first_quick(2, [(FRESH, True), (PREFIXED, False), (FRESH, False), (PREFIXED, True)])
)
def test_ragged_batch_at_fixed_addresses_is_reusable(device: torch.device, passes: Any, own: bool) -> None:
    """Whatever the buffers held before; with the maximum number of chunks, one, or some."""
    recorded: StaticRaggedBatch | None = None
    for spans in passes:
        case = Case(device, torch.float32, spans, (4, 2, 32))
        total = case.layout.offsets[-1]
        if recorded is None:
            table, fresh = case.layout.page_table.new_zeros(8, 8), passes is FRESH
            recorded = StaticRaggedBatch(48, 3, table, case.layout.page_size, fresh=fresh)
            recorded.tiles(8)  # as at graph capture, before the first pass is known
        recorded.page_table.zero_()
        height, width = case.layout.page_table.shape
        recorded.page_table[:height, :width] = case.layout.page_table
        recorded.load(case.layout)
        new = [torch.cat([x, x.new_full((48 - total, *x.shape[1:]), torch.nan)]) for x in case.new]
        q = torch.cat([case.q, case.q.new_full((48 - total, *case.q.shape[1:]), torch.nan)])
        out = torch.full_like(q, torch.nan)
        tile = Tiling(16, 16, 4, 1)
        keys = new if own else (None, None)
        prefill_attention(PrefillInputs(q, *keys, case.k_cache, case.v_cache, recorded, out=out), tile)
        torch.testing.assert_close(out[:total].double().cpu(), case.expected(), atol=3e-6, rtol=0)
        assert out[total:].isnan().all()
