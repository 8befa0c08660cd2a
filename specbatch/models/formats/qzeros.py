"""`qzeros` of GPTQ: zero points in words of 32 bits [groups, out / values in a word], in `gptq` files each less 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from specbatch.errors import refuse

if TYPE_CHECKING:
    import torch

QZEROS = ".qzeros"
_ONES = {4: 0x11111111, 8: 0x01010101}  # a word of ones, by bits


def plus_ones(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The zero points of a `gptq` file. GPTQModel and auto-round subtract the ones from whole words, so that a zero
    point of 0 borrows from the next; adding them to whole words gives it back."""
    return words + _ONES[bits]


def check_symmetric(found: Iterable[str], tensor: Callable[[str], torch.Tensor]) -> None:
    """Refuse zero points of symmetric weights, among the tensors `found`, that are not all the same.

    AutoGPTQ, GPTQModel and auto-round write one number, 7 or 8 of 4 bits. GPTQModel has others in layers with few
    samples if its `fallback` strategy is not rtn, and these count, whatever `sym` says."""
    import torch

    for name in found:
        if name.endswith(QZEROS):
            stored = tensor(name).flatten().view(torch.uint8)
            if bool((stored != stored[:1]).any()):
                works = 'its zero points differ, so these weights are not symmetric; give their layer "sym": false'
                raise refuse("model", name, works)
