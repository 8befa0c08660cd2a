"""Memory and traffic of recurrent states: `python -m specbatch.sweeps.microbench.state_sizes > results/states.md`.

Of a verify of N rows some are rejected, and a state cannot forget them. Here the inputs of the rows wait until the next
verify folds in those that were accepted (`specbatch.kernels.recurrent.state_replay`); the other way keeps the state,
and the window of the convolution, after each row and copies the right one back. Computed from the shapes'
`StateShape`s; nothing is run.
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
_HEADS = ("shape", "N", "state", "ours: inputs", "snapshots", "times", "ours: moved", "snapshots: moved", "times")


@dataclass(frozen=True)
class Sizes:
    """Bytes of one sequence in all recurrent layers, with a verify of `rows` rows."""

    rows: int
    state: int
    pending: int

    @property
    def snapshots(self) -> int:
        """What is kept behind each row beside the state; a single row is never rejected."""
        return self.rows * self.state if self.rows > 1 else 0

    @property
    def moved(self) -> int:
        """A step of ours: the state is read and written, and so are the inputs of each row."""
        return 2 * (self.state + self.pending)

    @property
    def moved_snapshots(self) -> int:
        """The state is read, one is written behind each row, and the accepted one is copied back; a single row writes
        in place."""
        return self.state + self.snapshots + 2 * self.state if self.rows > 1 else 2 * self.state


def sizes_of(model: ModelConfig, rows: int, activation: torch.dtype = torch.bfloat16, state: str = "fp32") -> Sizes:
    layers, types = model.num_layers - model.attention_layers, state_types(activation, state)
    alone = state_bytes(model.state_shapes, layers, 0, types)
    return Sizes(rows, alone, state_bytes(model.state_shapes, layers, rows, types) - alone)


def lines() -> Iterator[str]:
    yield "# Memory and traffic of states: ours against snapshots per verify position\n"
    yield "Made by `python -m specbatch.sweeps.microbench.state_sizes`: sizes, not measurements."
    yield "bfloat16, matrix states float32."
    yield ""
    yield "MB of one sequence in all recurrent layers with a verify of N rows (the root and N - 1 drafts). State:"
    yield "matrix and window of the convolution, which both ways have. Ours adds the inputs of N rows, of which the"
    yield "next verify folds in the accepted ones; snapshots add N states. Moved in a step: ours reads and writes"
    yield "state and inputs; snapshots read the state, write N, and copy the accepted one back (who finds it by a"
    yield "number instead moves two states less). N = 1 is plain decoding, which needs no snapshots."
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
    """Bytes in MB, a ratio as it is."""
    return f"{value / 1e6:.1f}" if isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    print("\n".join(lines()))
