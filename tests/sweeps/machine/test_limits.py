"""Limits of a device: the data sheet, and the GEMMs of a forward pass."""

from __future__ import annotations

import pytest
import torch

from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.sweeps.machine.limits import data_sheet_bandwidth, gemm_seconds, measure_machine
from specbatch.weights.dummy import SHAPES


def test_known_devices_have_a_data_sheet() -> None:
    assert data_sheet_bandwidth("NVIDIA H200") == 4.8e12
    assert data_sheet_bandwidth("NVIDIA A100-SXM4-80GB") is None
    assert data_sheet_bandwidth(None) is None


def test_gemm_time_covers_every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_dict(SHAPES["toy"])
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("specbatch.sweeps.machine.limits.F.linear", lambda x, w: calls.append((x.shape[0], w.numel())))
    monkeypatch.setattr("specbatch.sweeps.machine.limits.median_seconds", lambda run, device, repeats: run())
    gemm_seconds(model, 5, torch.float32, torch.device("cpu"), head_rows=2)
    matrices = [shape for shape in tensor_shapes(model).values() if len(shape) == 2]
    assert sum(size for _, size in calls) == sum(a * b for a, b in matrices) - 257 * 64  # no embedding table
    assert {rows for rows, _ in calls[:-1]} == {5}
    assert calls[-1] == (2, 257 * 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_device_is_measured() -> None:
    found = measure_machine(torch.device("cuda"))
    assert all(value and value > 0 for value in found.values())
