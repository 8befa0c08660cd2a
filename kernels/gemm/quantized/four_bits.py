"""Packing of 4-bit values in the order in which tensor cores take the first operand of a product.

Threads of a warp hold that operand as PTX describes the fragments of m16n8k16 and of wgmma.m64k16: thread t of four has
columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16. The bytes of a chunk of columns are stored thread by thread, so that
each reads its own in one piece (as Frantar et al., "MARLIN", 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK = 128  # columns that are packed together: 64 bytes, 16 for each of four threads


def pack_four_bits(values: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """values uint8 [..., n] below 16 -> uint8 [..., n / 2], contiguous, for chunks of 32, 64 or 128 that divide n.

    The low bits of a chunk's bytes are the values of its first half, the high bits those of its second half. A thread
    has four bytes for each 16 columns of a half: 2t, 2t + 8, 2t + 1 and 2t + 9, so that two shifts of such a word, and
    no other movement, make pairs of 16-bit values of it.
    """
    low, high = values.unflatten(-1, (-1, 2, chunk // 32, 2, 4, 2)).unbind(-5)  # 16 columns, 8 of them, t, pair
    packed: torch.Tensor = low | high << 4
    return packed.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).flatten(-5).contiguous()


def unpack_four_bits(packed: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """uint8 [..., n / 2] from `pack_four_bits` -> its values uint8 [..., n]."""
    import torch

    pairs = packed.unflatten(-1, (-1, 4, chunk // 32, 2, 2)).movedim((-4, -3, -2, -1), (-2, -4, -1, -3))
    return torch.stack([pairs & 15, pairs >> 4], -5).flatten(-6)
