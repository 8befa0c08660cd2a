"""The table of state sizes: its numbers, and that the one in results is current."""

from __future__ import annotations

from pathlib import Path

import torch

from specbatch.models.config import ModelConfig
from specbatch.sweeps.microbench.state_sizes import lines, sizes_of
from specbatch.weights.shapes import SHAPES

KEPT = Path(__file__).parents[3] / "results" / "states.md"


def test_states_of_nemotron_by_hand() -> None:
    found = sizes_of(ModelConfig.from_dict(SHAPES["nemotron-nano-9b-v2"]), 5)
    matrix, channels = 128 * 80 * 128 * 4, 128 * 80 + 2 * 8 * 128
    assert found.state == 27 * (matrix + 3 * channels * 2)
    assert found.pending == 27 * 5 * 2 * (channels + 128 * 80 + 8 * 128 + 128)  # conv inputs; x, B and dt
    assert found.snapshots == 5 * found.state
    assert found.moved == 2 * found.state + 2 * found.pending
    assert found.moved_snapshots == 8 * found.state


def test_single_row_needs_no_snapshot() -> None:
    found = sizes_of(ModelConfig.from_dict(SHAPES["qwen3-next-80b-a3b"]), 1)
    assert (found.snapshots, found.moved_snapshots) == (0, 2 * found.state)
    assert found.moved > found.moved_snapshots


def test_smaller_type_halves_the_matrix() -> None:
    model = ModelConfig.from_dict(SHAPES["qwen3.5-35b-a3b"])
    full, half = (sizes_of(model, 4, torch.bfloat16, state) for state in ("fp32", "bf16"))
    assert full.state - half.state == 30 * 32 * 128 * 128 * 2
    assert full.pending == half.pending


def test_table_in_results_is_current() -> None:
    assert KEPT.read_text() == "\n".join(lines()) + "\n"
