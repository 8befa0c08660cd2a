"""A rehearsal computes nothing and changes nothing, and its tensors have the shapes of real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from specbatch.kernels.common.rehearsal import ValueNeededError, is_rehearsing, rehearse, rehearsing

X, W, INDEX = torch.randn(8, 16), torch.randn(4, 16), torch.tensor([7, 2, 2])
OPERATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: F.linear(X, W),
    "mm of a transposed": lambda: torch.mm(X, W.t()).t(),
    "out": lambda: torch.mm(X, W.t(), out=torch.empty(8, 4)),
    "index": lambda: X[INDEX],
    "embedding": lambda: F.embedding(INDEX, X),
    "gather": lambda: X.gather(1, INDEX.expand(8, 3)),
    "topk": lambda: X.topk(3).values,
    "indices": lambda: X.topk(3).indices + 1,
    "type": lambda: X.half(),
    "unbind": lambda: X.unbind(1)[2],
    "cat": lambda: torch.cat([X, X.flip(0)], 1),
    "reshape": lambda: X.t().reshape(4, -1),
    "where": lambda: torch.where(X > 0, X, 0.0),
    "attention": lambda: F.scaled_dot_product_attention(*[X.view(1, 2, 4, 16)] * 3),
    "in place": lambda: X.clone().add_(1).mul_(2),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_shapes_types_and_strides_are_real(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        expected = OPERATIONS[name]()
        with rehearsing():
            for _ in range(2):  # the second one is known
                found = OPERATIONS[name]()
                assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_nothing_is_written() -> None:
    state, table, generator = torch.randn(8, 16), torch.arange(8), torch.get_rng_state()
    before = state.clone(), table.clone()
    with torch.inference_mode(), rehearsing():
        state.add_(1)
        state[INDEX] = 0
        state[:, 0].fill_(3)
        state.index_copy_(0, INDEX, state[:3])
        torch.mm(state, W.t(), out=torch.empty(8, 4))
        table.scatter_(0, INDEX, 5)
        torch.add(table, 1, out=table)
        assert is_rehearsing()
    assert torch.equal(state, before[0])
    assert torch.equal(table, before[1])
    assert torch.equal(torch.get_rng_state(), generator)
    assert not is_rehearsing()


def test_indices_that_are_not_computed_are_not_used() -> None:
    """What is in memory where they would be may be no index."""
    with torch.inference_mode(), rehearsing():
        indices = (X.topk(3).indices + (1 << 40)).flatten()
        assert X[indices].shape == (24, 16)
        assert F.embedding(indices, X).shape == (24, 16)


def test_new_tensors_with_given_values_are_real() -> None:
    with torch.inference_mode(), rehearsing():
        made = torch.zeros(3), torch.full((2,), 5), torch.arange(4), torch.tensor([1, 2]), torch.zeros_like(INDEX)
    assert [item.tolist() for item in made] == [[0, 0, 0], [5, 5], [0, 1, 2, 3], [1, 2], [0, 0, 0]]


@pytest.mark.parametrize(
    "program",
    [
        lambda: X.sum().item(),
        lambda: bool((X > 0).all()),
        lambda: X[X > 0],
        lambda: X.nonzero(),
        lambda: torch.equal(X, X),
        lambda: torch.rand_like(X),
    ],
)
def test_a_value_that_is_needed_ends_a_program(program: Callable[[], object]) -> None:
    generator, went_on = torch.get_rng_state(), []

    def whole() -> None:
        program()
        went_on.append(True)

    with torch.inference_mode(), rehearsing():
        with pytest.raises(ValueNeededError):
            program()
        rehearse(whole)
    assert not went_on
    assert torch.equal(torch.get_rng_state(), generator)
