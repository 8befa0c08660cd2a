"""Kernels of a verify budget give exactly what their references give: choice, rows and counts."""

from __future__ import annotations

import math

import pytest
import torch
from crossed import first_quick
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from specbatch.kernels.sampling import verify_budget_triton
from specbatch.kernels.sampling.accept import Proposal
from specbatch.kernels.sampling.verify_budget import KINDS, LEVELS, MOST, learn_ref, spend_ref


class Step:
    """Random requests, of which some are padding, with few values of confidence, hence many ties."""

    def __init__(
        self, batch: int, most: int, device: torch.device, *, seed: int, values: int = 3, has_confidence: bool = True
    ) -> None:
        def random(limit: int, *shape: int) -> torch.Tensor:
            return torch.randint(limit, shape, generator=generator)

        generator = torch.Generator().manual_seed(seed)
        compared = random(MOST + 99, KINDS)
        compared[1::2] = MOST - 1 - random(9, len(compared[1::2]))  # a few drafts before they are halved
        self.counts = torch.stack([compared, (compared * 0.7).long()])
        self.counts[:, : LEVELS // 2] = 0
        self.counts[:, 3 * LEVELS : 5 * LEVELS] = 0
        self.recent = torch.rand(2, batch + 4, generator=generator).sort(0, descending=True).values * 9
        self.slots = torch.randperm(batch + 3, generator=generator)[:batch] + 1
        self.slots[random(4, batch) == 0] = 0
        chances = torch.tensor([0.0, 1.0, math.nan, math.inf, *torch.rand(values, generator=generator).tolist()])
        confidence = chances[random(len(chances), batch, most)] if has_confidence else None
        self.drafts = Proposal(random(9, batch, most), random(most + 1, batch), confidence=confidence)
        self.temperature = random(2, batch).float()
        for name, value in vars(self).items():
            setattr(self, name, value.to(device) if isinstance(value, torch.Tensor) else self._moved(value, device))

    @staticmethod
    def _moved(drafts: Proposal, device: torch.device) -> Proposal:
        return Proposal(*(None if part is None else part.to(device) for part in drafts))

    def spend(self, total: int, *, is_sampled: bool) -> Proposal:
        """The kernel's choice, which is also that of the reference on a CPU: a GPU adds and multiplies alike, but torch
        takes the product of a chain in another order there."""
        arguments = self.counts, self.recent, self.slots, self.drafts, self.temperature if is_sampled else None
        ours = verify_budget_triton.spend(*arguments, total, with_values=True)
        on_cpu = [self._moved(part, torch.device("cpu")) if isinstance(part, Proposal) else
                  part if part is None else part.cpu() for part in arguments]  # fmt: skip
        theirs = spend_ref(*on_cpu, total, with_values=True)
        assert ours.drafted.tolist() == theirs.drafted.tolist()
        for found, wanted in zip(
            (ours.levels, ours.values, *(ours.packed or ())),
            (theirs.levels, theirs.values, *(theirs.packed or ())),
            strict=True,
        ):
            assert found is not None
            assert wanted is not None
            assert found.tolist() == wanted.tolist()
        return ours


SIZES = [(5, 3, 9), (1, 1, 1), (1, 7, 8), (3, 4, 3), (3, 4, 15), (130, 15, 400), (9, 63, 200), (512, 2, 700)]


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("has_confidence", [False, True])
@pytest.mark.parametrize(("batch", "most", "total"), first_quick(6, SIZES))
def test_spend_is_the_reference(
    batch: int, most: int, total: int, has_confidence: bool, is_sampled: bool, device: torch.device
) -> None:
    step = Step(batch, most, device, seed=batch + most, has_confidence=has_confidence)
    step.spend(total, is_sampled=is_sampled)


@examples(25)
@given(data=st.data())
def test_any_total_is_spent_as_by_the_reference(data: st.DataObject, device: torch.device) -> None:
    batch, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    step = Step(batch, most, device, seed=data.draw(st.integers(0, 99)), values=data.draw(st.integers(1, 9)))
    step.spend(data.draw(st.integers(batch, batch * (most + 1))), is_sampled=data.draw(st.booleans()))


def test_strided_confidence(device: torch.device) -> None:
    step = Step(4, 3, device, seed=0)
    assert step.drafts.confidence is not None
    apart = torch.nn.functional.pad(step.drafts.confidence, (0, 2), value=0.5)[:, :3].T.contiguous().T
    wanted = step.spend(9, is_sampled=True)
    step.drafts = step.drafts._replace(confidence=apart)
    assert step.spend(9, is_sampled=True).drafted.tolist() == wanted.drafted.tolist()


@pytest.mark.parametrize(("batch", "most", "total"), first_quick(4, [SIZES[0], *SIZES[-3:], *SIZES[1:5]]))
def test_learn_is_the_reference(batch: int, most: int, total: int, device: torch.device) -> None:
    step = Step(batch, most, device, seed=batch)
    spent = step.spend(total, is_sampled=True)
    accepted = torch.randint(most + 1, (batch, 3), device=device)[:, 1].minimum(spent.drafted)
    packed = torch.stack([accepted, accepted], 1)
    theirs = step.counts.clone(), step.recent.clone()
    learn_ref(*theirs, step.slots, spent, accepted)
    verify_budget_triton.learn(step.counts, step.recent, step.slots, spent, packed[:, 1])
    assert torch.equal(step.counts, theirs[0])
    assert torch.equal(step.recent[:, 1:], theirs[1][:, 1:])
