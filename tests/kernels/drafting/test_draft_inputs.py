"""Inputs of draft heads and the feature buffer match the torch references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.drafting import draft_inputs, draft_inputs_triton

WIDTHS = [24, 1030]


class Case:
    """B sequences in a batch of device rows, two of them padding; each buffers its own number of features."""

    def __init__(self, batch: int, most: int, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(batch * 100 + most)

        def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator).to(device)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.float16)

        count = batch + 3
        self.rows = (torch.randperm(count - 1, generator=generator)[:batch] + 1).to(device)
        if batch > 2:
            self.rows[:2] = 0
        self.tokens = numbers(0, 19, count, 60)
        self.lengths = numbers(most, 50, batch)
        self.ready = numbers(1, most + 1, count)
        self.lengths[self.rows == 0], self.ready[0] = 1, 1
        self.waiting = noise(count, most + batch % 2, width)  # there may be room for more
        self.embedding = noise(19, width)
        self.noise, self.numbers = noise, numbers


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("batch", "most"), [(1, 4), (5, 3), (2, 1)])
def test_pending_inputs(batch: int, most: int, width: int, device: torch.device) -> None:
    case = Case(batch, most, width, device)
    given = (case.tokens, case.rows, case.lengths, case.waiting, case.ready, case.embedding, most)
    wanted, found = draft_inputs.pending_inputs_ref(*given), draft_inputs_triton.pending_inputs(*given)
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        assert torch.equal(one, other), name
    root = case.tokens[case.rows, case.lengths]
    assert torch.equal(found.embedded[found.newest], case.embedding[root])
    assert torch.equal(found.positions[found.newest], case.lengths - 1)
    assert torch.equal(found.places[-1], case.lengths + most - 2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("batch", "parents", "topk"), [(1, 1, 4), (3, 3, 3)])
def test_beam_inputs(batch: int, parents: int, topk: int, width: int, device: torch.device) -> None:
    case = Case(batch, 2, width, device)
    tokens, origin = case.numbers(0, 19, batch, topk), case.numbers(0, parents, batch, topk)
    given = (tokens, origin, case.noise(batch, parents, width), case.lengths, 2, case.embedding)
    for one, other in zip(draft_inputs_triton.beam_inputs(*given), draft_inputs.beam_inputs_ref(*given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("batch", "most"), [(1, 4), (5, 3), (2, 1)])
def test_pending_feature_buffer(batch: int, most: int, width: int, tree: bool, device: torch.device) -> None:
    case = Case(batch, most, width, device)
    nodes = most + 5 if tree else most  # or fewer than there is room for
    path = torch.stack([torch.randperm(nodes) for _ in range(batch)]).to(device) if tree else None
    packed = case.numbers(0, most, batch, nodes + 3)
    given = (case.noise(batch * nodes, width), case.rows, packed[:, nodes], path)
    wanted, ready = case.waiting.clone(), case.ready.clone()
    draft_inputs.buffer_features_ref(*given, wanted, ready)
    draft_inputs_triton.buffer_features(*given, case.waiting, case.ready)
    assert torch.equal(case.waiting[1:], wanted[1:])
    assert torch.equal(case.ready, ready)
    assert case.ready[0] == 1
