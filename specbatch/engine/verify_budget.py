"""Verify budget: a fixed number of rows per verify, spent on the drafts that are most likely to be accepted.

A verify of B requests computes ceil(B * budget) rows. One row of each request is its newest token; the others are
drafts, the first few of each chain. The value of draft k of a request is the probability that it is reached and
accepted, c_1 c_2 .. c_k, where c_j is the predicted probability that draft j is accepted if those before it are. The
drafts with the largest values are verified. Values never rise along a chain, so these drafts are the first ones of each
request, and no other choice of the same size has a larger expected number of accepted drafts.

c_j follows from the drafter's `Proposal.confidence`, or without one from the share of the request's recent drafts that
was accepted. Neither is a probability of acceptance: the most likely token of a draft model is accepted more often than
its probability says, and a sampled one may be accepted whatever it says. c_j is therefore the share of the run's drafts
with about this confidence that was accepted, counted separately for greedy and for sampled requests. Everything happens
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
* The counts are from earlier steps, so they depend on no draft of this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specbatch.core.packed_rows import PackedRows, pack_rows
from specbatch.core.step_input import Proposal, StepInput
from specbatch.kernels.common.upload import upload

LEVELS = 16  # of confidence, whose drafts are counted together
WEIGHT = 8.0  # drafts that the confidence itself counts as
MOST = 1 << 12  # counted drafts of a level; then both counts are halved, so that newer drafts weigh more
# Of a drafter without confidence: the acceptance of a new request, how many drafts it counts as, and the weight of a
# draft after another verify. A request that has no drafts verified returns to the guess.
GUESS, GUESSED, MEMORY = 0.7, 2.0, 0.9
_SLOT_SEED = 0x2545F4914F6CDD1D  # odd: seeds of different slots differ


class Spending(NamedTuple):
    """proposal: with as many drafts as are verified; packed: the rows of the verify; levels int64 [B, n]: of the
    confidence in each draft, for `VerifyBudget.learn`."""

    proposal: Proposal
    packed: PackedRows
    levels: torch.Tensor


def verified_drafts(conditional: torch.Tensor, drafted: torch.Tensor, total: int) -> torch.Tensor:
    """How many drafts of each request are verified, `total` in all: int64 [B], for conditional probabilities of
    acceptance float32 [B, n] and drafted int64 [B], of which the first ones count.

    Among equal values earlier drafts come first, then earlier requests. Drafts that do not count come last; they fill
    the rows that nothing else takes.
    """
    batch, most = conditional.shape
    values = conditional.cumprod(1)
    place = torch.arange(most, device=drafted.device)
    values = values.masked_fill(place >= drafted[:, None], -1.0)
    # By position first, so that the stable sort keeps this order among equals.
    chosen = values.T.flatten().sort(descending=True, stable=True).indices[:total]
    return torch.zeros_like(drafted).index_add_(0, chosen % batch, torch.ones_like(chosen))


@dataclass(frozen=True)
class VerifyBudget:
    """Spends the rows of verifies.

    mean         rows per request, at least 1
    mixes_seeds  whether drafts are verified by rejection sampling
    counts       int64 [2, 2 * LEVELS + 1]: drafts that were compared, and accepted, by confidence; of greedy requests,
                 of sampled ones, and of padding
    recent       float32 [2, slots + 1]: the same of each request lately
    """

    mean: float
    mixes_seeds: bool
    counts: torch.Tensor
    recent: torch.Tensor

    @classmethod
    def of(cls, mean: float, slots: int, device: torch.device, *, mixes_seeds: bool) -> VerifyBudget:
        """slots: without the padding slot."""
        counts = torch.zeros(2, 2 * LEVELS + 1, dtype=torch.int64, device=device)
        return cls(mean, mixes_seeds, counts, torch.zeros(2, slots + 1, device=device))

    def rows(self, batch: int) -> int:
        """Rows of a verify of so many requests."""
        return math.ceil(round(batch * self.mean, 6))

    def admit(self, slots: list[int]) -> None:
        """Forget what is known of slots that other requests get."""
        self.recent.index_fill_(1, upload(slots, self.recent.device), 0.0)

    def begin(self, step: StepInput) -> StepInput:
        """The step as the drafter sees it."""
        sampling = step.sampling
        if self.mixes_seeds and sampling.flags.sampled:
            sampling = replace(sampling, seeds=sampling.seeds + step.slots * _SLOT_SEED)
        return replace(step, sampling=sampling, needs_confidence=True)

    def spend(self, step: StepInput, proposal: Proposal) -> Spending:
        """Choose the drafts that are verified."""
        batch, most = proposal.tokens.shape
        confidence = proposal.confidence
        if confidence is None:
            compared, accepted = self.recent[:, step.slots]
            confidence = ((accepted + GUESS * GUESSED) / (compared + GUESSED))[:, None].expand(-1, most)
        confidence = confidence.nan_to_num(0.0).clamp(0.0, 1.0)
        levels = self._levels(step, confidence)
        compared, accepted = self.counts[:, levels]
        conditional = (accepted + WEIGHT * confidence) / (compared + WEIGHT)
        total = self.rows(batch)
        # Padding requests have slot 0.
        count = verified_drafts(conditional, torch.where(step.slots > 0, proposal.drafted, 0), total - batch)
        packed = pack_rows(count + 1, most + 1, total)
        return Spending(proposal._replace(drafted=torch.minimum(count, proposal.drafted)), packed, levels)

    def learn(self, step: StepInput, spending: Spending, accepted: torch.Tensor) -> None:
        """Observe a verify that accepted so many drafts [B]."""
        verified, place = spending.proposal.drafted, torch.arange(spending.levels.shape[1], device=accepted.device)
        compared = torch.minimum(accepted + 1, verified)
        for counts, recent, number in zip(self.counts, self.recent, (compared, accepted), strict=True):
            counts.index_add_(0, spending.levels.flatten(), (place < number[:, None]).flatten().long())
            recent[step.slots] = recent[step.slots] * MEMORY + number
        self.counts.copy_(torch.where(self.counts[0] < MOST, self.counts, self.counts >> 1))

    def _levels(self, step: StepInput, confidence: torch.Tensor) -> torch.Tensor:
        """The columns of `counts` for confidence [B, n]."""
        levels = (confidence * LEVELS).long().clamp(max=LEVELS - 1)
        if step.sampling.flags.sampled:
            levels = levels + LEVELS * (step.sampling.temperature > 0)[:, None]
        return levels.masked_fill((step.slots == 0)[:, None], 2 * LEVELS)
