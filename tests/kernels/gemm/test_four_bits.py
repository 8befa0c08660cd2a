"""Packing of 4-bit weights, and the assembly that unpacks them, which the interpreter does not run."""

from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest
import torch

from specbatch.kernels.gemm import four_bits_mainloop_triton as loops
from specbatch.kernels.gemm.four_bits import pack_four_bits, unpack_four_bits
from specbatch.kernels.gemm.mxfp4 import _VALUES

WORD = (1 << 32) - 1


@pytest.mark.parametrize(("shape", "chunk"), [((3, 256), 128), ((2, 5, 64), 64), ((4, 96), 32)])
def test_values_are_found_again(shape: tuple[int, ...], chunk: int) -> None:
    values = torch.randint(0, 16, shape).byte()
    packed = pack_four_bits(values, chunk)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert packed.is_contiguous()
    assert torch.equal(unpack_four_bits(packed, chunk), values)
    assert pack_four_bits(values.transpose(0, 1).contiguous().transpose(0, 1), chunk).is_contiguous()


def test_bytes_of_a_thread() -> None:
    """Thread t has its columns of all four groups of 16 in 16 adjacent bytes: PTX, fragment A of m16n8k16."""
    columns = torch.arange(128)
    low, high = (pack_four_bits((columns >> shift & 15).byte()[None]).view(4, 4, 4) for shift in (0, 4))
    for thread, group in product(range(4), range(4)):
        first = 16 * group + 2 * thread
        expected = [first, first + 8, first + 1, first + 9]
        bytes_of = zip(low[thread, group].tolist(), high[thread, group].tolist(), strict=True)
        found = [(a & 15 | (b & 15) << 4, a >> 4 | (b >> 4) << 4) for a, b in bytes_of]
        assert found == [(column, column + 64) for column in expected]


def run(code: str, word: int) -> list[int]:
    """The two results of inline assembly for a word, of the instructions that it uses here."""
    registers = {"$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^(\w[\w.]*) (.*);$", code, re.MULTILINE):
        operation, arguments = line[0], [part.strip() for part in line[1].split(",")]
        to, given = arguments[0], [value(name) for name in arguments[1:]]
        if operation == "shl.b32":
            found = given[0] << given[1]
        elif operation == "shr.u32":
            found = given[0] >> given[1]
        elif operation == "and.b32":
            found = given[0] & given[1]
        else:
            assert (operation, given[3]) == ("lop3.b32", 0xEA), f"unknown instruction {operation}"
            found = given[0] & given[1] | given[2]
        registers[to] = found & WORD
    return [registers["$0"], registers["$1"]]


def values_of(words: list[int], dtype: torch.dtype) -> list[float]:
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.tensor([half - (1 << 16) if half >> 15 else half for half in halves], dtype=torch.int16)
    return bits.view(dtype).double().tolist()


@pytest.mark.parametrize(
    ("code", "shift", "dtype", "base"),
    [
        (loops._INT4_LOW_BF16, 0, torch.bfloat16, 128),
        (loops._INT4_HIGH_BF16, 4, torch.bfloat16, 128),
        (loops._INT4_LOW_FP16, 0, torch.float16, 1024),
        (loops._INT4_HIGH_FP16, 4, torch.float16, 1024),
        (loops._MXFP4_LOW, 0, torch.bfloat16, None),
        (loops._MXFP4_HIGH, 4, torch.bfloat16, None),
    ],
)
def test_assembly_unpacks_bytes_0_2_1_and_3(code: object, shift: int, dtype: torch.dtype, base: int | None) -> None:
    rng = Random(0)
    for word in (rng.getrandbits(32) for _ in range(300)):
        nibbles = [word >> 8 * byte + shift & 15 for byte in (0, 2, 1, 3)]
        found = values_of(run(code.value, word), dtype)  # type: ignore[attr-defined]
        if base is None:  # e2m1 below its other bias
            assert [value * 2.0**126 for value in found] == [_VALUES[nibble] for nibble in nibbles]
        else:
            assert found == [base + nibble for nibble in nibbles]
