"""Random inputs of verify attention, which compare the Triton kernel with the reference."""

from __future__ import annotations

from typing import Any

import torch
from trees import ancestor_masks, path_of

from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, Mask, QKVLayout, SharedPrefixes
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixTile
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef
from specbatch.kernels.attention.verify.verify_attention_configs import Tile
from specbatch.kernels.attention.verify.verify_attention_triton import verify_attention
from specbatch.kernels.elementwise.rope import rope_table

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Case:
    """Random inputs of a verify; unused slots of the caches are poisoned."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, lengths: list[int], n: int, *, count: int = 4, kv: int = 2,
        dim: int = 16, page_size: int = 4, norm: bool = True, cache: torch.dtype | None = None, seed: int = 0,
        rows: list[int] | None = None, sinks: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        batch, self.n, self.dtype, self.page_size = len(lengths), n, dtype, page_size
        self.lengths = torch.tensor(lengths, device=device)
        self.rows = torch.tensor(rows or range(1, batch + 1), device=device)
        width = -(-(max(lengths) + n) // page_size) + 1
        order = torch.randperm(batch * width) + 1
        self.table = torch.cat([torch.zeros(1, width, dtype=torch.int64), order.view(batch, width)]).to(device)
        shape = (batch * width + 1, page_size, kv, dim)
        old, self.new = torch.zeros(2, *shape[:2], dtype=torch.bool, device=device)  # slots filled before, and by it
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            index = torch.arange(length + n, device=device)
            pages, offsets = self.table[row, index // page_size], index % page_size
            old[pages[:length], offsets[:length]] = True
            self.new[pages[length:], offsets[length:]] = True
        held = old[:, :, None, None]
        self.caches = [
            torch.randn(shape, device=device).masked_fill(~held, torch.nan).to(cache or dtype) for _ in range(2)
        ]
        self.qkv = torch.randn(batch * n, (count + 2 * kv) * dim, device=device).to(dtype)
        frequencies = 100.0 ** (-torch.arange(dim // 2) / (dim / 2))
        cos, sin = (table.to(device, dtype) for table in rope_table(frequencies, width * page_size + 64, 1.0))
        norms = [torch.rand(dim, device=device).to(dtype) + 0.5 for _ in range(2)] if norm else [None, None]
        sink = 3 * torch.randn(count, device=device) if sinks else None
        self.prefixes: SharedPrefixes | None = None
        self.heads = QKVLayout(count, kv, dim, norms[0], norms[1], 1e-6, cos, sin, sinks=sink)
        self.scales: list[torch.Tensor | None] = [None, None]

    def inputs(self, positions: torch.Tensor, caches: list[torch.Tensor]) -> AttentionInputs:
        return AttentionInputs(self.qkv, self.heads, positions, *caches, *self.scales)

    def queries(self, lengths: torch.Tensor, **tree: Any) -> DecodeQueries:
        return DecodeQueries(self.table, self.rows, lengths, self.n, self.page_size, prefixes=self.prefixes, **tree)

    def check(
        self,
        splits: int | None = None,
        mask: Mask = Mask(),  # noqa: B008
        *,
        positions: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
        first: int = 0,
        tile: Tile | None = None,
        prefix_tile: PrefixTile | None = None,
    ) -> torch.Tensor:
        caches = [cache.clone() for cache in self.caches]
        queries = self.queries(self.lengths - first, ancestors=ancestors, first_node=first)
        if positions is None:
            positions = (self.lengths[:, None] + torch.arange(self.n, device=self.qkv.device)).flatten()
        reference = DecodeAttentionRef(queries)
        # The copy is last: the kernel in front of a verify must not write what it reads early.
        inputs = self.inputs(positions, caches)._replace(projected=self.qkv.clone())
        out = verify_attention(queries, inputs, mask, splits=splits, tile=tile, prefix_tile=prefix_tile)
        wanted = [cache.to(self.dtype).nan_to_num(0).to(cache.dtype) for cache in self.caches]
        expected = reference(self.inputs(positions, wanted), mask)
        valid = (self.rows > 0).repeat_interleave(self.n)
        error = (out[valid].double() - expected[valid].double()).norm() / expected[valid].double().norm()
        assert error < TOLERANCE[self.dtype], error
        assert out.isfinite().all()
        # A mean of squares summed in another order can change a rounding; float32 multiply-adds may be fused.
        near = 0.0 if self.heads.q_norm is None and self.dtype != torch.float32 else 4 * torch.finfo(self.dtype).eps
        for written, wish, before, slack in zip(caches, wanted, self.caches, (near, 0.0), strict=True):
            new = self.new[1:]
            torch.testing.assert_close(written[1:].float()[new], wish[1:].float()[new], rtol=slack, atol=slack)
            torch.testing.assert_close(
                written[1:].float()[~new], before[1:].float()[~new], rtol=0, atol=0, equal_nan=True
            )
        return out


def tree(batch: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random parents: ancestor words [batch, n] and depths [batch, n]."""
    parents = [[int(torch.randint(node, ())) for node in range(1, n)] for _ in range(batch)]
    depths = [[len(path_of(row, node)) - 1 for node in range(n)] for row in parents]
    words = torch.tensor([ancestor_masks(row) for row in parents], device=device)
    return words, torch.tensor(depths, device=device)
