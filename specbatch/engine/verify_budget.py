"""Verify budget: a fixed number of rows per verify, spent on the drafts that are most likely to be accepted.

A verify of B requests computes ceil(B * budget) rows. Each request has one for its newest token; the others go to
drafts, of which each request verifies the first few. The value of draft k of a request is the probability that it is
reached and accepted, c_1 c_2 .. c_k, where c_j is the predicted probability that draft j is accepted if those before it
are. The drafts with the largest values are verified. Values fall along a chain, so that these are the first ones of
each request, and no other choice of as many has a larger expected number of accepted drafts.

c_j is the drafter's `Proposal.confidence`, or without one the share of the request's recent drafts that was accepted.
Everything happens on the device, and shapes depend on B only. The scheduler of "DSpark: Confidence-Scheduled
Speculative Decoding" (github.com/deepseek-ai/DeepSpec, section 5.2) ranks drafts by the same product, and also chooses
the number of rows.

Why this is lossless. Drafts are accepted by comparison with the token that the target samples in greedy requests, with
n-gram lookup, a corpus, and in deterministic mode: the tokens are the target's own, however many are compared. Drafts
sampled by a model are accepted by rejection sampling, and there the choice must not know what it chooses: whether draft
k is verified may depend on the drafts before it, never on draft k itself. A verify that ended before each unlikely
token would emit the likely ones too often.

* c_k is a function of the drafts before k (`Proposal.confidence`): the value of draft k is known before it is sampled.
* Because values fall along a chain, choosing the M largest equals choosing M times the best one of all drafts that are
  next in their chains. In this order every draft is chosen before it is looked at, and what was looked at until then
  are earlier drafts of its chain and drafts of other requests. Given these, it still has the distribution that it is
  verified with, if requests draw independent random numbers. Two requests may have the same seed; with a budget the
  random numbers for sampled drafts therefore depend on the slot of a request, too.
* The acceptance of earlier steps is the past of all this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from specbatch.core.packed_rows import PackedRows, pack_rows
from specbatch.core.step_input import Proposal, StepInput
from specbatch.kernels.common.upload import upload

GUESS, WEIGHT = 0.7, 2.0  # acceptance of a new request, and how many drafts it counts as
MEMORY = 0.9  # weight of a draft after another verify. A request that has no drafts verified returns to the guess
_SLOT_SEED = 0x2545F4914F6CDD1D  # odd: seeds of different slots differ


def verified_drafts(conditional: torch.Tensor, drafted: torch.Tensor, total: int) -> torch.Tensor:
    """How many drafts of each request are verified, `total` in all: int64 [B], for conditional probabilities of
    acceptance float32 [B, n] and drafted int64 [B], of which the first ones count.

    Among equal values earlier drafts come first, then earlier requests. Drafts that do not count come last; they fill
    the rows that nothing else takes.
    """
    batch, most = conditional.shape
    values = conditional.nan_to_num(0.0).clamp(0.0, 1.0).cumprod(1)
    place = torch.arange(most, device=drafted.device)
    values = values.masked_fill(place >= drafted[:, None], -1.0)
    # By position first, so that the stable sort keeps this order among equals.
    chosen = values.T.flatten().sort(descending=True, stable=True).indices[:total]
    return torch.zeros_like(drafted).index_add_(0, chosen % batch, torch.ones_like(chosen))


@dataclass(frozen=True)
class VerifyBudget:
    """Spends the rows of verifies.

    mean         rows per request, at least 1
    tried        float32 [slots + 1]: drafts that were compared lately, and
    right        float32 [slots + 1]: of which were accepted. Of a drafter without confidence
    mixes_seeds  whether drafts are verified by rejection sampling
    """

    mean: float
    tried: torch.Tensor
    right: torch.Tensor
    mixes_seeds: bool

    @classmethod
    def of(cls, mean: float, slots: int, device: torch.device, *, mixes_seeds: bool) -> VerifyBudget:
        """slots: without the padding slot."""
        tried, right = torch.zeros(2, slots + 1, device=device)
        return cls(mean, tried, right, mixes_seeds)

    def rows(self, batch: int) -> int:
        """Rows of a verify of so many requests."""
        return math.ceil(round(batch * self.mean, 6))

    def admit(self, slots: list[int]) -> None:
        """Forget what is known of slots that other requests get."""
        index = upload(slots, self.tried.device)
        self.tried.index_fill_(0, index, 0.0)
        self.right.index_fill_(0, index, 0.0)

    def begin(self, step: StepInput) -> StepInput:
        """The step as the drafter sees it."""
        sampling = step.sampling
        if self.mixes_seeds and sampling.flags.sampled:
            sampling = replace(sampling, seeds=sampling.seeds + step.slots * _SLOT_SEED)
        return replace(step, sampling=sampling, needs_confidence=True)

    def spend(self, step: StepInput, proposal: Proposal) -> tuple[Proposal, PackedRows]:
        """The proposal with as many drafts as are verified, and the rows of the verify."""
        batch, most = proposal.tokens.shape
        conditional, drafted = proposal.confidence, proposal.drafted
        if conditional is None:
            tried, right = self.tried[step.slots], self.right[step.slots]
            conditional = ((right + GUESS * WEIGHT) / (tried + WEIGHT))[:, None].expand(-1, most)
        total = self.rows(batch)
        # Padding requests have slot 0.
        count = verified_drafts(conditional, torch.where(step.slots > 0, drafted, 0), total - batch)
        packed = pack_rows(count + 1, most + 1, total)
        return proposal._replace(drafted=torch.minimum(count, drafted)), packed

    def learn(self, step: StepInput, proposal: Proposal, accepted: torch.Tensor) -> None:
        """Observe a verify of this proposal that accepted so many drafts [B]."""
        if proposal.confidence is not None:
            return
        compared = torch.minimum(accepted + 1, proposal.drafted)
        self.tried[step.slots] = self.tried[step.slots] * MEMORY + compared
        self.right[step.slots] = self.right[step.slots] * MEMORY + accepted
