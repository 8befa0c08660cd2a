"""GEMM of float32 rows and a `GroupedWeight` in tiles, compiled for the processor.

An output of several rows is one chain of fused multiply-adds in the order of the inputs, with weights as they are
dequantized to float32. Its bits depend neither on the number of rows nor on that of threads. One row takes another
path, which multiplies values and scales the sums of groups: fewer instructions, but other bits.
"""

from __future__ import annotations

from functools import cache, reduce
from threading import Lock
from typing import TYPE_CHECKING

from specbatch.kernels.common.native import LANES, Code, Native, has_wide_vectors

if TYPE_CHECKING:
    from llvmlite import ir

TILE = 2 * LANES  # outputs that are stored together
BLOCK = 128  # inputs of a tile that are dequantized at a time for several rows
_UNROLLED = 4
_compiling = Lock()


def gemm(bits: int, group: int, half: bool, offsets: bool) -> Native:
    """The function for weights with so many bits, in groups of so many inputs. half: whether scales and offsets are
    float16; offsets: whether there are any. Arguments: x, values, scales, offsets, out; rows, inputs, tiles; whether
    one row takes its own path; what is added to that row, or 0."""
    with _compiling:  # layers are loaded by several threads
        return _compiled(bits, group, half, offsets)


@cache
def _compiled(bits: int, group: int, half: bool, offsets: bool) -> Native:
    return Native(lambda code: _build(code, bits, group, half=half, offsets=offsets))


