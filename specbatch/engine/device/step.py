"""One decode step on the device: propose, verify, accept, commit.

It reads and writes device tensors only, never branches on a device value and never waits, so that both schedules, the
baseline and CUDA graphs run the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import Drafter, no_drafts
from specbatch.engine.device.acceptance import Accepted, accept, with_logprobs
from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores, argmax_keys
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder, Features
from specbatch.runtime.cuda_graphs import Result


class Verified(NamedTuple):
    """The target's forward pass over the root and its drafts, N nodes per request.

    scores     logits [B, N, V], in the model's type, or in a greedy step what suffices for their argmax
    positions  int64 [B, N], of the nodes
    features   hidden states, for the drafter
    """

    scores: Scores
    positions: torch.Tensor
    features: Features


@dataclass(frozen=True)
class DecodeStep:
    """Advances every request of a step by the drafts that it accepts and one token of the target's own.

    simulate: thresholds of simulated acceptance, for benchmarks; verification: the rule for sampled drafts (for both
    see `accept_ref`); idles: the drafter does not run where nothing is drafted. Subclasses add a budget of rows
    (`BudgetedStep`) and a digest (`DigestedStep`).
    """

    model: Decoder
    cache: KVCache
    drafter: Drafter
    simulate: torch.Tensor | None = None
    verification: str = "token"
    idles: bool = False

    def __call__(self, step: StepInput) -> Result:
        """Returns `Accepted.packed` and what `step.sampling.flags` ask for."""
        step = self.begin(step)
        proposal = self.propose(step)
        return self.end(step, proposal, self.verify(step, proposal))

    def begin(self, step: StepInput) -> StepInput:
        """The step as drafter and target see it."""
        return step

    def end(self, step: StepInput, proposal: Proposal, verified: Verified) -> Result:
        """Accept and commit."""
        accepted = self.accept(step, proposal, verified)
        self.commit(step, proposal, verified, accepted)
        return _result(step, verified, accepted)

    def split(self, step: StepInput, drafting: StepInput, others: StepInput) -> Result:
        """Advance the requests of a step of which only the first ones draft: it consists of these and the others."""
        first, rest, nodes = len(drafting.slots), len(others.slots), step.num_drafts + 1
        parts, proposals = (drafting, others), (self.propose(drafting), no_drafts(others))
        staged = [step.batch.stage(part.slots, own.tokens, None) for part, own in zip(parts, proposals, strict=True)]
        tokens, positions = (torch.cat(both) for both in zip(*staged, strict=True))
        packed = step.batch.groups(first, rest, nodes)
        context = step.decode_metadata(step.lengths, nodes, packed=packed).bind(self.cache)
        last, aux = self.model.forward(tokens, positions, context)
        scores = self.model.scores(last, greedy=not step.sampling.flags.needs_logits)
        end = first * nodes
        features = Features(last[:end], None if aux is None else aux[:end])
        verified = (
            Verified(scores[:end].unflatten(0, (first, nodes)), positions[:end].view(first, nodes), features),
            Verified(scores[end:].unflatten(0, (rest, 1)), positions[end:].view(rest, 1), features),
        )
        outcomes = [self.accept(*each) for each in zip(parts, proposals, verified, strict=True)]
        self.cache.commit(step.verified(torch.cat([outcome.accepted for outcome in outcomes])), None)
        self.drafter.update(drafting, features, outcomes[0].accepted, None)
        return _joined([_result(*each) for each in zip(parts, verified, outcomes, strict=True)])

    def propose(self, step: StepInput) -> Proposal:
        """Draft tokens after the root of each request."""
        return no_drafts(step) if self._is_idle(step) else self.drafter.propose(step)

    def verify(self, step: StepInput, proposal: Proposal) -> Verified:
        """Run the target over the roots and their drafts, or over the rows `proposal.packed` of them, in one pass."""
        return self.score(step, proposal, *self.forward(step, proposal))

    def forward(self, step: StepInput, proposal: Proposal) -> tuple[Features, torch.Tensor]:
        """The target's layers: features of the rows, and positions int64 [B * N] of all nodes."""
        num_queries, packed = proposal.tokens.shape[1] + 1, proposal.packed
        tokens, positions = step.batch.stage(step.slots, proposal.tokens, proposal.ancestors)
        metadata = step.decode_metadata(step.lengths, num_queries, proposal.ancestors, packed=packed)
        context = metadata.bind(self.cache)
        rows = (tokens, positions) if packed is None else gather_rows(tokens, positions, packed.places)
        model = self.model.with_aux(()) if self._is_idle(step) else self.model
        return model.forward(*rows, context), positions

    def score(self, step: StepInput, proposal: Proposal, features: Features, positions: torch.Tensor) -> Verified:
        """The target's output matrix, after `forward`."""
        num_queries, packed = proposal.tokens.shape[1] + 1, proposal.packed
        is_greedy = not step.sampling.flags.needs_logits
        scores = self.model.scores(features.last, greedy=is_greedy)
        if packed is not None:
            scores = _spread_scores(scores, packed, greedy=is_greedy)
            last, aux = features
            features = Features(packed.spread(last), None if aux is None else packed.spread(aux))
        return Verified(scores.unflatten(0, (-1, num_queries)), positions.view(-1, num_queries), features)

    def accept(self, step: StepInput, proposal: Proposal, verified: Verified) -> Accepted:
        """Decide which drafts stay, choose the token after them, and add both to the requests."""
        return accept(step, proposal, verified.scores, verified.positions, self.simulate, self.verification)

    def commit(self, step: StepInput, proposal: Proposal, verified: Verified, accepted: Accepted) -> None:
        """Make KV cache, recurrent states and draft state follow the accepted tokens."""
        path = accepted.path
        self.cache.commit(step.verified(accepted.accepted), path)
        if not self._is_idle(step):
            self.drafter.update(step, verified.features, accepted.accepted, path)

    def _is_idle(self, step: StepInput) -> bool:
        return self.idles and not step.num_drafts

    def admit(self, slots: list[int]) -> None:
        """Requests were given these slots."""

    def forget(self) -> None:
        """Forget what was learned of acceptance."""


def _result(step: StepInput, verified: Verified, accepted: Accepted) -> Result:
    flags, logits, path = step.sampling.flags, verified.scores, accepted.path
    if not flags.logprobs:
        return Result(accepted.packed)
    assert isinstance(logits, torch.Tensor)
    if path is not None:
        logits = logits.gather(1, path[:, :, None].expand_as(logits))
    return with_logprobs(accepted.packed, logits, accepted.tokens, flags)


def _joined(results: list[Result]) -> Result:
    """The results of both parts of a step, of which the second has a node for each request."""
    first, second = results
    missing = first.packed.shape[1] - second.packed.shape[1]
    tokens, counts = second.packed[:, :1], second.packed[:, 1:]
    padded = [torch.cat([tokens, tokens.expand(-1, missing), counts], 1)]
    for item in second.tensors()[1:]:
        padded.append(torch.cat([item, item.expand(-1, missing, *item.shape[2:])], 1))
    return Result(*(torch.cat(both) for both in zip(first.tensors(), padded, strict=True)))


def _spread_scores(scores: Scores, packed: PackedRows, *, greedy: bool) -> Scores:
    """Scores [R, V] of packed rows -> [B * N, V]; if `greedy`, no logits are copied."""
    assert isinstance(scores, torch.Tensor), "a model that is divided over ranks has no budget"
    return Maxima(packed.spread(argmax_keys(scores, 0, scores.shape[1]))) if greedy else packed.spread(scores)
