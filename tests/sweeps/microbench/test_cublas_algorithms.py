"""Sizes that the search for algorithms of cuBLASLt knows, and what it refuses before it starts."""

from __future__ import annotations

import pytest
import torch

from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.dense.cublas_lt_configs import RANGES
from specbatch.sweeps.microbench.cublas_algorithms import MODELS, shapes_of, tables

OTHER_GPU = "needs a Hopper GPU"


def test_every_weight_of_the_table_can_be_searched() -> None:
    sizes = {(outputs, inputs) for model in MODELS for outputs, inputs, _ in shapes_of(model).values()}
    assert set(RANGES) <= sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "foo"}, "model='foo': use qwen3-4b, "),
        ({"gemms": "down,foo"}, "gemms='down,foo': use qkv, o, gate"),
        ({"rows": "48,"}, "rows='48,': use numbers from 1 to 8192"),
        ({"rows": "0"}, "rows='0': use numbers from 1 to 8192"),
        ({}, OTHER_GPU),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0) if message == OTHER_GPU else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(SpecbatchError, match=message):
        next(tables(**({"model": "qwen3-8b", "gemms": "down", "rows": "64"} | settings)))
