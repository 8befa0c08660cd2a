"""Sizes of launches: tiles against Triton's functions, and the number of multiprocessors."""

from __future__ import annotations

import torch
import triton

from specbatch.kernels.common.sizes import cdiv, multiprocessors, next_power_of_2, tile_side


def test_sizes_are_those_of_triton() -> None:
    for size in (*range(1, 300), 65_535, 65_536, 65_537):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        assert tile_side(size) == max(16, triton.next_power_of_2(size))
        assert all(cdiv(size, part) == triton.cdiv(size, part) for part in (1, 16, 64, 1000))


def test_multiprocessors_of_a_device(device: torch.device) -> None:
    wanted = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    assert multiprocessors(device) == multiprocessors(torch.device(device)) == wanted
