"""Verify attention matches its reference: chains, trees, blocks, windows, splits, FP8 caches and padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed, first_quick, slow_but
from dtypes import DTYPES
from verify_case import Case, tree

from specbatch.kernels import gemm
from specbatch.kernels.attention.paged_attention import attention_mask
from specbatch.kernels.attention.queries import AttentionInputs, Mask
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef, wrap_packed_rows
from specbatch.kernels.attention.verify.verify_attention_configs import Tile
from specbatch.kernels.attention.verify.verify_attention_triton import verify_attention
from specbatch.kernels.common.packed_rows import pack_rows
from specbatch.kernels.elementwise import elementwise_triton


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", slow_but([2], [1, 2, 5]))
def test_chain(device: torch.device, dtype: torch.dtype, splits: int) -> None:
    Case(device, dtype, [0, 1, 37, 100], 3).check(splits)


@pytest.mark.parametrize("n", slow_but([17], [1, 5, 16, 17, 64]))
def test_numbers_of_query_rows(device: torch.device, n: int) -> None:
    Case(device, torch.float32, [70, 15], n, count=6, kv=2).check(3)


@pytest.mark.parametrize("page_size", slow_but([1, 32], [1, 4, 16, 32]))
def test_page_sizes(device: torch.device, page_size: int) -> None:
    Case(device, torch.float32, [33, 64], 3, page_size=page_size).check(2)


@pytest.mark.parametrize(
    ("count", "kv", "dim"),
    first_quick(2, [(5, 1, 96), (1, 1, 24), (3, 3, 64), (6, 2, 80), (8, 2, 128), (2, 1, 256)]),
)
def test_heads(device: torch.device, count: int, kv: int, dim: int) -> None:
    Case(device, torch.float32, [40, 7], 3, count=count, kv=kv, dim=dim).check(2)


def test_keys_are_written_exactly_without_norm(device: torch.device) -> None:
    for dtype in DTYPES[1:]:
        case = Case(device, dtype, [20, 3], 5, norm=False)
        case.check(2)
        case.check()


@pytest.mark.parametrize("n", slow_but([7, 64], [2, 7, 64]))
def test_tree(device: torch.device, n: int) -> None:
    case = Case(device, torch.float32, [30, 0, 5], n)
    words, depths = tree(3, n, device)
    case.check(2, ancestors=words, positions=(case.lengths[:, None] + depths).flatten())


PASSES = [(7, 10, 3), (61, 3, 1), (1, 3, 1), (4, 3, 3), (63, 1, 3)]


@pytest.mark.parametrize(("first", "n", "splits"), first_quick(2, PASSES))
def test_tree_in_several_passes(device: torch.device, first: int, n: int, splits: int) -> None:
    """Nodes of earlier passes are in the cache, and the mask hides some of them."""
    case = Case(device, torch.float32, [first + 90, first, first + 17], n)
    words, depths = (item[:, first:] for item in tree(3, first + n, device))
    positions = (case.lengths[:, None] - first + depths).flatten()
    here = {"ancestors": words.contiguous(), "positions": positions, "first": first}
    seen = case.check(splits, **here)
    plain = case.check(splits, **here | {"ancestors": torch.full_like(here["ancestors"], -1)})
    assert not torch.equal(seen, plain)


@pytest.mark.parametrize(
    ("first", "window"), first_quick(2, [(6, 3), (0, 12), *product((0, 6), (1, 64, 100)), (0, 3), (6, 12)])
)
def test_tree_with_a_window(device: torch.device, window: int, first: int) -> None:
    """Windows count the positions of nodes, so that a node sees what it would see in a chain."""
    n = 9
    case = Case(device, torch.float32, [first + 90, first, first + 5], n)
    words, depths = (item[:, first:].contiguous() for item in tree(3, first + n, device))
    positions = (case.lengths[:, None] - first + depths).flatten()
    out = case.check(3, Mask(window=window), ancestors=words, positions=positions, first=first)
    mask = attention_mask(case.lengths - first, n, 120, words, first, window=window)
    for row, length in enumerate((case.lengths - first).tolist()):
        for node in range(n):
            path = [*range(length), *(length + bit for bit in range(64) if int(words[row, node]) >> bit & 1)]
            assert mask[row, node].nonzero()[:, 0].tolist() == path[-window:]
    if window == 3:
        assert not torch.equal(out, case.check(3, ancestors=words, positions=positions, first=first))


@pytest.mark.parametrize("n", slow_but([5], [5, 16, 64]))
def test_block(device: torch.device, n: int) -> None:
    Case(device, torch.float32, [30, 0], n).check(2, Mask(causal=False))


@pytest.mark.parametrize(
    ("window", "causal"), first_quick(2, [(5, True), (40, False), (1, True), (2, False), (1000, True)])
)
def test_window(device: torch.device, window: int, causal: bool) -> None:
    Case(device, torch.float32, [0, 3, 90], 5).check(3, Mask(causal, window))


@pytest.mark.parametrize(
    ("splits", "mask", "count", "dtype"),
    first_quick(
        3,
        [
            (1, Mask(), 4, torch.float32),
            (5, Mask(window=9), 12, torch.float32),  # splits of other keys do not count it again
            (3, Mask(causal=False), 4, torch.float16),
            (2, Mask(window=1), 6, torch.float32),
            (1, Mask(window=40), 10, torch.float16),
        ],
    ),
)
def test_sinks(device: torch.device, splits: int, mask: Mask, count: int, dtype: torch.dtype) -> None:
    case = Case(device, dtype, [0, 90, 3], 5, count=count, sinks=True)
    out = case.check(splits, mask)
    case.heads = replace(case.heads, sinks=None)
    assert not torch.equal(out, case.check(splits, mask))


@pytest.mark.parametrize("first", slow_but([6], [0, 6]))
def test_tree_with_sinks(device: torch.device, first: int) -> None:
    n = 9
    case = Case(device, torch.float32, [first + 150, first, first + 5], n, sinks=True)
    words, depths = (item[:, first:].contiguous() for item in tree(3, first + n, device))
    positions = (case.lengths[:, None] - first + depths).flatten()
    for mask in (Mask(), Mask(window=12)):
        case.check(3, mask, ancestors=words, positions=positions, first=first)


@pytest.mark.parametrize(("dtype", "sizes"), crossed(DTYPES, [{}, {"count": 8, "kv": 1, "dim": 256}]))
def test_fp8_cache(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    case = Case(device, dtype, [40, 3], 4, cache=torch.float8_e4m3fn, norm=False, **sizes)
    if device.type == "cpu":  # the interpreter rounds to FP8 differently than torch: use values that need no rounding
        case.qkv = case.qkv.to(torch.float8_e4m3fn).to(dtype)
        case.heads.cos.fill_(1), case.heads.sin.fill_(0)
    case.check(2)


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", first_quick(1, [{"count": 6, "kv": 3, "dim": 80}, {"kv": 1, "dim": 64}]))
def test_scales_of_a_cache(device: torch.device, cache: torch.dtype | None, sizes: dict[str, int]) -> None:
    """Of each KV head, for keys from before and of the pass; what is too large for FP8 is saturated."""
    case = Case(device, torch.float32, [40, 3, 0], 4, cache=cache, norm=False, sinks=True, **sizes)
    kv, dim = case.heads.kv, case.heads.dim
    case.scales = [2.0 ** (torch.arange(kv, device=device) + first) for first in (-2, 1)]
    case.qkv = (2 * case.qkv).round() / 2  # nothing is rounded to FP8, which the interpreter does differently
    case.heads.cos.fill_(1), case.heads.sin.fill_(0)
    if cache is None:
        case.scales = [torch.rand(kv, device=device) + 0.5 for _ in range(2)]
    else:
        case.qkv[1, case.heads.count * dim], case.qkv[2, -1] = -448.0, 2e4
    case.check(2)


@pytest.mark.parametrize("sizes", [{"count": 6, "kv": 2, "dim": 80}, {"count": 4, "kv": 4, "norm": True}])
def test_offsets_of_keys(device: torch.device, sizes: dict[str, Any]) -> None:
    """They are subtracted from the new keys, which are then as the old ones in the cache."""
    case = Case(device, torch.float32, [0, 1, 37], 3, **sizes)
    case.qkv = case.qkv.round()
    case.heads.cos.fill_(1), case.heads.sin.fill_(0)
    case.heads = replace(case.heads, k_offset=torch.randn(case.heads.kv, case.heads.dim, device=device) * 2)
    case.scales = [torch.full((case.heads.kv,), 0.5, device=device), None]
    case.check(2)


@pytest.mark.parametrize("size", [1e-12, 3e7])
def test_queries_of_any_size(device: torch.device, size: float) -> None:
    """BF16 ones are multiplied in float16 with keys in FP8, which holds no such numbers."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = Case(device, dtype, [40, 3], 4, cache=torch.float8_e4m3fn, norm=False, kv=1, dim=64)
    case.scales = [torch.full((1,), 1 / size, device=device), None]
    case.qkv[:, : case.heads.count * 64] *= size
    case.qkv[:, case.heads.count * 64 :] = 0.0
    case.check(2)


