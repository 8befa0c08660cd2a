"""token_digest: kernel and reference agree, and the digest changes with whatever counts and with nothing else."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.sampling.token_digest import KEPT, new_history, token_digest_ref
from specbatch.kernels.sampling.token_digest_triton import token_digest


def step(batch: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Drafts, packed, slots and lengths: of the second row one draft less counts, and the third is padding."""
    drafts = torch.randint(0, 150_000, (batch, count), device=device)
    packed = torch.randint(0, 150_000, (batch, count + 4), device=device)
    packed[:, -3], packed[:, -2], packed[:, -1] = count // 2, count, 1
    packed[1:2, -2] = max(count - 1, 0)
    slots = torch.arange(1, batch + 1, device=device)
    slots[2:3] = 0
    return [drafts, packed, slots, torch.randint(1, 9_000, (batch,), device=device)]


@pytest.mark.parametrize(("batch", "count"), [(1, 0), (1, 1), (5, 3), (130, 7), (3, 63)])
def test_kernel_is_the_reference(batch: int, count: int, device: torch.device) -> None:
    ours, theirs = new_history(device), new_history(device)
    ours[0] = theirs[0] = KEPT - 1
    for _ in range(3):
        drafts, *others = step(batch, count, device)
        token_digest_ref(theirs, drafts, *others)
        token_digest(ours, torch.nn.functional.pad(drafts, (0, 5))[:, :count], *others)  # strided
        assert torch.equal(ours, theirs)
    assert ours[0] == KEPT + 2
    assert (ours[1:] != 0).nonzero()[:, 0].tolist() == [0, 1, KEPT - 1]
    assert len(set(ours[[1, 2, KEPT]].tolist())) == 3


def test_digest_changes_with_what_counts_only(device: torch.device) -> None:
    count, tensors = 4, step(3, 4, device)

    def digest() -> int:
        history = new_history(device)
        token_digest_ref(history, *tensors)
        return int(history[1])

    first = digest()
    drafts, packed, _, lengths = tensors
    accepted = count // 2
    cells = [(drafts, column, column < count) for column in range(count)]
    cells += [(packed, column, column <= accepted) for column in range(count + 1)]
    cells += [(packed, count + 3, True), (lengths[:, None], 0, True)]
    for row in range(3):
        for tensor, column, matters in cells:
            tensor[row, column] += 1
            is_dropped = row == 2 or (row == 1 and tensor is drafts and column == count - 1)
            assert (digest() != first) == (matters and not is_dropped), (row, column)
            tensor[row, column] -= 1
    # Differences that cancel out in a weighted sum.
    tensors[1][0, 0] += 3
    tensors[1][0, 1] -= 1
    assert digest() != first
