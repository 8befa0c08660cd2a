"""The number of multiprocessors by which launches are divided."""

from __future__ import annotations

import torch

from specbatch.kernels.common.multiprocessors import multiprocessors


def test_the_number_of_a_device(device: torch.device) -> None:
    wanted = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    assert multiprocessors(device) == multiprocessors(torch.device(device)) == wanted
