"""Masks and paged attention against loops in float64."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from crossed import crossed
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.kernels.attention.deterministic.span_attention import span_attention, span_prefill_attention
from specbatch.kernels.attention.paged_attention import (
    attention_bias,
    attention_mask,
    paged_attention_ref,
    prefill_attention_ref,
    write_kv_ref,
)
from specbatch.kernels.attention.ragged_batch import RaggedBatch

GARBAGE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 1e4}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


# -- visible --------------------------------------------------------------------------------------------------


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def ancestors_of(parents: list[int]) -> list[set[int]]:
    """Ancestors of each node, itself included; parents[0] is ignored, every other one precedes its child."""
    result: list[set[int]] = [{0}]
    for node, parent in enumerate(parents[1:], 1):
        result.append({node} | result[parent])
    return result


def words(sets: list[set[int]]) -> list[int]:
    return [signed(sum(1 << node for node in nodes)) for nodes in sets]


def naive(length: int, keys: int, sets: list[set[int]]) -> list[list[bool]]:
    return [[key < length or key - length in nodes for key in range(keys)] for nodes in sets]


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_chain_mask_is_causal(rows: int) -> None:
    lengths = [0, 1, 7, 16]
    mask = attention_mask(torch.tensor(lengths), rows, 100)
    assert mask.shape == (4, rows, 100)
    for index, length in enumerate(lengths):
        assert mask[index].tolist() == [[key <= length + row for key in range(100)] for row in range(rows)]


@pytest.mark.parametrize("rows", [1, 5, 63, 64])
def test_chain_mask_equals_tree_mask_of_single_children(rows: int) -> None:
    lengths = torch.tensor([0, 3, 40])
    chain = torch.tensor(words(ancestors_of([node - 1 for node in range(rows)])))
    assert torch.equal(attention_mask(lengths, rows, 128, chain), attention_mask(lengths, rows, 128))


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    rows = draw(st.integers(1, 12) | st.sampled_from([63, 64]))
    return [draw(st.integers(0, max(node - 1, 0))) for node in range(rows)]


@settings(deadline=None, derandomize=True)
@given(parents=trees(), length=st.integers(0, 70), spare=st.integers(0, 80))
def test_tree_mask_allows_ancestors_only(parents: list[int], length: int, spare: int) -> None:
    rows, keys = len(parents), length + len(parents) + spare
    sets = ancestors_of(parents)
    mask = attention_mask(torch.tensor([length]), rows, keys, torch.tensor(words(sets)))
    assert mask[0].tolist() == naive(length, keys, sets)


def test_tree_masks_differ_per_sequence() -> None:
    randomness = random.Random(0)
    sets = [ancestors_of([randomness.randrange(max(node, 1)) for node in range(64)]) for _ in range(5)]
    lengths = [0, 1, 30, 63, 64]
    mask = attention_mask(torch.tensor(lengths), 64, 140, torch.tensor([words(item) for item in sets]))
    for index, length in enumerate(lengths):
        assert mask[index].tolist() == naive(length, 140, sets[index])


def test_tree_mask_of_64_nodes() -> None:
    alone = [{node} for node in range(64)]
    mask = attention_mask(torch.tensor([2]), 64, 80, torch.tensor(words(alone)))[0]
    assert mask[63].nonzero().flatten().tolist() == [0, 1, 65]
    assert mask[:, 65].nonzero().flatten().tolist() == [63]
    assert mask[:, 2].nonzero().flatten().tolist() == [0]
    assert not mask[:, 66:].any()


# -- the cache ------------------------------------------------------------------------------------------------


class Paged:
    """Keys and values of sequences in scattered pages; unowned slots hold huge values."""

    def __init__(self, lengths: list[int], page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(page_size * 1000 + kv_heads)
        width = -(-max(lengths) // page_size) + 1
        pages = len(lengths) * width + 3
        shape = (pages + 1, page_size, kv_heads, dim)
        self.k_cache = torch.full(shape, GARBAGE[dtype], dtype=dtype)
        self.v_cache = torch.full(shape, -GARBAGE[dtype], dtype=dtype)
        self.table = (torch.randperm(pages, generator=generator) + 1)[: len(lengths) * width].view(-1, width)
        self.k = [torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lengths]
        self.v = [torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lengths]
        for row, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for position in range(len(k)):
                page = self.table[row, position // page_size]
                self.k_cache[page, position % page_size] = k[position]
                self.v_cache[page, position % page_size] = v[position]

    def attend(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = attention_bias(mask, q.shape[2] // self.k_cache.shape[2], q.dtype)
        return paged_attention_ref(q, self.k_cache, self.v_cache, self.table, bias)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """One query [heads, dim] over all of k, v [n, kv_heads, dim], one head at a time."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // group].double() @ q[head].double() / math.sqrt(q.shape[1])
        total = scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp())
        out.append(scores.exp() / total @ v[:, head // group].double())
    return torch.stack(out)


SHAPES = list(itertools.product([1, 3, 16], [1, 3, 4]))


@pytest.mark.parametrize(("page_size", "group", "rows", "dtype"), crossed(SHAPES, [1, 5], DTYPES))
def test_paged_attention_of_a_chain(page_size: int, group: int, rows: int, dtype: torch.dtype) -> None:
    kv_heads, dim = 2, 12
    before = [0, 1, 15, 16, 17, 33]
    cache = Paged([n + rows for n in before], page_size, kv_heads, dim, dtype)
    q = torch.randn(6, rows, kv_heads * group, dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    mask = attention_mask(torch.tensor(before), rows, cache.table.shape[1] * page_size)
    out = cache.attend(q, mask)
    assert out.shape == q.shape
    assert out.dtype == dtype
    for b, r in itertools.product(range(6), range(rows)):
        end = before[b] + r + 1
        expected = attend(q[b, r], cache.k[b][:end], cache.v[b][:end])
        torch.testing.assert_close(out[b, r].double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("page_size", "group"), [(1, 1), (3, 4), (16, 3)])
def test_paged_attention_of_a_tree(page_size: int, group: int) -> None:
    rows, before = 64, [0, 5, 32]
    randomness = random.Random(page_size)
    sets = ancestors_of([randomness.randrange(max(node, 1)) for node in range(rows)])
    cache = Paged([n + rows for n in before], page_size, 2, 8, torch.float32)
    q = torch.randn(3, rows, 2 * group, 8, generator=torch.Generator().manual_seed(2))
    mask = attention_mask(torch.tensor(before), rows, cache.table.shape[1] * page_size, torch.tensor(words(sets)))
    out = cache.attend(q, mask)
    for b, r in itertools.product(range(3), range(rows)):
        seen = [*range(before[b]), *(before[b] + node for node in sorted(sets[r]))]
        expected = attend(q[b, r], cache.k[b][seen], cache.v[b][seen])
        torch.testing.assert_close(out[b, r].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_sinks_are_in_the_denominator_only(window: int) -> None:
    """A verify and a prompt, and both in deterministic mode."""
    lengths, rows, heads, seen = [9, 1], 3, 6, window or 99
    generator = torch.Generator().manual_seed(5)
    cache = Paged([n + rows for n in lengths], 4, 2, 8, torch.float32)
    q, sinks = torch.randn(2, rows, heads, 8, generator=generator), 2 * torch.randn(heads, generator=generator)
    keys = torch.arange(cache.table.shape[1] * 4)
    slots = cache.table.repeat_interleave(4, 1) * 4 + keys % 4
    end = torch.tensor(lengths)[:, None] + torch.arange(rows) + 1
    mask = attention_mask(torch.tensor(lengths), rows, len(keys), window=window or None)
    bias, caches = attention_bias(mask, 3, q.dtype), (cache.k_cache, cache.v_cache)
    spans = RaggedBatch(lengths, [n + rows for n in lengths], [0, 1], cache.table, 4)
    found = [
        paged_attention_ref(q, *caches, cache.table, bias, sinks),
        span_attention(q, *caches, slots, (end - seen).clamp(min=0), end, sinks),
        torch.stack(
            [prefill_attention_ref(q[b], *caches, cache.table[b], lengths[b], window, sinks) for b in range(2)]
        ),
        span_prefill_attention(q.flatten(0, 1), *caches, spans, window, sinks).unflatten(0, (2, rows)),
    ]
    for b, r in itertools.product(range(2), range(rows)):
        last = int(end[b, r])
        k, v = (item[b][max(last - seen, 0) : last] for item in (cache.k, cache.v))
        expected = attend(q[b, r], k, v, sinks)
        for out in found:
            torch.testing.assert_close(out[b, r].double(), expected, rtol=0, atol=2e-6)


def test_paged_attention_accepts_strided_queries() -> None:
    cache = Paged([9, 7], 4, 2, 8, torch.float32)
    buffer = torch.randn(2, 3, 10, 8, generator=torch.Generator().manual_seed(0))
    mask = attention_mask(torch.tensor([6, 4]), 3, cache.table.shape[1] * 4)
    sliced = cache.attend(buffer[:, :, :6], mask)
    whole = cache.attend(buffer[:, :, :6].contiguous(), mask)
    torch.testing.assert_close(sliced, whole)


@pytest.mark.parametrize(
    ("page_size", "group", "start", "rows", "dtype"),
    crossed(SHAPES, [(0, 1), (0, 17), (1, 1), (7, 10), (16, 5), (30, 3)], DTYPES),
)
def test_prefill_attention(page_size: int, group: int, start: int, rows: int, dtype: torch.dtype) -> None:
    kv_heads, dim, end = 2, 12, start + rows
    cache = Paged([end], page_size, kv_heads, dim, dtype)
    q = torch.randn(rows, kv_heads * group, dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    for spare in (0, 1):  # a page more than the chunk reaches must not matter
        pages = cache.table[0, : -(-end // page_size) + spare]
        out = prefill_attention_ref(q, cache.k_cache, cache.v_cache, pages, start)
        assert out.shape == q.shape
        assert out.dtype == dtype
        for row in range(rows):
            seen = start + row + 1
            expected = attend(q[row], cache.k[0][:seen], cache.v[0][:seen])
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_only(page_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    k_cache, v_cache = (torch.randn(20, page_size, 2, 4, generator=generator).to(dtype) for _ in range(2))
    k_before, v_before = k_cache.clone(), v_cache.clone()
    qkv = torch.randn(7, 8, 4, generator=generator).to(dtype)
    k, v = qkv[:, 4:6], qkv[:, 6:]  # slices, as a fused projection gives them
    slots = torch.randperm(19 * page_size, generator=generator)[:7] + page_size
    write_kv_ref(k, v, k_cache, v_cache, slots)
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        assert torch.equal(k_cache[page, offset], k[token])
        assert torch.equal(v_cache[page, offset], v[token])
        k_before[page, offset], v_before[page, offset] = k[token], v[token]
    assert torch.equal(k_cache, k_before)
    assert torch.equal(v_cache, v_before)


def test_padding_rows_write_to_page_0() -> None:
    k_cache, v_cache = torch.zeros(4, 2, 1, 3), torch.zeros(4, 2, 1, 3)
    k = torch.arange(15.0).view(5, 1, 3) + 1
    write_kv_ref(k, -k, k_cache, v_cache, torch.tensor([0, 5, 0, 0, 2]))
    assert torch.equal(k_cache[2, 1], k[1])
    assert torch.equal(v_cache[1, 0], -k[4])
    assert (k_cache.flatten(1).sum(1) > 0).tolist() == [True, True, True, False]
