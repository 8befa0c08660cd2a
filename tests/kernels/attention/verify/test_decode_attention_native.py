"""Compiled attention of decode and verify passes matches the reference, in its output and in what it stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed

from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, Mask, QKVLayout
from specbatch.kernels.attention.verify.decode_attention_native import NativeDecodeAttention
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef, decode_attention
from specbatch.kernels.common import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
LONGEST, POSITIONS = 70, 200


def refused(inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
    raise AssertionError("it does not take the layer")


def words(batch: int, rows: int, first: int) -> torch.Tensor:
    """Ancestors of random trees."""
    found = torch.zeros(batch, rows, dtype=torch.int64)
    for row in range(rows):
        node = first + row
        for sequence in range(batch):
            parent = int(torch.randint(0, max(node, 1), ()))
            above = int(found[sequence, parent - first]) if parent >= first else 1
            found[sequence, row] = (above if node else 0) | 1 << node
    return found


def compare(
    batch: int, rows: int, kv: int, group: int, dim: int, *, page: int = 16, window: int | None = None,
    causal: bool = True, norms: bool = False, sinks: bool = False, shared: bool = False, tree: bool = False,
    first: int = 0,
) -> None:  # fmt: skip
    torch.manual_seed(batch + rows + kv + group + dim)
    pages = -(-(LONGEST + rows + first) // page)
    table = torch.randperm(batch * pages).view(batch, pages) + 1
    ancestors = words(batch, rows, first) if tree else None
    lengths = torch.randint(0, LONGEST, (batch,))
    queries = DecodeQueries(table, torch.arange(batch), lengths, rows, page, ancestors=ancestors, first_node=first)
    weights = (torch.randn(dim), torch.randn(dim)) if norms else (None, None)
    tables = torch.randn(2, POSITIONS, dim).unbind()
    added = torch.randn(kv * group) if sinks else None
    heads = QKVLayout(kv * group, kv, dim, *weights, 1e-5, *tables, window, sinks=added, shared=shared)
    qkv = torch.randn(batch * rows, (kv * group + 2 * heads.own_kv) * dim)
    positions, caches = torch.randint(0, POSITIONS, (len(qkv),)), torch.randn(2, batch * pages + 1, page, kv, dim)
    copies = caches.clone()
    mask = Mask(causal, window)
    expected = DecodeAttentionRef(queries)(AttentionInputs(qkv, heads, positions, *caches), mask)
    found = NativeDecodeAttention(queries, refused)(AttentionInputs(qkv, heads, positions, *copies), mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copies, caches, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "dim"), crossed([1, 3, 4, 5, 8], [64, 96]))
def test_heads_and_rows(group: int, dim: int) -> None:
    for batch, rows, kv in ((1, 1, 3), (3, 4, 1), (2, 1, 2)):
        compare(batch, rows, kv, group, dim)


@pytest.mark.parametrize(
    "case",
    [
        {"page": 5},
        {"window": 7},
        {"window": 1},
        {"window": 40},
        {"causal": False},
        {"causal": False, "window": 4},
        {"norms": True},
        {"sinks": True, "window": 7},
        {"shared": True},
        {"tree": True},
        {"tree": True, "window": 3},
        {"tree": True, "first": 3},
    ],
    ids=str,
)
def test_masks_and_layouts(case: dict[str, Any]) -> None:
    compare(2, 6, 2, 2, 64, **case)
    compare(3, 1, 2, 2, 64, **case)


def test_other_layers_go_to_the_reference() -> None:
    """Heads that are no multiple of 32, activations of 16 bits, and keys with an offset."""
    queries = DecodeQueries(torch.ones(1, 1, dtype=torch.int64), torch.tensor([0]), torch.tensor([3]), 1, 16)
    for dim, dtype, offset in ((48, torch.float32, None), (64, torch.bfloat16, None), (64, torch.float32, 3.0)):
        tables = torch.randn(2, 9, dim).to(dtype).unbind()
        added = None if offset is None else torch.full((1, dim), offset)
        heads = QKVLayout(2, 1, dim, None, None, 1e-5, *tables, k_offset=added)
        qkv, positions = torch.randn(1, 4 * dim).to(dtype), torch.tensor([3])
        caches = torch.randn(2, 2, 16, 1, dim).to(dtype)
        inputs = AttentionInputs(qkv, heads, positions, *caches.clone())
        found = decode_attention(queries, [Mask()])(inputs, Mask())
        expected = DecodeAttentionRef(queries)(AttentionInputs(qkv, heads, positions, *caches), Mask())
        assert torch.equal(found, expected)
