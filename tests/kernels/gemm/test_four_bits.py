"""Packing of 4-bit weights, and the assembly that unpacks them and FP8, which the interpreter does not run."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from specbatch.kernels.gemm import four_bits_mainloop_triton as loops
from specbatch.kernels.gemm import gemm_mainloop_triton
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


def run(code: str, words: torch.Tensor, given: str = "") -> list[torch.Tensor]:
    """The two results of inline assembly for words int64 [n], of the instructions that are used here. given: which of
    the results has the register of the word: the compiler may choose either, as none is marked as written early."""
    registers = {"$2": words}
    places = {given: "$2"}

    def value(name: str) -> torch.Tensor:
        name = places.get(name, name)
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for operation, arguments in re.findall(r"^(\w[\w.]*) (.*);$", code, re.MULTILINE):
        to, *names = [part.strip() for part in arguments.split(",")]
        read = [value(name) for name in names]
        registers[places.get(to, to)] = INSTRUCTIONS[operation](*read) & WORD
    return [value(name) for name in ("$0", "$1")]


def and_or(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert table == 0xEA, "lop3 with another table"
    return a & b | c


def permuted(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    chosen = [int(selector) >> 4 * place & 15 for place in range(4)]
    found = torch.zeros_like(high)
    for place, byte in enumerate(chosen):
        found = found | ((low, high)[byte // 4] >> 8 * (byte % 4) & 255) << 8 * place
    return found


def product_of_pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = (values_of(part.expand_as(x), torch.bfloat16) for part in (x, y))
    bits = (left * right).bfloat16().view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
    "and.b32": operator.and_,
    "mov.b32": lambda x: x,
    "lop3.b32": and_or,
    "prmt.b32": permuted,
    "mul.rn.bf16x2": product_of_pairs,
}


def values_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [n, 2]: the 16-bit values in words [n], low one first."""
    return torch.stack([words & 0xFFFF, words >> 16], -1).to(torch.int16).view(dtype).double()


def every_byte() -> torch.Tensor:
    """Words int64 [1024] with every byte in every place, beside random ones."""
    rng = torch.Generator().manual_seed(0)
    others = torch.randint(0, 1 << 32, (4, 256), generator=rng)
    shifts = torch.arange(0, 32, 8)[:, None]
    return (others & ~(255 << shifts) | torch.arange(256) << shifts).flatten()


@pytest.mark.parametrize("given", ["", "$0", "$1"])
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
def test_assembly_unpacks_bytes_0_2_1_and_3(
    code: Any, shift: int, dtype: torch.dtype, base: int | None, given: str
) -> None:
    words = every_byte()
    codes = torch.stack([words >> 8 * byte + shift & 15 for byte in (0, 2, 1, 3)], -1)
    found = torch.cat([values_of(pair, dtype) for pair in run(code.value, words, given)], -1)
    if base is None:  # e2m1 below its other bias
        assert torch.equal(found * 2.0**126, torch.tensor(_VALUES, dtype=torch.float64)[codes])
    else:
        assert torch.equal(found, (base + codes).double())


@pytest.mark.parametrize("given", ["", "$0", "$1"])
def test_assembly_converts_e4m3(given: str) -> None:
    """A word is four neighbours, the first in byte 0."""
    words, code = every_byte(), gemm_mainloop_triton._WIDEN.value
    stored = torch.stack([words >> 8 * byte & 255 for byte in range(4)], -1).to(torch.uint8)
    expected = stored.view(torch.float8_e4m3fn).double()
    found = torch.cat([values_of(pair, torch.bfloat16) for pair in run(code, words, given)], -1)
    is_number = ~expected.isnan()  # weights have no NaN
    assert torch.equal(found[is_number], expected[is_number])
