"""gather_rows and ring_push match the torch references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.elementwise import gather_rows, gather_rows_triton


@pytest.mark.parametrize(("one", "other"), [((24,), (40,)), ((1500,), (8,)), ((30,), (2100,)), ((), ())])
def test_gather_rows(one: tuple[int, ...], other: tuple[int, ...], device: torch.device) -> None:
    a = torch.randn(9, *one, device=device, dtype=torch.float16)
    b = torch.randint(-(1 << 62), 1 << 62, (9, *other), device=device)
    which = torch.tensor([8, 0, 3, 3], device=device)
    found = gather_rows_triton.gather_rows(a, b, which)
    assert torch.equal(found[0], a[which])
    assert torch.equal(found[1], b[which])


@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (128, 19)])
def test_ring_push(shape: tuple[int, int], device: torch.device) -> None:
    """A ring slot may have more rows than are pushed."""
    theirs = torch.full((4, shape[0] + 2, shape[1]), -1, device=device)
    ours, turns = theirs.clone(), torch.tensor([[2], [2]], device=device)
    for _ in range(3):
        item = torch.randint(0, 1 << 40, shape, device=device)
        gather_rows.ring_push_ref(theirs[:, : shape[0]], turns[0], item)
        gather_rows_triton.ring_push(ours[:, : shape[0]], turns[1], item)
        assert torch.equal(ours[int(turns[1]), : shape[0]], item)
        assert torch.equal(ours, theirs)
    assert turns.tolist() == [[1], [1]]
