"""Single-row steps that update the recurrent state in place match verifies whose row is replayed by the next step."""

from __future__ import annotations

import torch

from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.recurrent.gated_delta import delta_verify_ref
from specbatch.kernels.recurrent.inputs import DeltaHeads, DeltaInputs, Pending, SsdHeads, SsdInputs, SsdMemory
from specbatch.kernels.recurrent.mamba2 import ssd_verify_ref
from specbatch.kernels.recurrent.state_replay import StateReplay
from specbatch.sweeps.microbench.recurrent_in_place import delta_in_place, mamba_in_place

BATCH = 3


def replays(device: torch.device) -> list[StateReplay]:
    """A verify after a prompt, and the next verify, on slots 1 and up."""
    rows = torch.arange(1, BATCH + 1, device=device)
    return [StateReplay(rows, torch.full((BATCH + 1,), count, device=device)) for count in (0, 1)]


def test_gated_delta_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    gates = [torch.randn(2, device=device) for _ in range(2)]
    heads = DeltaHeads(1, 2, 32, 32, *gates, torch.ones(32, device=device), 1e-6)
    columns = [torch.randn(BATCH, width, device=device) for width in (128, 64, 2, 2)]
    state = torch.randn(BATCH, 2, 32, 32, device=device)
    shapes = (1, 32), (2, 32), (2,)
    pending = Pending(*(torch.zeros(BATCH + 1, 1, *shape, device=device) for shape in shapes))
    rows = torch.cat([state[:1], state])  # device row 0 is padding
    wanted, _ = (delta_verify_ref(DeltaInputs(*columns, heads, rows), pending, replay) for replay in replays(device))
    y = delta_in_place(DeltaInputs(*columns, heads, state))
    torch.testing.assert_close(state, rows[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_mamba2_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    heads = SsdHeads(4, 16, 2, 16, *torch.randn(3, 4, device=device), Norm(torch.ones(64, device=device), 1e-5))
    columns = [torch.randn(BATCH, width, device=device) for width in (128, 4, 64)]
    state = torch.randn(BATCH, 4, 16, 16, device=device)
    rows = torch.cat([state[:1], state])
    memory = SsdMemory(rows, torch.zeros(BATCH + 1, 1, 64 + 32 + 4, device=device))
    wanted, _ = (ssd_verify_ref(SsdInputs(*columns, heads, memory), replay) for replay in replays(device))
    y = mamba_in_place(SsdInputs(*columns, heads, SsdMemory(state, memory.pending)))
    torch.testing.assert_close(state, rows[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
