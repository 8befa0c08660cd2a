"""Attention of a decode or verify pass on a CPU, from the output of the qkv GEMM to the input of the output projection,
compiled for the processor: one call for a layer in place of some thirty of torch.

A piece of work is a sequence and a KV head. Softmax is computed online, 16 keys at a time (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from functools import cache, cached_property, reduce
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.paged_attention import attention_mask
from specbatch.kernels.attention.queries import AttentionInputs, DecodeAttention, DecodeQueries, Mask, QKVLayout
from specbatch.kernels.common.native import LANES, Code, Native
from specbatch.kernels.common.sizes import cdiv

if TYPE_CHECKING:
    from llvmlite import ir

_LEAST = -1e30  # below every score; finite, so that differences are


class NativeDecodeAttention:
    """A `DecodeAttention`. other: what computes layers that `_takes` refuses."""

    def __init__(self, queries: DecodeQueries, other: DecodeAttention) -> None:
        self._queries, self._other = queries, other

    def __call__(self, inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        qkv, heads, positions, k_cache, v_cache, *_ = inputs
        if not _takes(inputs):
            return self._other(inputs, mask)
        queries, slots = self._queries, self._slots
        (batch, keys), group = slots.shape, heads.count // heads.kv
        out = qkv.new_empty(qkv.shape[0], heads.count * heads.dim)
        scratch = qkv.new_empty(batch * heads.kv * queries.num_queries * group * (2 * heads.dim + 2))
        norms = (heads.q_norm, heads.k_norm)
        tensors = (
            qkv.contiguous(), k_cache, v_cache, heads.cos, heads.sin, positions, slots, self._lengths, out, scratch,
            *norms, heads.sinks, self._seen(mask),
        )  # fmt: skip
        run = _attention(heads.dim, group, heads.eps if heads.q_norm is not None else None, heads.shared)
        run(
            batch * heads.kv,
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            batch,
            queries.num_queries,
            heads.kv,
            keys,
            mask.causal,
            mask.window or keys,
        )
        return out

    @cached_property
    def _slots(self) -> torch.Tensor:
        """int64 [B, keys], keys a multiple of 16."""
        queries, size = self._queries, self._queries.page_size
        pages = queries.page_table.shape[1] if queries.bound is None else cdiv(queries.bound, size)
        first = queries.page_table[queries.slots, :pages] * size
        slots = (first[:, :, None] + torch.arange(size)).flatten(1)
        return F.pad(slots, (0, -slots.shape[1] % LANES)).contiguous()

    @cached_property
    def _lengths(self) -> torch.Tensor:
        """int64 [B]: where the first query is stored."""
        return (self._queries.lengths + self._queries.first_node).contiguous()

    def _seen(self, mask: Mask) -> torch.Tensor | None:
        """For a tree, which keys each query sees: bool [B, rows, keys]."""
        return None if self._queries.ancestors is None else self._tree(mask)

    @cached_property
    def _tree(self) -> ir.Value:
        queries, keys = self._queries, self._slots.shape[1]

        @cache
        def seen(mask: Mask) -> torch.Tensor:
            rows, tree, first = queries.num_queries, queries.ancestors, queries.first_node
            return attention_mask(queries.lengths, rows, keys, tree, first, mask.causal, mask.window).contiguous()

        return seen


def _takes(inputs: AttentionInputs) -> bool:
    heads, types = inputs.heads, {inputs.projected.dtype, inputs.k_cache.dtype, inputs.heads.cos.dtype}
    is_plain = type(heads) is QKVLayout and heads.k_offset is None and inputs.k_scale is None
    return is_plain and types == {torch.float32} and heads.dim % (2 * LANES) == 0


@cache
def _attention(dim: int, group: int, eps: float | None, shared: bool) -> Native:
    """The function for heads of a size. eps: of the norms, None without. Arguments: qkv, k cache, v cache, cos, sin,
    positions, slots, lengths, out, scratch, q norm, k norm, sinks or 0, seen or 0; sequences, queries of each, KV
    heads, keys; whether queries see no later ones, how many keys they see."""
    return Native(lambda code: _build(code, dim, group, eps, shared))


def _build(code: Code, dim: int, group: int, eps: float | None, shared: bool) -> None:
    from llvmlite import ir

    at, word = code.at, code.word
    qkv, k_cache, v_cache, cos, sin = (code.pointer(place, code.float) for place in range(1, 6))
    positions, all_slots, lengths = (code.pointer(place, word) for place in (6, 7, 8))
    out, scratch, q_norm, k_norm, sinks = (code.pointer(place, code.float) for place in range(9, 14))
    seen = code.pointer(14, code.byte)
    is_tree, has_sinks = (at.icmp_signed("!=", code.argument(place), word(0)) for place in (14, 13))
    batch, rows, kv, keys, causal, window = (code.argument(place) for place in range(15, 21))
    vectors, width = dim // LANES, 2 * dim + 2
    heads = at.mul(kv, word(group))
    columns = at.mul(heads if shared else at.add(heads, at.mul(kv, word(2))), word(dim))
    stride = at.mul(kv, word(dim))  # of a key in the cache
    lane = ir.VectorType(word, LANES)(list(range(LANES)))

    def loaded(pointer: ir.Value, start: ir.Value) -> list[ir.Value]:
        return [code.load(pointer, code.vector, at.add(start, word(LANES * part))) for part in range(vectors)]

    def stored(parts: list[ir.Value], pointer: ir.Value, start: ir.Value) -> None:
        for part, values in enumerate(parts):
            code.store(values, pointer, at.add(start, word(LANES * part)))

    def rotated(start: ir.Value, position: ir.Value, norm: ir.Value) -> list[ir.Value]:
        """A head of qkv, normalised and rotated."""
        values = loaded(qkv, start)
        if eps is not None:
            squares = reduce(lambda total, part: code.fma(part, part, total), values, code.zeros)
            mean = at.fdiv(code.sum(squares), code.float(float(dim)))
            scale = code.splat(at.fdiv(code.float(1.0), code.sqrt(at.fadd(mean, code.float(eps)))))
            weights = loaded(norm, word(0))
            values = [at.fmul(at.fmul(part, scale), weight) for part, weight in zip(values, weights, strict=True)]
        across = values[vectors // 2 :] + values[: vectors // 2]
        turns = at.mul(position, word(dim))
        tables = zip(values, across, loaded(cos, turns), loaded(sin, turns), strict=True)
        return [code.fma(other, sine, at.fmul(own, cosine)) for own, other, cosine, sine in tables]

    def splat_words(number: ir.Value) -> ir.Value:
        nothing = ir.Constant(ir.VectorType(word, LANES), ir.Undefined)
        first = at.insert_element(nothing, number, ir.IntType(32)(0))
        return at.shuffle_vector(first, nothing, ir.VectorType(ir.IntType(32), LANES)([0] * LANES))

    with code.pieces(at.mul(batch, kv)) as piece:
        sequence, head = at.udiv(piece, kv), at.urem(piece, kv)
        length = at.load(code.at_offset(lengths, sequence))
        slots = code.at_offset(all_slots, at.mul(sequence, keys))
        own = at.mul(piece, at.mul(rows, word(group * width)))  # in the scratch: q, sum, largest, total of each query
        with code.loop(word(0), rows) as row:
            token = at.add(at.mul(sequence, rows), row)
            line, position = at.mul(token, columns), at.load(code.at_offset(positions, token))
            if not shared:
                target = at.mul(at.load(code.at_offset(slots, at.add(length, row))), stride)
                target = at.add(target, at.mul(head, word(dim)))
                start = at.add(line, at.mul(at.add(heads, head), word(dim)))
                stored(rotated(start, position, k_norm), k_cache, target)
                stored(loaded(qkv, at.add(start, stride)), v_cache, target)
            for member in range(group):
                number = at.add(at.mul(head, word(group)), word(member))
                values = rotated(at.add(line, at.mul(number, word(dim))), position, q_norm)
                place = at.add(own, at.mul(at.add(at.mul(row, word(group)), word(member)), word(width)))
                scaled = [at.fmul(part, code.every(dim**-0.5)) for part in values]
                stored([*scaled, *[code.zeros] * vectors], scratch, place)
                end = at.add(place, word(2 * dim))
                largest, total = (code.at_offset(scratch, at.add(end, word(part))) for part in range(2))
                at.store(code.float(_LEAST), largest)
                at.store(code.float(0.0), total)
                with at.if_then(has_sinks):
                    at.store(at.load(code.at_offset(sinks, number)), largest)
                    at.store(code.float(1.0), total)
        last = at.add(length, rows)
        first = at.sub(at.add(length, word(1)), window)
        first = at.select(at.icmp_signed("<", first, word(0)), word(0), first)
        first = at.select(is_tree, word(0), first)
        first = at.and_(first, word(-LANES))
        with code.loop(first, last, LANES) as start:
            indices = at.add(splat_words(start), lane)
            places = []
            for key in range(LANES):
                slot = at.load(code.at_offset(slots, at.add(start, word(key))))
                places.append(at.add(at.mul(slot, stride), at.mul(head, word(dim))))
            with code.loop(word(0), at.mul(rows, word(group))) as query:
                row, place = at.udiv(query, word(group)), at.add(own, at.mul(query, word(width)))
                asked = loaded(scratch, place)
                scores = code.zeros
                for key in range(LANES):
                    products = [at.fmul(asked[0], code.load(k_cache, code.vector, places[key]))]
                    for part in range(1, vectors):
                        values = code.load(k_cache, code.vector, at.add(places[key], word(LANES * part)))
                        products.append(code.fma(asked[part], values, products[-1]))
                    scores = at.insert_element(scores, code.sum(products[-1]), ir.IntType(32)(key))
                place_of_row = at.add(length, row)
                high = at.select(at.icmp_signed("!=", causal, word(0)), place_of_row, at.sub(last, word(1)))
                low = at.sub(place_of_row, window)
                visible = code.variable(ir.VectorType(ir.IntType(1), LANES))
                with at.if_else(is_tree) as (tree, chain):
                    with tree:
                        start_of_row = at.mul(at.add(at.mul(sequence, rows), row), keys)
                        marks = code.load(seen, ir.VectorType(code.byte, LANES), at.add(start_of_row, start))
                        at.store(at.icmp_signed("!=", marks, ir.VectorType(code.byte, LANES)([0] * LANES)), visible)
                    with chain:
                        below = at.icmp_signed("<=", indices, splat_words(high))
                        at.store(at.and_(below, at.icmp_signed(">", indices, splat_words(low))), visible)
                scores = at.select(at.load(visible), scores, code.every(2 * _LEAST))
                end = at.add(place, word(2 * dim))
                largest, total = (code.at_offset(scratch, at.add(end, word(part))) for part in range(2))
                before = at.load(largest)
                now = code.largest(scores)
                now = at.select(at.fcmp_ordered(">", now, before), now, before)
                weights = code.exp(at.fsub(scores, code.splat(now)))
                kept = code.exp(code.splat(at.fsub(before, now)))
                at.store(now, largest)
                shrink = at.extract_element(kept, ir.IntType(32)(0))
                at.store(at.fadd(at.fmul(at.load(total), shrink), code.sum(weights)), total)
                result = at.add(place, word(dim))
                sums = [at.fmul(part, kept) for part in loaded(scratch, result)]
                for key in range(LANES):
                    weight = code.splat(at.extract_element(weights, ir.IntType(32)(key)))
                    values = loaded(v_cache, places[key])
                    sums = [code.fma(weight, part, total_) for part, total_ in zip(values, sums, strict=True)]
                stored(sums, scratch, result)
        with code.loop(word(0), at.mul(rows, word(group))) as query:
            row, member = at.udiv(query, word(group)), at.urem(query, word(group))
            place = at.add(own, at.mul(query, word(width)))
            total = at.load(code.at_offset(scratch, at.add(place, word(2 * dim + 1))))
            token = at.add(at.mul(sequence, rows), row)
            number = at.add(at.add(at.mul(token, heads), at.mul(head, word(group))), member)
            share = code.splat(at.fdiv(code.float(1.0), total))
            sums = [at.fmul(part, share) for part in loaded(scratch, at.add(place, word(dim)))]
            stored(sums, out, at.mul(number, word(dim)))
