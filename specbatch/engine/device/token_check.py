"""Tensor parallelism: a check that all ranks choose the same tokens.

Each decode step leaves a digest of its tokens on the device (`kernels.sampling.token_digest`). Every rank copies the
last digests to its host after the same calls, without waiting for the device, and rank 0 compares them. Nothing is
added to the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specbatch.core.async_copy import AsyncCopy
from specbatch.core.step_input import Proposal, StepInput
from specbatch.engine.device.acceptance import Accepted
from specbatch.engine.device.step import DecodeStep, Verified
from specbatch.kernels.sampling.token_digest import KEPT, new_history, token_digest

EVERY = KEPT // 2  # steps; recording a graph may add some on the device


@dataclass(frozen=True)
class DigestedStep(DecodeStep):
    """A decode step that adds a digest of its tokens to `history`, see `new_history`."""

    history: torch.Tensor = field(kw_only=True)

    def commit(self, step: StepInput, proposal: Proposal, verified: Verified, accepted: Accepted) -> None:
        super().commit(step, proposal, verified, accepted)
        token_digest(self.history, proposal.tokens, accepted.packed, step.slots, step.lengths)


class TokenCheck:
    """The digests of one rank. `report` gets the number of a copy and the history that it holds."""

    def __init__(self, device: torch.device) -> None:
        self.history = new_history(device)
        self.report: Callable[[int, list[int]], None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._steps = self._copies = 0
        self._pending: AsyncCopy | None = None

    def step(self) -> None:
        """Count a decode step. After some of them the digests are copied, and those copied before are reported."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self._report()
            self._copy()

    def flush(self) -> None:
        """Report everything."""
        self._report()
        self._copy()
        self._report()

    def _copy(self) -> None:
        self._pending = AsyncCopy(self.history.clone(), stream=self._stream)

    def _report(self) -> None:
        if self._pending is not None and self.report is not None:
            self._copies += 1
            self.report(self._copies, self._pending.wait()[0])
        self._pending = None


def first_difference(histories: Sequence[list[int]]) -> tuple[int, list[int]] | None:
    """Of copies with the same number, by rank: the first step in which any differs from rank 0's, and the ranks that
    differ in it. None: they are equal."""
    [steps, *first], others = histories[0], histories[1:]
    for step in range(max(steps - KEPT, 0), steps):
        place = step % KEPT
        ranks = [rank for rank, (_, *found) in enumerate(others, start=1) if found[place] != first[place]]
        if ranks:
            return step, ranks
    return None
