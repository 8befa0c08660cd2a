"""The states of a model's recurrent layers: one line per device row, of a size that does not grow with the text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from specbatch.kernels.recurrent.state_replay import Fold


class StateShape(NamedTuple):
    """A named tensor of every recurrent layer: its shape for one device row, and its type: "activation" is the model's,
    "state" what `state_dtype` says, "float32" always that. pending: a line for each row of a verify comes first."""

    name: str
    shape: tuple[int, ...]
    kind: str = "activation"
    pending: bool = False


class RecurrentStates:
    """The layers' states, and which tokens of the last verify they lack (see `kernels.recurrent`).

    layers: of each recurrent layer its tensors by name, [R, ...] or, if pending, [R, N, ...]; device row 0 is for
    padding.
    """

    def __init__(
        self,
        shapes: tuple[StateShape, ...],
        layers: int,
        device_rows: int,
        rows: int,
        types: dict[str, torch.dtype],
        device: torch.device,
        cached_states: int = 0,
    ) -> None:
        """rows: N of a verify; types: by kind; cached_states: places for states of prefixes, numbered from 1."""
        found = {
            item.name: torch.zeros(
                layers, device_rows, *(rows,) * item.pending, *item.shape, dtype=types[item.kind], device=device
            )
            for item in shapes
        }
        self.layers = [{name: tensor[layer] for name, tensor in found.items()} for layer in range(layers)]
        # Behind a prompt nothing is pending, so that the rest is the state.
        self._kept_states = [
            (tensor, tensor.new_zeros(layers, cached_states, *tensor.shape[2:]))
            for item in shapes
            if not item.pending and cached_states
            for tensor in [found[item.name]]
        ]
        self._count = torch.zeros(device_rows, dtype=torch.int64, device=device)
        self._kept = torch.zeros(device_rows, rows, dtype=torch.int64, device=device)
        self._kept[:] = torch.arange(rows, device=device)

    def fold(self, rows: torch.Tensor, ancestors: torch.Tensor | None) -> Fold:
        """For a verify on device rows [B]."""
        return Fold(rows, self._count, self._kept, ancestors)

    def begin(self, rows: torch.Tensor) -> None:
        """A prompt pass on device rows [S] leaves nothing to be folded in."""
        self._count.index_fill_(0, rows, 0)

    def load(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Of each pair a checkpoint, whose states a device row goes on from. One by one, as that takes no memory."""
        for checkpoint, row in pairs:
            for tensor, kept in self._kept_states:
                tensor[:, row] = kept[:, checkpoint - 1]

    def save(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Of each pair a device row, whose prompt has just been computed that far, and the checkpoint to keep it."""
        for row, checkpoint in pairs:
            for tensor, kept in self._kept_states:
                kept[:, checkpoint - 1] = tensor[:, row]

    def commit(self, rows: torch.Tensor, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        """Of the verify that was just made on device rows [B], the root and accepted [B] drafts stay: the first ones,
        or those of path int64 [B, N]. A padding row keeps nothing."""
        self._count[rows] = torch.where(rows > 0, accepted + 1, 0)
        if path is not None:
            self._kept[rows, : path.shape[1]] = path


def state_types(activation: torch.dtype, state: str) -> dict[str, torch.dtype]:
    """The types of `StateShape.kind`; state: as `EngineConfig.state_dtype` says it."""
    matrix = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[state]
    return {"activation": activation, "state": matrix, "float32": torch.float32}


def state_bytes(shapes: tuple[StateShape, ...], layers: int, rows: int, types: dict[str, torch.dtype]) -> int:
    """What one device row takes in all layers, with `rows` lines of what is pending; a checkpoint has none."""
    each = (math.prod(item.shape) * (rows if item.pending else 1) * types[item.kind].itemsize for item in shapes)
    return layers * sum(each)
