"""Memory and traffic of recurrent states: replayed inputs and snapshots per verify position, computed from shapes.

Some of the N rows of a verify are rejected, and a state cannot drop them. specbatch keeps the inputs of the rows until
the next verify replays those that were accepted (`specbatch.kernels.recurrent.state_replay`); the alternative keeps the
state, and the window of the convolution, after each row and copies the right one back. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate

from specbatch.memory.recurrent_state import state_bytes, state_types
from specbatch.models.config import ModelConfig
from specbatch.weights.shapes import SHAPES

MODELS = ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "nemotron-nano-9b-v2")
ROWS = (1, 4, 8, 16)
_HEADS = (
    "shape",
    "N",
    "state",
    "specbatch: inputs",
    "snapshots",
    "ratio",
    "specbatch: moved",
    "snapshots: moved",
    "ratio",
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one sequence in all recurrent layers for a verify of `rows` rows."""

    rows: int
    state: int
    pending: int

    @property
    def snapshots(self) -> int:
        """Kept after each row, besides the state; a single row is never rejected."""
        return self.rows * self.state if self.rows > 1 else 0

    @property
    def moved(self) -> int:
        """A step of specbatch reads and writes the state and the inputs of each row."""
        return 2 * (self.state + self.pending)

    @property
    def moved_snapshots(self) -> int:
        """Reads the state, writes one after each row, and copies the accepted one back; a single row updates in
        place."""
        return self.state + self.snapshots + 2 * self.state if self.rows > 1 else 2 * self.state


def sizes_of(model: ModelConfig, rows: int, activation: torch.dtype = torch.bfloat16, state: str = "fp32") -> Sizes:
    layers, types = model.recurrent_layers, state_types(activation, state)
    alone = state_bytes(model.state_shapes, layers, 0, types)
    return Sizes(rows, alone, state_bytes(model.state_shapes, layers, rows, types) - alone)


def lines() -> Iterator[str]:
    yield "# Memory and traffic of states: replayed inputs against snapshots per verify position\n"
    yield "Made by `python -m specbatch.sweeps.microbench state-sizes`: computed, not measured."
    yield "BF16, matrix states FP32."
    yield ""
    yield "MB of one sequence in all recurrent layers with a verify of N rows (the root and N - 1 drafts). State:"
    yield "matrix and window of the convolution, which both ways have. specbatch adds the inputs of N rows, of which"
    yield "the next verify replays the accepted ones; snapshots add N states. Moved in a step: specbatch reads and"
    yield "writes state and inputs; snapshots read the state, write N, and copy the accepted one back (an index in"
    yield "place of the copy moves two states less). N = 1 is decoding without speculation: no snapshots needed."
    yield ""
    rows = []
    for name in MODELS:
        model = ModelConfig.from_dict(SHAPES[name])
        for count in ROWS:
            found = sizes_of(model, count)
            kept = (found.state, found.pending, found.snapshots, found.snapshots / found.pending)
            moved = (found.moved, found.moved_snapshots, found.moved_snapshots / found.moved)
            rows.append([name, count, *map(_cell, kept + moved)])
    yield tabulate(rows, headers=_HEADS, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 8))


def _cell(value: float) -> str:
    """Bytes in MB; a ratio unchanged."""
    return f"{value / 1e6:.1f}" if isinstance(value, int) else f"{value:.2f}"


def main() -> None:
    print("\n".join(lines()))
