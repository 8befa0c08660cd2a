"""Runs the inline assembly of kernels, for tests without a GPU: the instructions that are used, on words of 32 bits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

WORD = (1 << 32) - 1


def run(
    code: str,
    given: dict[str, torch.Tensor],
    shared: dict[str, str],
    results: tuple[str, ...] = ("$0", "$1"),
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """The results of inline assembly for words int64 [n] by their names, of the instructions that are used here.
    shared: which result has the register of which word: the compiler may choose any, as none is marked as written
    early."""
    registers = dict(given)

    def value(name: str) -> torch.Tensor:
        name = shared.get(name, name)
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for operation, arguments in re.findall(r"^(\w[\w.]*) (.*?);", code, re.MULTILINE):
        to, *names = [part.strip(" {}") for part in arguments.split(",")]
        if "{" in arguments:  # a word into its halves
            word = value(names[1])
            registers |= {to: word & 0xFFFF, names[0]: word >> 16}
            continue
        read = [value(name) for name in names]
        is_of_pairs = operation.endswith("16x2")
        found = of_pairs(operation, dtype, read) if is_of_pairs else INSTRUCTIONS[operation](*read)
        registers[shared.get(to, to)] = found & WORD
    return [value(name) for name in results]


def and_or(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert table == 0xEA, "lop3 with another table"
    return a & b | c


def permuted(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    chosen = [int(selector) >> 4 * place & 15 for place in range(4)]
    found = torch.zeros_like(high)
    for place, byte in enumerate(chosen):
        found = found | ((low, high)[byte // 4] >> 8 * (byte % 4) & 255) << 8 * place
    return found


def of_pairs(operation: str, dtype: torch.dtype, words: list[torch.Tensor]) -> torch.Tensor:
    """A difference, a product, or a product and a sum rounded once, of 16-bit values, subnormal ones too."""
    name, _, kind = operation.split(".")
    assert kind == {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    shape = torch.broadcast_shapes(*(part.shape for part in words))
    x, y, *z = (values_of(part.expand(shape), dtype) for part in words)
    assert len(z) == {"mul": 0, "sub": 0, "fma": 1}[name]
    bits = (x - y if name == "sub" else x * y + sum(z)).to(dtype).view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def from_e4m3(pair: torch.Tensor) -> torch.Tensor:
    """Two values of e4m3 in words [n] -> those of float16."""
    low, high = (
        (pair >> shift & 255).to(torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).long() & 0xFFFF
        for shift in (0, 8)
    )
    return low | high << 16


INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
    "and.b32": operator.and_,
    "mov.b32": lambda x: x,
    "lop3.b32": and_or,
    "prmt.b32": permuted,
    "mul.lo.u32": operator.mul,
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
}


def values_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [n, 2]: the 16-bit values in words [n], low one first."""
    return torch.stack([words & 0xFFFF, words >> 16], -1).to(torch.int16).view(dtype).double()


class _Results:
    def __init__(self, values: Sequence[Any]) -> None:
        self.get_result = values.__getitem__


def create_inline_asm(
    builder: Any, code: str, constraints: str, values: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
) -> _Results:
    """In place of the method of Triton's `InterpreterBuilder`, which refuses. For words, and for pairs of float16."""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    assert pack in (1, 2)
    count, shape = constraints.count("="), np.broadcast_shapes(*(value.data.shape for value in values))
    given = {}
    for place, value in enumerate(values, count):
        bits = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1)
        words = bits.view(np.uint32) if pack == 2 else bits.astype(np.int64) & WORD
        given[f"${place}"] = torch.from_numpy(words.astype(np.int64))
    names = tuple(f"${place}" for place in range(count))
    found = run(code, given, {}, names, torch.bfloat16 if "bf16x2" in code else torch.float16)
    kind, dtype = (core.float16, np.float16) if pack == 2 else (core.int32, np.int32)
    words_of = (np.ascontiguousarray(word.numpy().astype(np.uint32)) for word in found)
    return _Results([TensorHandle(word.view(dtype).reshape(shape), kind) for word in words_of])