@pytest.mark.parametrize("dtype", slow_but([torch.float32], DTYPES))
@pytest.mark.parametrize(
    ("splits", "mask", "sizes"),
    first_quick(
        2,
        [
            (3, Mask(), {"norm": True}),
            (2, Mask(window=4), {"cache": torch.float8_e4m3fn, "norm": False}),
            (1, Mask(), {"count": 8, "kv": 1, "dim": 256}),
        ],
    ),
)
def test_shared_keys(device: torch.device, dtype: torch.dtype, splits: int, mask: Mask, sizes: dict[str, Any]) -> None:
    """Queries alone, after a layer that has written the keys of the pass: the outputs are those of that layer."""
    case = Case(device, dtype, [0, 90, 3], 18, **sizes)
    positions = (case.lengths[:, None] + torch.arange(case.n, device=device)).flatten()
    attend = partial(verify_attention, case.queries(case.lengths), splits=splits)
    whole = attend(case.inputs(positions, case.caches), mask)
    heads, before = replace(case.heads, shared=True), [cache.clone() for cache in case.caches]
    queries = case.qkv[:, : heads.count * heads.dim].contiguous()
    assert torch.equal(attend(AttentionInputs(queries, heads, positions, *case.caches), mask), whole)
    for cache, old in zip(case.caches, before, strict=True):
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
    case.qkv, case.heads = queries, heads
    case.caches = [cache.to(dtype).nan_to_num(0).to(cache.dtype) for cache in case.caches]
    case.new &= False
    case.check(splits, mask)