def _build(code: Code, bits: int, group: int, *, half: bool, offsets: bool) -> None:
    from llvmlite import ir

    at, word = code.at, code.word
    scale_type = ir.HalfType() if half else code.float
    x, out = code.pointer(1, code.float), code.pointer(5, code.float)
    all_values = code.pointer(2, code.byte)
    all_scales, all_offsets = (code.pointer(place, scale_type) for place in (3, 4))
    rows, inputs, tiles = (code.argument(place) for place in (6, 7, 8))
    residual = code.pointer(10, code.float)
    has_residual = at.icmp_signed("!=", code.argument(10), word(0))
    groups = at.udiv(inputs, word(group))
    width = at.mul(tiles, word(TILE))
    step = TILE * bits // 8  # bytes of the values of an input
    integers = ir.VectorType(ir.IntType(32), LANES)
    scratch = code.variable(ir.ArrayType(code.float, BLOCK * TILE))
    scratch = at.bitcast(scratch, code.float.as_pointer())
    nothing = code.vector([0.0] * LANES)
    # Rows and vectors of a block, whose sums fit the registers.
    blocks = ((8, 2), (4, 2), (2, 2), (1, 2)) if has_wide_vectors() else ((6, 1), (4, 1), (2, 2), (1, 2))

    def halves(pointer: ir.Value, tile: ir.Value, number: ir.Value) -> list[ir.Value]:
        """Scales or offsets of a group."""
        start = at.mul(at.add(at.mul(tile, groups), number), word(TILE))
        kind = ir.VectorType(scale_type, LANES)
        found = [code.load(pointer, kind, at.add(start, word(LANES * side))) for side in range(2)]
        return [at.fpext(one, code.vector) for one in found] if half else found

    def integers_of(tile: ir.Value, place: ir.Value) -> list[ir.Value]:
        """The values of all outputs of a tile for the input `place`, as floats."""
        start = at.mul(at.add(at.mul(tile, inputs), place), word(step))
        kind = ir.VectorType(code.byte, LANES)
        if bits == 4:
            pairs = at.zext(code.load(all_values, kind, start), integers)
            whole = [at.and_(pairs, integers([15] * LANES)), at.lshr(pairs, integers([4] * LANES))]
        else:
            parts = [code.load(all_values, kind, at.add(start, word(LANES * side))) for side in range(2)]
            whole = [at.sext(part, integers) for part in parts]
        return [at.sitofp(one, code.vector) for one in whole]

    def one_row(first: ir.Value, count: int) -> None:
        """The outputs of so many tiles: sums of a group are scaled."""
        numbers = [at.add(first, word(tile)) for tile in range(count)]
        sums = [code.variable(code.vector, nothing) for _ in range(2 * count)]
        with code.loop(word(0), groups) as number:
            start = at.mul(number, word(group))
            parts = [code.variable(code.vector, nothing) for _ in range(2 * count)]
            with code.loop(start, at.add(start, word(group)), _UNROLLED) as near:
                for offset in range(_UNROLLED):
                    place = at.add(near, word(offset))
                    value = code.splat(at.load(code.at_offset(x, place)))
                    for tile in range(count):
                        for side, whole in enumerate(integers_of(numbers[tile], place)):
                            total = parts[2 * tile + side]
                            at.store(code.fma(whole, value, at.load(total)), total)
            if offsets:
                lines = [code.load(x, code.vector, at.add(start, word(part))) for part in range(0, group, LANES)]
                whole = code.splat(code.sum(reduce(at.fadd, lines)))
            for tile in range(count):
                scales = halves(all_scales, numbers[tile], number)
                zeros = halves(all_offsets, numbers[tile], number) if offsets else []
                for side in range(2):
                    total = sums[2 * tile + side]
                    found = code.fma(scales[side], at.load(parts[2 * tile + side]), at.load(total))
                    at.store(code.fma(zeros[side], whole, found) if offsets else found, total)
        for place, total in enumerate(sums):
            target = at.add(at.mul(first, word(TILE)), word(LANES * place))
            with at.if_then(has_residual):
                at.store(at.fadd(code.load(residual, code.vector, target), at.load(total)), total)
            code.store(at.load(total), out, target)

    def several_rows(tile: ir.Value) -> None:
        with code.loop(word(0), inputs, BLOCK) as begin:
            end = at.add(begin, word(BLOCK))
            end = at.select(at.icmp_signed("<", end, inputs), end, inputs)
            with code.loop(begin, end, group) as start:
                number = at.udiv(start, word(group))
                scales, zeros = halves(all_scales, tile, number), halves(all_offsets, tile, number) if offsets else []
                with code.loop(start, at.add(start, word(group)), _UNROLLED) as near:
                    for offset in range(_UNROLLED):
                        place = at.add(near, word(offset))
                        for side, whole in enumerate(integers_of(tile, place)):
                            scale = scales[side]
                            weight = code.fma(whole, scale, zeros[side]) if offsets else at.fmul(whole, scale)
                            target = at.add(at.mul(at.sub(place, begin), word(TILE)), word(LANES * side))
                            code.store(weight, scratch, target)
            done = word(0)
            for count, vectors in blocks:
                after = code.variable(word, done)
                with code.loop(done, at.sub(rows, word(count - 1)), count) as row:
                    with code.loop(word(0), word(TILE), LANES * vectors) as column:
                        add_block(tile, column, vectors, row, count, begin, end)
                    at.store(at.add(row, word(count)), after)
                done = at.load(after)

    def add_block(
        tile: ir.Value, column: ir.Value, vectors: int, first: ir.Value, count: int, begin: ir.Value, end: ir.Value
    ) -> None:
        """Add the products of some inputs to outputs of some rows. column: the first of the outputs in the tile."""
        output = at.add(at.mul(tile, word(TILE)), column)
        places = [(row, LANES * side) for row in range(count) for side in range(vectors)]
        numbers = [at.add(first, word(row)) for row in range(count)]
        targets = [at.add(at.add(at.mul(numbers[row], width), output), word(side)) for row, side in places]
        sums = [code.variable(code.vector, nothing) for _ in targets]
        with at.if_then(at.icmp_signed("!=", begin, word(0))):
            for total, target in zip(sums, targets, strict=True):
                at.store(code.load(out, code.vector, target), total)
        lines = [code.at_offset(x, at.mul(row, inputs)) for row in numbers]
        with code.loop(begin, end) as place:
            start = at.add(at.mul(at.sub(place, begin), word(TILE)), column)
            found = [code.load(scratch, code.vector, at.add(start, word(LANES * side))) for side in range(vectors)]
            values = [code.splat(at.load(code.at_offset(line, place))) for line in lines]
            for (row, side), total in zip(places, sums, strict=True):
                at.store(code.fma(found[side // LANES], values[row], at.load(total)), total)
        for total, target in zip(sums, targets, strict=True):
            code.store(at.load(total), out, target)

    pairs = at.udiv(at.add(tiles, word(1)), word(2))
    is_single = at.and_(at.icmp_signed("==", rows, word(1)), at.icmp_signed("!=", code.argument(9), word(0)))
    with code.pieces(pairs) as pair:
        first = at.mul(pair, word(2))
        is_whole = at.icmp_signed("<", at.add(first, word(1)), tiles)
        with at.if_else(is_single) as (then, otherwise):
            with then, at.if_else(is_whole) as (both, last):
                with both:
                    one_row(first, 2)
                with last:
                    one_row(first, 1)
            with otherwise:
                stop = at.select(is_whole, at.add(first, word(2)), tiles)
                with code.loop(first, stop) as tile:
                    several_rows(tile)
