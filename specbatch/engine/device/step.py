"""One decode step on the device: propose, verify, accept, commit.

It reads and writes device tensors only, never branches on a device value and never waits, so that both schedules, the
baseline and CUDA graphs run the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import Drafter
from specbatch.engine.device.acceptance import Accepted, accept, logprobs_of, top_logprobs_of
from specbatch.engine.device.verify_budget import VerifyBudget
from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores, argmax_keys
from specbatch.kernels.sampling.token_digest import token_digest
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

    simulate: thresholds int64 [D] of simulated acceptance, for benchmarks; verification: the rule for sampled drafts
    (for both see `accept_ref`); fp8: see `use_fp8_activations`; history: of `token_digest`, for a model that is divided
    over ranks; budget: of rows per verify, None to verify all drafts.
    """

    model: Decoder
    cache: KVCache
    drafter: Drafter
    simulate: torch.Tensor | None = None
    verification: str = "token"
    fp8: bool = False
    history: torch.Tensor | None = None
    budget: VerifyBudget | None = None

    def __call__(self, step: StepInput) -> Result:
        """Returns `Accepted.packed` and what `step.sampling.flags` ask for."""
        with use_fp8_activations(self.fp8):
            budget, spending, packed = self.budget, None, None
            if budget is not None:
                step = budget.begin(step)
            proposal = self.propose(step)
            if budget is not None:
                proposal, packed, _ = spending = budget.spend(step, proposal)
            verified = self.verify(step, proposal, packed)
            accepted = self.accept(step, proposal, verified)
            self.commit(step, verified, accepted)
            if budget is not None and spending is not None:
                budget.learn(step, spending, accepted.accepted)
            if self.history is not None:
                token_digest(self.history, proposal.tokens, accepted.packed, step.slots, step.lengths)
            return self._result(step, verified, accepted)

    def propose(self, step: StepInput) -> Proposal:
        """Draft tokens after the root of each request."""
        return self.drafter.propose(step)

    def verify(self, step: StepInput, proposal: Proposal, packed: PackedRows | None = None) -> Verified:
        """Run the target over the roots and their drafts, in one pass. packed: rows that are computed; None: all."""
        num_queries = proposal.tokens.shape[1] + 1
        tokens, positions = step.batch.stage(step.slots, proposal.tokens, proposal.ancestors)
        metadata = step.decode_metadata(step.lengths, num_queries, proposal.ancestors, packed=packed)
        context = metadata.bind(self.cache)
        is_greedy = not step.sampling.flags.needs_logits
        if packed is None:
            features = self.model.forward(tokens, positions, context)
            scores = self.model.scores(features.last, greedy=is_greedy)
        else:
            features = self.model.forward(*gather_rows(tokens, positions, packed.places), context)
            scores = _spread_scores(self.model.scores(features.last, greedy=is_greedy), packed, greedy=is_greedy)
            last, aux = features
            features = Features(packed.spread(last), None if aux is None else packed.spread(aux))
        return Verified(scores.unflatten(0, (-1, num_queries)), positions.view(-1, num_queries), features)

    def accept(self, step: StepInput, proposal: Proposal, verified: Verified) -> Accepted:
        """Decide which drafts stay, choose the token after them, and add both to the requests."""
        return accept(step, proposal, verified.scores, verified.positions, self.simulate, self.verification)

    def commit(self, step: StepInput, verified: Verified, accepted: Accepted) -> None:
        """Make KV cache, recurrent states and draft state follow the accepted tokens."""
        path = accepted.path
        self.cache.commit(step.verified(accepted.accepted), path)
        self.drafter.update(step, verified.features, accepted.accepted, path)

    def shorten(self, step: StepInput) -> None:
        """Prepare the drafter for a step that drafts fewer tokens than the previous one; see `Drafter.shorten`."""
        with use_fp8_activations(self.fp8):
            self.drafter.shorten(step)

    def _result(self, step: StepInput, verified: Verified, accepted: Accepted) -> Result:
        flags, logits, path = step.sampling.flags, verified.scores, accepted.path
        if not flags.logprobs:
            return Result(accepted.packed)
        assert isinstance(logits, torch.Tensor)
        if path is not None:
            logits = logits.gather(1, path[:, :, None].expand_as(logits))
        logprobs = logprobs_of(logits, accepted.tokens)
        return Result(accepted.packed, logprobs, *(top_logprobs_of(logits) if flags.top_logprobs else ()))


def _spread_scores(scores: Scores, packed: PackedRows, *, greedy: bool) -> Scores:
    """Scores [R, V] of packed rows -> [B * N, V]; if `greedy`, no logits are copied."""
    assert isinstance(scores, torch.Tensor), "a model that is divided over ranks has no budget"
    return Maxima(packed.spread(argmax_keys(scores, 0, scores.shape[1]))) if greedy else packed.spread(scores)
