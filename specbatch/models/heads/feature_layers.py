"""The layers of a target whose hidden states a draft reads, as the draft's config lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FeatureLayers(NamedTuple):
    """key: of the config; listed: the numbers under it; first: what the config calls the output of layer 0. It is 0
    where layers are listed, and 1 where boundaries are: k is the input of layer k, which is the output of layer k - 1.
    """

    key: str
    listed: Sequence[int]
    first: int = 0

    def __str__(self) -> str:
        return f"{self.key}={list(self.listed)}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """The layers, counted from 0, whose output is read."""
        return tuple(number - self.first for number in self.listed)

    @property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(number + 1 for number in self.outputs)

    def valid(self, layers: int) -> str:
        """What may be listed to read the outputs of the first `layers` layers."""
        of = "input of layer k, the output of layer k - 1" if self.first else "output of layer k, counted from 0"
        return f"{self.first} to {layers - 1 + self.first} (k is the {of})"

    def within(self, layers: int) -> bool:
        """Whether they are different layers, all of them among the first `layers`."""
        found = self.outputs
        return len(set(found)) == len(found) and all(0 <= layer < layers for layer in found)
