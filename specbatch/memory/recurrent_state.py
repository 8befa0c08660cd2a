"""Recurrent state pool: states of fixed size per device row, and slots for states that the prefix cache keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from specbatch.kernels.recurrent.state_replay import StateReplay


class StateShape(NamedTuple):
    """A named tensor of every recurrent layer.

    shape    per device row
    kind     its dtype: "activation" is the model's, "state" that of `EngineConfig.state_dtype`, "float32" is fixed
    pending  inputs of the last verify, with a leading dimension of the verify's rows
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "activation"
    pending: bool = False


class RecurrentStates:
    """States of all recurrent layers, and which tokens of the last verify they do not include yet.

    A verify leaves the states as they were and stores its inputs; the next verify replays those of the accepted tokens
    first (see `kernels.recurrent`).

    layers: per recurrent layer its tensors by name, [R, ...] or, if pending, [R, N, ...]. Device row 0 is for padding.
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
        *,
        trees: bool = True,
    ) -> None:
        """rows: N, rows of a verify; types: dtypes by `StateShape.kind`; cached_states: slots for the states of
        prefixes, numbered from 1; trees: whether a verify may be that of a tree. If all are chains, kernels need not
        look up which rows were accepted."""
        found = {
            item.name: torch.zeros(
                layers, device_rows, *(rows,) * item.pending, *item.shape, dtype=types[item.kind], device=device
            )
            for item in shapes
        }
        self.layers = [{name: tensor[layer] for name, tensor in found.items()} for layer in range(layers)]
        # No inputs are pending after a prompt, so the other tensors are the whole state.
        self._kept_states = [
            (tensor, tensor.new_zeros(layers, cached_states, *tensor.shape[2:]))
            for item in shapes
            if not item.pending and cached_states
            for tensor in [found[item.name]]
        ]
        self._count = torch.zeros(device_rows, dtype=torch.int64, device=device)
        self._kept = torch.arange(rows, device=device).repeat(device_rows, 1) if trees else None

    def replay(self, rows: torch.Tensor, ancestors: torch.Tensor | None) -> StateReplay:
        """What a verify on device rows [B] replays before its own tokens."""
        return StateReplay(rows, self._count, self._kept, ancestors)

    def begin(self, rows: torch.Tensor) -> None:
        """Before a prompt pass on device rows [S]: there is nothing to replay."""
        self._count.index_fill_(0, rows, 0)

    def load(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy states from the cache: pairs of (cached state, device row). One by one, without temporary memory."""
        for slot, row in pairs:
            for tensor, kept in self._kept_states:
                tensor[:, row] = kept[:, slot - 1]

    def save(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy states to the cache after a prompt pass: pairs of (device row, cached state)."""
        for row, slot in pairs:
            for tensor, kept in self._kept_states:
                kept[:, slot - 1] = tensor[:, row]

    def commit(self, rows: torch.Tensor, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        """Commit the root and accepted [B] drafts of the last verify on device rows [B]: the first ones of a chain, or
        the nodes path int64 [B, N] of a tree. A padding row commits nothing."""
        self._count[rows] = torch.where(rows > 0, accepted + 1, 0)
        if path is not None:
            assert self._kept is not None, "these states are of chains only"
            self._kept[rows, : path.shape[1]] = path


def state_types(activation: torch.dtype, state: str) -> dict[str, torch.dtype]:
    """dtypes by `StateShape.kind`; state: a value of `EngineConfig.state_dtype`."""
    matrix = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[state]
    return {"activation": activation, "state": matrix, "float32": torch.float32}


def state_bytes(shapes: tuple[StateShape, ...], layers: int, rows: int, types: dict[str, torch.dtype]) -> int:
    """Bytes of one device row in all layers, with pending inputs of `rows` rows (0 for a cached state)."""
    each = (math.prod(item.shape) * (rows if item.pending else 1) * types[item.kind].itemsize for item in shapes)
    return layers * sum(each)
