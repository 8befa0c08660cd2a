"""Deterministic attention in Triton matches the reference, and its bits depend on a query's own keys alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from company import Company, differing
from crossed import first_quick
from trees import ancestor_masks, path_of, random_parents

from specbatch.kernels.attention.deterministic import span_attention, span_attention_triton
from specbatch.kernels.attention.deterministic.span_attention_triton import KEYS, SpanPass
from specbatch.kernels.attention.paged_attention import prefill_attention_ref
from specbatch.kernels.attention.prefill import prefill_backends
from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, Mask, PrefillInputs, QKVLayout
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef
from specbatch.kernels.elementwise.rope import rope_table

PAGE, LENGTH, LONGER = 16, 416, 600
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """A cache of two sequences on scattered pages, and queries [length, heads, dim] of the second one."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, heads: int = 4, kv: int = 2, dim: int = 16,
        window: int | None = None, sinks: bool = False, length: int = LENGTH, keys: int = KEYS,
    ) -> None:  # fmt: skip
        self.window, self.keys = window, keys
        self.scales: list[torch.Tensor | None] = [None, None]
        generator = torch.Generator().manual_seed(0)
        pages = 2 * -(-length // PAGE)
        self.table = (torch.randperm(pages, generator=generator) + 1).view(2, -1).to(device)
        self.k, self.v = torch.randn(2, pages + 1, PAGE, kv, dim, generator=generator).to(device, dtype)
        self.sinks = 3 * torch.randn(heads, generator=generator).to(device) if sinks else None
        self.q = torch.randn(length, heads, dim, generator=generator).to(device, dtype if dtype.itemsize > 1 else BF16)

    def prompt(self, start: int, end: int) -> torch.Tensor:
        spans = RaggedBatch([start], [end], [1], self.table, PAGE)
        q, window = self.q[start:end], self.window or 0
        inputs = PrefillInputs(q, None, None, self.k, self.v, spans, window, None, self.sinks, *self.scales)
        return span_attention_triton.prefill_attention(inputs, self.keys)

    def verify(self, start: int, rows: int, splits: int, tile: int | None = None) -> torch.Tensor:
        """The rows at `start` beside others of the first sequence."""
        device = self.q.device
        lengths, slots = torch.tensor([start // 2, start], device=device), torch.tensor([0, 1], device=device)
        q = torch.cat([self.q[:rows], self.q[start : start + rows]])
        span_pass = SpanPass.decode(DecodeQueries(self.table, slots, lengths, rows, PAGE), None)
        how = {"window": self.window, "splits": splits, "rows": tile, "keys": self.keys, "sinks": self.sinks}
        return span_attention_triton.attend_to_spans(q, self.k, self.v, span_pass, *self.scales, **how)[rows:]


@pytest.mark.parametrize(
    ("heads", "kv", "window", "sinks"),
    first_quick(2, [(4, 2, None, False), (2, 1, 5, True), (4, 2, 200, False), (4, 2, None, True)]),
)
def test_prompts_and_verifies_match_the_reference(
    dtype: torch.dtype, device: torch.device, assert_same: Callable[..., None], heads: int, kv: int,
    window: int | None, sinks: bool,
) -> None:  # fmt: skip
    case = Case(dtype, device, heads, kv, window=window, sinks=sinks)
    every = case.prompt(0, LENGTH)
    expected = prefill_attention_ref(case.q, case.k, case.v, case.table[1], 0, window or 0, case.sinks)
    torch.testing.assert_close(every, expected, rtol=0, atol=TOLERANCE[dtype])
    assert_same(case.prompt(250, 300), every[250:300])
    for start, rows, splits in ((1, 1, 1), (255, 3, 1), (385, 16, 3), (383, 1, 2)):
        assert_same(case.verify(start, rows, splits), every[start : start + rows])
    if window is not None:  # whatever is before it
        keys = torch.arange(385 - window + 1, device=device)
        for cache in (case.k, case.v):
            cache[case.table[1][keys // PAGE], keys % PAGE] = torch.nan
        for splits in (1, 2):
            assert_same(case.verify(385, 16, splits), every[385:401])


@pytest.mark.parametrize("stored", [torch.float32, FP8])
def test_scales_of_a_cache(device: torch.device, assert_same: Callable[..., None], stored: torch.dtype) -> None:
    case = Case(torch.float32, device, sinks=True, length=150)
    case.k, case.v = case.k.to(stored), case.v.to(stored)
    case.scales = [torch.rand(2, device=device) + 0.5 for _ in range(2)]
    every = case.prompt(0, 150)
    expected = prefill_attention_ref(case.q, case.k, case.v, case.table[1], 0, 0, case.sinks, *case.scales)
    torch.testing.assert_close(every, expected, rtol=0, atol=2e-5)
    assert_same(case.verify(140, 3, 2), every[140:143])
    slots = (case.table[1][:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[None]
    end = torch.arange(141, 144, device=device)[None]
    inputs = case.q[None, 140:143], case.k, case.v, slots, torch.zeros_like(end), end, case.sinks, None
    on_cpu = span_attention.span_attention(*inputs, *case.scales)[0]
    torch.testing.assert_close(on_cpu, expected[140:143], rtol=0, atol=2e-5)


def test_a_decode_pass_matches_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """Rotation and the write to the cache; keys for which there is no page are stored on page 0, which is padding."""
    case, rows = Case(dtype, device), 3
    layout = QKVLayout(4, 2, 16, None, None, 1e-6, *(x.to(device, dtype) for x in rope_table(torch.ones(8), 700, 1.0)))
    lengths = torch.tensor([5, LENGTH - 9], device=device)
    queries = DecodeQueries(case.table, torch.tensor([1, 0], device=device), lengths, rows, PAGE)
    positions = (lengths[:, None] + torch.arange(rows, device=device)).flatten()
    qkv = torch.randn(6, 8 * 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    caches = [(case.k.clone(), case.v.clone()) for _ in range(2)]
    attend = span_attention_triton.decode_attention(queries)
    inputs = AttentionInputs(qkv, layout, positions, *caches[0])
    out = attend(inputs, Mask())
    expected = DecodeAttentionRef(queries)(AttentionInputs(qkv, layout, positions, *caches[1]), Mask())
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
    for cache, other in zip(*caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=TOLERANCE[dtype])
    lengths[1] = PAGE * case.table.shape[1] - 1
    before = caches[0][0].clone()
    span_attention_triton.decode_attention(queries)(inputs, Mask())
    changed = (caches[0][0] != before).flatten(2).any(2).nonzero().tolist()
    assert changed == [[0, 0], [int(case.table[0, -1]), PAGE - 1]]


@pytest.mark.parametrize(("left", "window"), first_quick(1, [(5, None), (9, 3), (9, None), (9, 200)]))
def test_nodes_of_a_tree_are_computed_as_chains(
    dtype: torch.dtype, device: torch.device, assert_same: Callable[..., None], left: int, window: int | None
) -> None:
    """In one pass and in two. The second sequence has pages for `left` of the 9 nodes."""
    case, count = Case(dtype, device, 2, 1), 9
    start = PAGE * case.table.shape[1] - left
    layout = QKVLayout(2, 1, 16, None, None, 1e-6, *(x.to(device, dtype) for x in rope_table(torch.ones(8), 700, 1.0)))
    lengths, slots = torch.tensor([250, start], device=device), torch.tensor([0, 1], device=device)
    parents = [random_parents(Random(seed), count, True) for seed in (0, 1)]
    paths = [[path_of(tree, node) for node in range(count)] for tree in parents]
    words = torch.tensor([ancestor_masks(tree) for tree in parents], device=device)
    depths = torch.tensor([[len(path) - 1 for path in of] for of in paths], device=device)
    qkv = torch.randn(2, count, 4 * 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def run(kernel: bool, keys: torch.Tensor, values: torch.Tensor, first: int, end: int) -> torch.Tensor:
        queries = DecodeQueries(
            case.table, slots, lengths, end - first, PAGE, None, words[:, first:end].contiguous(), first
        )
        attend = span_attention_triton.decode_attention(queries) if kernel else DecodeAttentionRef(queries)
        rows, positions = qkv[:, first:end].flatten(0, 1), (lengths[:, None] + depths[:, first:end]).flatten()
        inputs = AttentionInputs(rows, layout, positions, keys, values)
        return attend(inputs, Mask(window=window)).unflatten(0, (2, -1))

    k, v = case.k.clone(), case.v.clone()
    whole = run(True, k, v, 0, count)
    real = torch.tensor([[True] * count, [max(path) < left for path in paths[1]]])
    if left == count:
        expected = run(False, case.k.clone(), case.v.clone(), 0, count)
        torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE[dtype])
    k, v = case.k.clone(), case.v.clone()
    assert_same(torch.cat([run(True, k, v, 0, 4), run(True, k, v, 4, count)], 1)[real], whole[real])
    for sequence, of in enumerate(paths):
        stored = [path for node, path in enumerate(of) if real[sequence, node]]
        for path in (path for path in stored if not any(path == other[:-1] for other in stored)):
            queries = DecodeQueries(case.table, slots[[sequence]], lengths[[sequence]], len(path), PAGE)
            positions = lengths[sequence] + torch.arange(len(path), device=device)
            inputs = AttentionInputs(qkv[sequence, path], layout, positions, case.k.clone(), case.v.clone())
            chain = span_attention_triton.decode_attention(queries)(inputs, Mask(window=window))
            assert_same(chain, whole[sequence, path])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/lossless/test_deterministic_gpu.py runs them on a device")
@pytest.mark.parametrize("name", ["llama", "mistral", "ministral", "gemma3", "gemma4", "gpt-oss"])
def test_logits_do_not_depend_on_company(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With tiles of one size, of which numpy adds all alike; the rest of a model runs the references."""

    def prefill(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: RaggedBatch, window: int, sinks: torch.Tensor | None,
        scale: float | None, *scales: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        assert scale is None
        inputs = PrefillInputs(q, None, None, k, v, spans, window, None, sinks, *scales)
        return span_attention_triton.prefill_attention(inputs)

    monkeypatch.setattr(span_attention_triton, "SPAN", 32)
    monkeypatch.setattr(span_attention, "SpanDecodeAttention", span_attention_triton.decode_attention)
    monkeypatch.setattr(prefill_backends, "span_prefill_attention", prefill)
    assert differing(Company(name, torch.float32), [70, 20], Random(0), 1) == 0


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "keys", "dtype", "window"),
    [
        (32, 8, 128, 32, torch.bfloat16, None),
        (32, 8, 128, 64, torch.bfloat16, None),
        (32, 8, 128, 32, torch.float16, None),
        (4, 2, 16, 32, torch.bfloat16, None),
        (14, 2, 64, 32, torch.bfloat16, None),
        (24, 24, 80, 32, torch.float16, None),
        (32, 8, 128, 32, FP8, None),  # caches; queries have BF16
        (16, 2, 256, 32, FP8, None),
        (32, 8, 128, 32, torch.bfloat16, 100),
        (8, 4, 256, 32, torch.bfloat16, 300),
        (32, 8, 128, 32, FP8, 7),
        (64, 8, 64, 32, torch.bfloat16, 128),
        (32, 8, 128, 32, torch.float32, None),
        (8, 4, 256, 32, torch.float32, 300),
    ],
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_bits_depend_on_own_keys_alone(
    heads: int, kv: int, dim: int, keys: int, dtype: torch.dtype, window: int | None
) -> None:
    case = Case(dtype, torch.device("cuda"), heads, kv, dim, window, window is not None, LONGER, keys)
    every = case.prompt(0, LONGER)
    most = {FP8: 16, torch.float32: 32}.get(dtype, 64)
    for start, end in ((0, 1), (0, 257), (1, 300), (256, 600), (599, 600), (300, 420)):
        assert torch.equal(case.prompt(start, end), every[start:end]), f"chunk {start}..{end}"
    for start in (0, 3, 63, 64, 255, 256, 500, 560):
        for rows in (1, 2, 7, 16):
            for splits, tile in ((1, None), (2, None), (3, None), (1, most), (2, 16)):
                found = case.verify(start, rows, splits, tile=tile)
                assert torch.equal(found, every[start : start + rows]), f"{rows} rows at {start}: {splits}, {tile}"