def test_keys_shared_by_a_tree(device: torch.device) -> None:
    first, n = 6, 9
    case = Case(device, torch.float32, [first + 90, first, first + 5], n)
    words, depths = (item[:, first:].contiguous() for item in tree(3, first + n, device))
    positions = (case.lengths[:, None] - first + depths).flatten()
    attend = partial(verify_attention, case.queries(case.lengths - first, ancestors=words, first_node=first), splits=2)
    whole = attend(case.inputs(positions, case.caches), Mask(window=12))
    case.qkv = case.qkv[:, : case.heads.count * case.heads.dim].contiguous()
    case.heads = replace(case.heads, shared=True)
    shared = attend(case.inputs(positions, case.caches), Mask(window=12))
    assert torch.equal(shared, whole)


@pytest.mark.parametrize(
    ("splits", "mask", "sizes", "is_shared"),
    first_quick(
        2,
        [
            (1, Mask(window=7), {"sinks": True}, False),
            (3, Mask(), {"count": 8, "kv": 1}, True),
            (2, Mask(), {}, False),
            (3, Mask(window=30), {"count": 12}, False),
        ],
    ),
)
def test_packed_rows(device: torch.device, splits: int, mask: Mask, sizes: dict[str, Any], is_shared: bool) -> None:
    """What the reference gives for all queries and packs, which only the kernel computes at once. No keys are written
    but those of the rows."""
    counts, most = [1, 18, 4, 17], 18
    case = Case(device, torch.float32, [90, 0, 37, 3], most, **sizes)
    packed = pack_rows(torch.tensor(counts, device=device), most, sum(counts))
    queries = replace(case.queries(case.lengths), packed=packed)
    positions = packed.pack((case.lengths[:, None] + torch.arange(most, device=device)).flatten())
    case.qkv = packed.pack(case.qkv)
    cleared = [cache.nan_to_num(0) for cache in case.caches]
    reference = wrap_packed_rows(DecodeAttentionRef(queries), queries)
    expected = reference(case.inputs(positions, cleared), mask)
    caches = [cache.clone() for cache in (cleared if is_shared else case.caches)]
    if is_shared:  # an earlier layer has written the keys
        case.qkv = case.qkv[:, : case.heads.count * case.heads.dim].contiguous()
        case.heads = replace(case.heads, shared=True)
    for tile in (None, Tile(16, 32, 4, 3, 128)):
        out = verify_attention(queries, case.inputs(positions, caches), mask, splits=splits, tile=tile)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    for found, wanted, old in zip(caches, cleared, cleared if is_shared else case.caches, strict=True):
        for row, length, count in zip(case.rows.tolist(), case.lengths.tolist(), counts, strict=True):
            index = torch.arange(length, length + most, device=device)
            place = case.table[row, index // case.page_size], index % case.page_size
            torch.testing.assert_close(found[place][:count], wanted[place][:count])
            torch.testing.assert_close(found[place][count:], old[place][count:], rtol=0, atol=0, equal_nan=True)


def test_padding_rows(device: torch.device) -> None:
    case = Case(device, torch.float32, [0, 21, 0, 0], 3, rows=[0, 2, 0, 0])
    case.check(2)


def test_splits_by_size_are_deterministic(device: torch.device) -> None:
    case = Case(device, torch.float16, [100, 5], 2)
    assert torch.equal(case.check(), case.check())


def test_tiles_of_query_rows(device: torch.device) -> None:
    Case(device, torch.float32, [50], 64, count=8, kv=1).check(2)


@pytest.mark.parametrize(
    ("tile", "splits"),
    first_quick(1, [(Tile(32, 32, 4, 3, 168), 4), (Tile(16, 64, 4, 3, 128), 1), (Tile(64, 32, 4, 3, 168), 1)]),
)
def test_tiles(device: torch.device, tile: Tile, splits: int) -> None:
    case = Case(device, DTYPES[-1], [0, 1, 65, 100], 6, count=8, kv=2, dim=32, page_size=16)
    case.check(splits, tile=tile)
    case.check(splits, Mask(window=70), tile=tile)


@pytest.mark.parametrize("keys", slow_but([32], [15, 16, 31, 32, 33, 64, 96, 97]))
def test_edges_of_steps_and_splits(device: torch.device, keys: int) -> None:
    case = Case(device, torch.float32, [keys], 2)
    for splits in (1, 3, 7, 19):  # the last of them has old keys or none, and others may be empty
        case.check(splits)


def test_gemms_let_the_next_kernel_start_after_their_own_wait() -> None:
    """Verify attention may read before its wait only because of this: all but the kernel in front has ended by then."""
    paths = [path for path in Path(gemm.__path__[0]).rglob("*_triton.py") if path.name != "fp8_quantize_triton.py"]
    sources = [path.read_text() for path in paths]
    assert any("wait_for_previous_kernel(PDL)" in source for source in sources)
    assert not any("launch_dependents" in source or "let_next_kernel_start" in source for source in sources)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_reads_lengths_from_device(device: torch.device) -> None:
    case = Case(device, torch.bfloat16, [300, 40, 0], 3, dim=64, page_size=16)
    arguments = case.queries(case.lengths), case.inputs(case.lengths, case.caches), Mask()
    verify_attention(*arguments, splits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verify_attention(*arguments, splits=4)
    for lengths in ([300, 40, 0], [7, 40, 1], [290, 0, 0]):  # never longer than the keys that are there
        case.lengths.copy_(torch.tensor(lengths))
        wanted = verify_attention(*arguments, splits=4)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reads_before_the_preceding_kernel_ends(device: torch.device) -> None:
    """Steps of a decode in one graph: lengths grow, and each verify reads the keys that the step before wrote."""
    case = Case(device, torch.bfloat16, [300, 33, 0], 1, dim=64, page_size=16)
    steps = 8
    case.table = torch.arange(1, 3 * 24 + 1, device=device).view(3, 24)
    case.table = torch.cat([case.table[:1] * 0, case.table])
    caches = [torch.randn(3 * 24 + 1, 16, 2, 64, device=device).bfloat16() for _ in range(2)]
    raw = torch.randn(steps, 3, case.qkv.shape[1], device=device).bfloat16()
    weight = torch.ones(case.qkv.shape[1], device=device).bfloat16()

    def decode(caches: list[torch.Tensor], early: bool) -> list[torch.Tensor]:
        lengths, outs = case.lengths.clone(), []
        for x in raw:
            inputs = AttentionInputs(elementwise_triton.rms_norm(x, weight, 1e-6), case.heads, lengths, *caches)
            if not early:
                torch.cuda.synchronize()
            outs.append(verify_attention(case.queries(lengths), inputs, Mask(), splits=4))
            lengths += 1
        return outs

    wanted = decode([cache.clone() for cache in caches], early=False)
    torch.cuda.synchronize()
    mine = [cache.clone() for cache in caches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = decode(mine, early=True)
    for _ in range(20):
        for cache, fresh in zip(mine, caches, strict=True):
            cache.copy_(fresh)
        graph.replay()
        for out, wish in zip(outs, wanted, strict=True):
            assert torch.equal(out, wish)
