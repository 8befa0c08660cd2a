"""The bandwidth kernel reads all of its input."""

from __future__ import annotations

import pytest
import torch

from specbatch.sweeps.machine.read import read_sum


@pytest.mark.parametrize(("block", "steps", "chunks"), [(16, 1, 1), (32, 3, 5), (128, 4, 2)])
def test_read_kernel_sums_every_chunk(device: str, block: int, steps: int, chunks: int) -> None:
    data = torch.rand(block * steps * chunks, device=device)
    sums = torch.full((chunks,), torch.nan, device=device)
    read_sum(data, sums, block=block, steps=steps, warps=4)
    torch.testing.assert_close(sums, data.view(chunks, -1).sum(1))
