"""Verify budget: a number of rows per verify, spent on the drafts that are most likely to be accepted.

A verify of B requests computes ceil(B * budget) rows; the budget is fixed, or chosen by the host before each step
(`engine.schedule.verify_rows`). One row of each request is its newest token; the others are
drafts, the first few of each chain. The value of draft k of a request is the probability that it is reached and
accepted, c_1 c_2 .. c_k, where c_j is the predicted probability that draft j is accepted if those before it are. The
drafts with the largest values are verified. Values never rise along a chain, so these drafts are the first ones of each
request, and no other choice of the same size has a larger expected number of accepted drafts.

c_j follows from the drafter's `Proposal.confidence`, or without one from the share of the request's recent drafts that
was accepted. Neither is a probability of acceptance: the most likely token of a draft model is accepted more often than
its probability says, and a sampled one may be accepted whatever it says. c_j is therefore the share of the run's drafts
with about this confidence that was accepted, counted separately for greedy and for sampled requests, and for the first
draft of a chain, the second, the next two and those after them. Everything happens
on the device, and shapes depend on B only. The scheduler of "DSpark: Confidence-Scheduled Speculative Decoding"
(github.com/deepseek-ai/DeepSpec, section 5.2) ranks drafts by the same product, and also chooses the number of rows.

Why this is lossless. In greedy requests, with n-gram lookup, with a corpus and in deterministic mode a draft is
accepted if it equals the token that the target chooses: the tokens are the target's own, however many are compared.
Drafts that a model samples are accepted by rejection sampling. There the choice must not depend on the draft that it
decides on: whether draft k is verified may depend on the drafts before it, never on draft k itself. A verify that ended
before each unlikely token would emit the likely ones too often.

* c_k is a function of the drafts before k (`Proposal.confidence`): the value of draft k is known before it is sampled.
* Because values never rise along a chain, choosing the M largest equals M times choosing the best of all drafts that
  are next in their chains. In this order every draft is chosen before it is looked at; until then only earlier drafts
  of its chain and drafts of other requests were looked at. Given these, it still has the distribution that it is
  verified with, if requests draw independent random numbers. Two requests may have the same seed; with a budget the
  random numbers for sampled drafts therefore depend on the slot of a request, too.
* The counts are from earlier steps, so they depend on no draft of this one. Nor does M: it is given before the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from specbatch.core.step_input import Proposal, StepInput
from specbatch.engine.device.acceptance import Accepted
from specbatch.engine.device.step import DecodeStep, Verified
from specbatch.kernels.common.upload import upload
from specbatch.kernels.sampling.verify_budget import KINDS, learn, spend
from specbatch.runtime.cuda_graphs import Result

_SLOT_SEED = 0x2545F4914F6CDD1D  # odd: seeds of different slots differ


@dataclass(frozen=True)
class VerifyBudget:
    """Spends the rows of verifies.

    mean         rows per request, at least 1; None if each step has its own
    mixes_seeds  whether drafts are verified by rejection sampling
    counts       int64 [2, KINDS]: drafts that were compared, and accepted, by confidence and place; of greedy requests,
                 of sampled ones, and of padding
    recent       float32 [2, slots + 1]: the same of each request lately
    """

    mean: float | None
    mixes_seeds: bool
    counts: torch.Tensor
    recent: torch.Tensor

    @classmethod
    def of(cls, mean: float | None, slots: int, device: torch.device, *, mixes_seeds: bool) -> VerifyBudget:
        """slots: without the padding slot."""
        counts = torch.zeros(2, KINDS, dtype=torch.int64, device=device)
        return cls(mean, mixes_seeds, counts, torch.zeros(2, slots + 1, device=device))

    def rows(self, batch: int, budget: float | None = None) -> int:
        """Rows of a verify of so many requests."""
        each = self.mean if budget is None else budget
        assert each is not None, "this step needs a budget"
        return math.ceil(round(batch * each, 6))

    def admit(self, slots: list[int]) -> None:
        """Forget what is known of slots that other requests get."""
        self.recent.index_fill_(1, upload(slots, self.recent.device), 0.0)

    def forget(self) -> None:
        """Forget everything that was learned."""
        self.counts.zero_()
        self.recent.zero_()

    def begin(self, step: StepInput) -> StepInput:
        """The step as the drafter sees it."""
        sampling = step.sampling
        if self.mixes_seeds and sampling.flags.sampled:
            sampling = replace(sampling, seeds=sampling.seeds + step.slots * _SLOT_SEED)
        return replace(step, sampling=sampling, needs_confidence=True)

    def spend(self, step: StepInput, proposal: Proposal) -> Proposal:
        """Choose the drafts that are verified: the proposal with these, and their rows."""
        sampling, total = step.sampling, self.rows(len(step.slots), step.budget)
        temperature = sampling.temperature if sampling.flags.sampled else None
        with_values = step.budget is not None
        return spend(self.counts, self.recent, step.slots, proposal, temperature, total, with_values=with_values)

    def learn(self, step: StepInput, proposal: Proposal, accepted: torch.Tensor) -> None:
        """Observe a verify that accepted so many drafts int64 [B]."""
        learn(self.counts, self.recent, step.slots, proposal, accepted)


@dataclass(frozen=True)
class BudgetedStep(DecodeStep):
    """A decode step that verifies the drafts that its budget has rows for."""

    budget: VerifyBudget = field(kw_only=True)

    def begin(self, step: StepInput) -> StepInput:
        return self.budget.begin(step)

    def propose(self, step: StepInput) -> Proposal:
        proposal = super().propose(step)
        return self.budget.spend(step, proposal) if step.num_drafts else proposal

    def end(self, step: StepInput, proposal: Proposal, verified: Verified) -> Result:
        return super().end(step, proposal, verified)._replace(values=proposal.values)

    def commit(self, step: StepInput, proposal: Proposal, verified: Verified, accepted: Accepted) -> None:
        super().commit(step, proposal, verified, accepted)
        if step.num_drafts:
            self.budget.learn(step, proposal, accepted.accepted)

    def admit(self, slots: list[int]) -> None:
        self.budget.admit(slots)

    def forget(self) -> None:
        self.budget.forget()
