"""Attention of prefill and verify passes over a paged cache equals attention over plain tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from crossed import crossed
from targets import SIZES

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata, PromptChunk
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.kernels.attention.queries import QKVLayout
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig

LAYERS = 2
DIM = 8


class Bench:
    """Sequences with their keys and values per layer, and a paged cache that is full of large stale numbers."""

    def __init__(self, sequences: int, width: int, page_size: int, kv_heads: int, group: int) -> None:
        self.heads, self.kv_heads, self.page_size = kv_heads * group, kv_heads, page_size
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": kv_heads, "head_dim": DIM}
        config = ModelConfig.from_dict(SIZES | sizes | {"architectures": ["LlamaForCausalLM"]})
        self.generator = torch.Generator().manual_seed(page_size)
        per_row = -(-width // page_size)
        pages = per_row * (sequences + 1)
        cpu = torch.device("cpu")
        attention = prefill_backend("torch", cpu)
        self.cache = KVCache(config, LAYERS, pages, page_size, torch.float32, cpu, attention)
        for item in (*self.cache.k, *self.cache.v):
            item.fill_(1e20)
        # Row 0 is for padding: its pages are page 0.
        own = (torch.randperm(pages, generator=self.generator) + 1)[: sequences * per_row].view(sequences, per_row)
        self.table = torch.cat([torch.zeros(1, per_row, dtype=torch.int64), own])
        empty = torch.zeros(0, kv_heads, DIM)
        self.k = [[empty] * LAYERS for _ in range(sequences + 1)]
        self.v = [[empty] * LAYERS for _ in range(sequences + 1)]

    def numbers(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, generator=self.generator)

    def run(self, metadata: PrefillMetadata | DecodeMetadata, parts: list[tuple[int, int, int]]) -> None:
        """Attend in every layer and compare; parts (row, start, count) follow each other among the tokens."""
        total = sum(count for _, _, count in parts)
        if isinstance(metadata, PrefillMetadata):
            places = [at for _, start, count in parts for at in range(start, start + count)]
            assert metadata.positions.tolist() == places
        for layer in range(LAYERS):
            q, k, v = (self.numbers(total, heads) for heads in (self.heads, self.kv_heads, self.kv_heads))
            out = self.through(metadata, layer, q, k, v)
            assert out.shape == (total, self.heads * DIM)
            at = 0
            for row, start, count in parts:
                own = slice(at, at + count)
                self.k[row][layer] = torch.cat([self.k[row][layer][:start], k[own]])
                self.v[row][layer] = torch.cat([self.v[row][layer][:start], v[own]])
                at += count
            at = 0
            for row, start, count in parts:
                for index in range(count):
                    expected = self.attend(row, layer, start + index + 1, q[at])
                    torch.testing.assert_close(out[at].double(), expected, rtol=0, atol=2e-6)
                    at += 1

    def through(
        self, metadata: PrefillMetadata | DecodeMetadata, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer, with an identity rotation."""
        identity = torch.ones(600, DIM), torch.zeros(600, DIM)
        heads = QKVLayout(self.heads, self.kv_heads, DIM, None, None, 1e-5, *identity)
        qkv = torch.cat([q, k, v], 1).flatten(1)
        return metadata.bind(self.cache).attend(layer, qkv, heads, torch.zeros(len(qkv), dtype=torch.int64))

    def attend(self, row: int, layer: int, seen: int, q: torch.Tensor) -> torch.Tensor:
        k, v = self.k[row][layer][:seen].double(), self.v[row][layer][:seen].double()
        assert len(k) == seen
        group = self.heads // self.kv_heads
        scores = torch.stack([k[:, head // group] @ q[head].double() for head in range(self.heads)]) / math.sqrt(DIM)
        return torch.stack([scores[head].softmax(0) @ v[:, head // group] for head in range(self.heads)]).flatten()

    def prefill(self, spans: list[PromptChunk]) -> PrefillMetadata:
        metadata = PrefillMetadata(self.table, spans, self.page_size)
        self.run(metadata, [(span.slot, span.start, span.end - span.start) for span in spans])
        return metadata

    def verify(self, rows: list[int], lengths: list[int], count: int, spare_pages: int = 0) -> None:
        bound = max(lengths) + count + spare_pages * self.page_size
        metadata = DecodeMetadata(self.table, torch.tensor(rows), torch.tensor(lengths), count, self.page_size, bound)
        self.run(metadata, [(row, length, count) for row, length in zip(rows, lengths, strict=True)])


@pytest.mark.parametrize(("page_size", "kv_heads", "group"), crossed([1, 3, 16], [(2, 1), (1, 3), (2, 4)]))
def test_chunked_prefill_then_verifies(page_size: int, kv_heads: int, group: int) -> None:
    """Prompts in chunks of changing sizes, then verifies of changing width that accept some of their rows."""
    bench = Bench(4, 64, page_size, kv_heads, group)
    randomness = random.Random(page_size)
    prompts, done = {1: 17, 2: 1, 3: 16, 4: 9}, dict.fromkeys(range(1, 5), 0)
    while open_rows := [row for row in (3, 1, 4, 2) if done[row] < prompts[row]]:
        spans = [
            PromptChunk(row, done[row], min(prompts[row], done[row] + randomness.randint(1, 7))) for row in open_rows
        ]
        metadata = bench.prefill(spans)
        counts = torch.tensor([span.end - span.start for span in spans])
        assert metadata.last.tolist() == (counts.cumsum(0) - 1).tolist()
        assert metadata.slots.tolist() == torch.tensor([span.slot for span in spans]).repeat_interleave(counts).tolist()
        done = done | {span.slot: span.end for span in spans}
    for count in (1, 4, 2, 5, 1, 4):
        rows = randomness.sample(range(1, 5), randomness.randint(1, 4))
        bench.verify(rows, [done[row] for row in rows], count, spare_pages=randomness.randint(0, 1))
        for row in rows:  # rows that were not accepted are stale
            done[row] += randomness.randint(1, count)


def test_scales_change_what_is_stored_and_no_result() -> None:
    bench = Bench(2, 40, 4, 2, 3)
    k, v = torch.rand(2, LAYERS, 2, generator=bench.generator) + 0.5
    bench.cache.set_scales(k, v)
    bench.prefill([PromptChunk(1, 0, 11), PromptChunk(2, 0, 3)])
    for layer in range(LAYERS):
        stored = bench.cache.v[layer].flatten(0, 1)[bench.table[1, 0] * 4]
        torch.testing.assert_close(stored * v[layer, :, None], bench.v[1][layer][0])
    bench.prefill([PromptChunk(2, 3, 9)])
    bench.verify([2, 1], [9, 11], 3)
    with pytest.raises(AssertionError, match="float32"):
        bench.cache.set_scales(k[:1], v)


def test_sequence_reads_pages_that_another_writes_in_the_same_pass() -> None:
    bench = Bench(2, 16, 4, 2, 2)
    bench.table[2, :2] = bench.table[1, :2]
    for reader_first in (False, True):
        spans = [PromptChunk(1, 0, 11), PromptChunk(2, 8, 13)]
        metadata = PrefillMetadata(bench.table, spans[::-1] if reader_first else spans, 4)
        q, k, v = bench.numbers(16, 4), bench.numbers(16, 2), bench.numbers(16, 2)
        out = bench.through(metadata, 0, q, k, v)
        owner, reader = (slice(5, 16), slice(0, 5)) if reader_first else (slice(0, 11), slice(11, 16))
        bench.k[2][0] = torch.cat([k[owner][:8], k[reader]])
        bench.v[2][0] = torch.cat([v[owner][:8], v[reader]])
        for index in range(5):
            expected = bench.attend(2, 0, 9 + index, q[reader][index])
            torch.testing.assert_close(out[reader][index].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stored", [False, True])
def test_rows_of_a_prefill_pass(stored: bool) -> None:
    """Chunks with and without a prefix; the keys of all tokens are stored, in the same places."""
    bench = Bench(3, 40, 4, 2, 3)
    bench.prefill([PromptChunk(1, 0, 11), PromptChunk(2, 0, 3)])
    metadata = PrefillMetadata(bench.table, [PromptChunk(1, 11, 20), PromptChunk(3, 0, 7), PromptChunk(2, 3, 4)], 4)
    heads = QKVLayout(bench.heads, 2, DIM, None, None, 1e-5, torch.ones(600, DIM), torch.zeros(600, DIM), window=5)
    qkv = bench.numbers(17, bench.heads + 4).flatten(1)
    wanted = metadata.bind(bench.cache).attend(0, qkv, heads, metadata.positions)
    caches = bench.cache.k[0], bench.cache.v[0]
    before = [item.clone() for item in caches]
    if not stored:
        for item in caches:
            item[bench.table[3]] = 1e20
    for rows in ([8, 15, 16], [15], []):
        of_rows = metadata.bind_rows(torch.tensor(rows, dtype=torch.int64), bench.cache)
        assert of_rows is not None
        found = of_rows.attend(0, qkv, heads, stored=stored)
        torch.testing.assert_close(found, wanted[rows], rtol=0, atol=2e-6)
        assert all(torch.equal(item, old) for item, old in zip(caches, before, strict=True))
    assert metadata.bind_rows(torch.tensor([8, 15, 16, 3]), bench.cache) is None


def test_padding_rows_write_to_page_0_only() -> None:
    bench = Bench(2, 16, 4, 2, 1)
    bench.prefill([PromptChunk(1, 0, 6), PromptChunk(2, 0, 3)])
    before = [item.clone() for item in (*bench.cache.k, *bench.cache.v)]
    lengths = torch.tensor([0, 6, 0])
    metadata = DecodeMetadata(bench.table, torch.tensor([0, 1, 0]), lengths, 3, 4, 12)
    for layer in range(LAYERS):
        bench.through(metadata, layer, bench.numbers(9, 2), bench.numbers(9, 2), bench.numbers(9, 2))
    mine = {(int(bench.table[1, at // 4]), at % 4) for at in (6, 7, 8)}
    for old, new in zip(before, (*bench.cache.k, *bench.cache.v), strict=True):
        changed = {(page, offset) for page, offset in (old != new).flatten(2).any(-1).nonzero().tolist() if page}
        assert changed == mine
