"""Acceptance rules: which drafts are accepted, and which token follows them. All of them are lossless.

Deterministic drafts (n-gram, greedy): at every node a token is chosen from the target's own distribution, by argmax or
sampled with random numbers keyed on (seed, position), and a draft is accepted if it equals that token. A draft d is
thus accepted with probability p(d), and the token after a rejection is distributed as p given "not d": rejection
sampling for a one-hot draft. As the random numbers are those of the baseline, a seed gives the same tokens with and
without drafts, unless rounding moves the edge between two tokens past a random number.

Trees follow this rule only: their drafts are the likeliest children, not sampled ones, so that each is a one-hot
proposal. All nodes of one depth share the random number of their position, and the walk goes from the root to the child
that equals the chosen token. The distribution is that of trying siblings one by one with p renormalized (SpecInfer,
Miao et al. 2023), with the random numbers of the baseline. Siblings sampled without replacement would need another
rule and random numbers of their own.

Sampled drafts, from distributions q, are accepted by one of two rules, each with a random number u per draft:

* Token verification: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). d is accepted if u * q(d) < p(d);
  the first rejected draft is replaced by a sample from max(p - q, 0).
* Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): never fewer accepted drafts in expectation. The
  scale of a prefix is a_0 = 1, a_i = min(a_{i-1} p(d_i) / q(d_i), 1), and what is left after it is
  max(a_i p - q, 0), with sum S_i. The longest prefix with u_i < h_i is accepted, where h_i = S_i / (S_i + 1 - a_i), and
  h = a after the last draft. The next token is sampled from what is left after that prefix. The denominator is 0 only
  where a_i = 1 and p = q. Then the next draft is accepted as well, and h_i has no effect: it counts as 1.

Drafts and their u are keyed on (seed, position of the root, position): see `rng.verify_keys`. The token after them is
keyed as above. The numbers that decide on a token thus depend on where a verify begins: a retraction, which moves that,
may change the tokens of a seed (not their distribution).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.core.logit_adjustments import History, adjusted_logits, parent_row
from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.sampling_params import MOST_TOP_LOGPROBS
from specbatch.core.step_input import Proposal, StepInput
from specbatch.core.token_constraint import Constraint
from specbatch.kernels.common.rowwise import log_softmax
from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.accept import BatchRows, commit_ref
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores, topk_logprobs
from specbatch.kernels.sampling.rng import ACCEPT, RESIDUAL, TARGET, simulated_accept_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.kernels.sampling.tree_verify import simulated_path_ref, walk_tree_ref
from specbatch.runtime.cuda_graphs import Result


class Accepted(NamedTuple):
    """The outcome of a verify, whose tokens and lengths are committed to the batch.

    packed  int64 [B, N + 3]: N tokens, of which the first accepted + 1 are emitted; then accepted, drafted and flags:
            bit 0 is not set where logits were NaN or infinite, bit 1 is set where the drafts are of the corpus
    path    int64 [B, N], for a tree: all nodes, the root and the accepted drafts first, in order
    """

    packed: torch.Tensor
    path: torch.Tensor | None

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [B, N]."""
        return self.packed[:, :-3]

    @property
    def accepted(self) -> torch.Tensor:
        """int64 [B]: accepted drafts."""
        return self.packed[:, -3]


def accept(
    step: StepInput,
    proposal: Proposal,
    logits: Scores,
    positions: torch.Tensor,
    simulate: torch.Tensor | None = None,
    verification: str = "token",
) -> Accepted:
    """Apply the acceptance rule to logits [B, N, V] of nodes at `positions` [B, N], or their `Maxima` if the step is
    greedy, and commit tokens and lengths to the batch; on a CUDA device one kernel does both. simulate,
    verification: see `accept_ref`."""
    constraint = states = None
    if step.sampling.adjustments is not None:
        assert isinstance(logits, torch.Tensor), "single logits are adjusted"
        tokens = step.batch.tokens[step.slots, : step.bound + 1]
        history = History(tokens, step.lengths + 1, proposal.tokens, proposal.ancestors)
        constraint = step.sampling.adjustments.constraint
        if constraint is not None:
            states = node_states(constraint, history)
        logits = adjusted_logits(logits, step.sampling.adjustments, history, states)
    with step.sampling.end_tokens_masked(logits, positions + 1):
        rows = step.batch.rows(step.slots)
        packed, path = _accept_and_commit(logits, proposal, rows, positions, step.sampling, simulate, verification)
    if constraint is not None and states is not None:
        accepted = packed[:, -3, None]
        last = accepted if path is None else path.gather(1, accepted)
        after = constraint.after(states.gather(1, last), packed.gather(1, accepted))
        step.batch.set_states(step.slots, after[:, 0])
    if proposal.of_corpus is not None:
        packed[:, -1].add_(proposal.of_corpus, alpha=2)
    return Accepted(packed, path)


def node_states(constraint: Constraint, history: History) -> torch.Tensor:
    """The states of grammars after each row: int64 [B, n]."""
    states = constraint.states[:, None]
    count = 0 if history.drafts is None else history.drafts.shape[1]
    for row in range(1, count + 1):
        assert history.drafts is not None
        parent = parent_row(row, history)
        before = states[:, parent, None] if isinstance(parent, int) else states.gather(1, parent[:, None])
        states = torch.cat([states, constraint.after(before, history.drafts[:, row - 1, None])], 1)
    return states


def accept_and_commit_ref(
    logits: Scores,
    proposal: Proposal,
    rows: BatchRows,
    positions: torch.Tensor,
    sampling: Sampling,
    simulate: torch.Tensor | None = None,
    verification: str = "token",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fields of `Accepted`."""
    chosen, accepted, finite, path = accept_ref(logits, proposal, positions + 1, sampling, simulate, verification)
    commit_ref(rows, chosen, accepted)
    return torch.cat([chosen, torch.stack([accepted, proposal.drafted, finite.long()], 1)], 1), path


_accept_and_commit = op(accept_and_commit_ref, "specbatch.kernels.sampling.accept_and_commit_triton:accept_and_commit")


class RefResult(NamedTuple):
    """tokens int64 [B, N], of which the first accepted + 1 are emitted; accepted [B]: accepted drafts; finite [B] bool;
    path: see `Accepted`."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    finite: torch.Tensor
    path: torch.Tensor | None = None


def accept_ref(
    logits: Scores,
    proposal: Proposal,
    positions: torch.Tensor,
    sampling: Sampling,
    simulate: torch.Tensor | None = None,
    verification: str = "token",
) -> RefResult:
    """The rules in plain torch, for a chain or a tree: logits [B, N, V] of [root, d_1 .. d_{N-1}]; positions [B, N] of
    the tokens that they predict.

    simulate: thresholds of `simulated_accept_ref`. Then random numbers decide how many drafts are accepted,
    whatever they are, and the tokens are those that the target chooses at the accepted nodes. Of a tree these are the
    nodes on the path to its deepest node. Random weights make shallow trees: where more are accepted than that path
    has, they are the first nodes, so that the accept length does not depend on the shape of the tree.

    verification: "token" or "block", the rule for sampled drafts.
    """
    assert proposal.ancestors is None or proposal.probabilities is None, "drafts of a tree are not sampled"
    ancestors, path = proposal.ancestors, None
    if proposal.probabilities is not None and sampling.flags.sampled and simulate is None:
        assert isinstance(logits, torch.Tensor), "sampling needs all logits"
        tokens, accepted = _rejection_sample(
            sampling.probabilities(logits), proposal, positions, sampling, verification
        )
        return RefResult(tokens, accepted, are_finite(logits, tokens, sampling))
    if isinstance(logits, Maxima):
        largest, tokens = logits.best()
        finite = largest.isfinite().all(-1)
    else:
        tokens = sampling.sample(logits, positions, TARGET)
        finite = are_finite(logits, tokens, sampling)
    if simulate is not None:
        accepted = simulated_accept_ref(sampling.seeds, positions[:, 0] - 1, proposal.drafted, simulate)
        if ancestors is not None:
            path = simulated_path_ref(accepted, proposal.drafted, ancestors)
            tokens = tokens.gather(1, path)
    elif ancestors is None:
        accepted = _correct_prefix(tokens[:, :-1] == proposal.tokens, proposal.drafted)
    else:
        accepted, path = walk_tree_ref(tokens, proposal.tokens, proposal.drafted, ancestors)
        tokens = tokens.gather(1, path)
    return RefResult(tokens, accepted, finite, path)


def are_finite(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Are logits [B, n, V], from which `tokens` [B, n] were chosen, free of NaN and infinity? bool [B]."""
    if sampling.flags.sampled:
        return logits.amax(-1).isfinite().all(-1)
    # The argmax is a NaN where there is one, so the chosen logit shows it without another pass.
    return logits.gather(-1, tokens[..., None]).isfinite().flatten(1).all(-1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) under the model's own distribution: logits [B, N, V], tokens [B, N] -> float32 [B, N]."""
    return log_softmax(logits.float()).gather(-1, tokens[..., None])[..., 0]


def with_logprobs(packed: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, flags: SamplingFlags) -> Result:
    """The result of a pass that chose tokens [B, N] at logits [B, N, V], with the log-probabilities that `flags` ask
    for: of the tokens, and of the most likely ones."""
    if not flags.logprobs:
        return Result(packed)
    logprobs = token_logprobs(logits, tokens)
    return Result(packed, logprobs, *(topk_logprobs(logits, MOST_TOP_LOGPROBS) if flags.top_logprobs else ()))


def _correct_prefix(correct: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Length of the correct prefix: bool [B, N-1], at most drafted [B] -> int64 [B]."""
    place = torch.arange(correct.shape[1], device=correct.device)
    return (correct & (place < drafted[:, None])).long().cumprod(-1).sum(-1)


def _rejection_sample(
    p: torch.Tensor, proposal: Proposal, positions: torch.Tensor, sampling: Sampling, verification: str = "token"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling of a chain: p [B, N, V] -> (tokens [B, N], accepted [B])."""
    q, drafts = proposal.probabilities, proposal.tokens
    assert q is not None
    drafts_p = p[:, :-1].gather(-1, drafts[..., None])[..., 0]
    drafts_q = q.gather(-1, drafts[..., None])[..., 0]
    u = sampling.uniform(verify_keys(positions[:, :-1], positions[:, :1] - 1), ACCEPT)
    # After the last draft there is nothing to subtract.
    is_drafted = torch.arange(q.shape[1] + 1, device=q.device) < proposal.drafted[:, None]
    q_next = torch.where(is_drafted[..., None], torch.cat([q, torch.zeros_like(q[:, :1])], 1), 0.0)
    if verification == "block":
        scales = _scales(drafts_p, drafts_q)
        residuals = (scales[..., None] * p - q_next).clamp(min=0)
        accepted = _longest_prefix(u, scales, residuals.double().sum(-1), proposal.drafted)
    else:
        residuals = (p - q_next).clamp(min=0)
        accepted = _correct_prefix(u * drafts_q < drafts_p, proposal.drafted)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    residual = residuals.gather(1, at)[:, 0]
    # Where p equals q up to rounding errors nothing is left: sample from p itself.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p.gather(1, at)[:, 0])
    bonus = sample_ref(residual, sampling.uniform(positions.gather(1, accepted[:, None]), RESIDUAL)[:, 0])
    padded = torch.cat([drafts, drafts[:, :1]], 1)
    return padded.scatter(1, accepted[:, None], bonus[:, None]), accepted


def _scales(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The scales a_0 .. a_{N-1} of block verification, for probabilities [B, N-1] of the drafts: [B, N]."""
    scales = [torch.ones_like(p[:, 0])]
    for place in range(p.shape[1]):
        scaled = scales[-1] * p[:, place]
        # Exactly 1 where p equals q, and 0 for impossible tokens, whatever q is.
        least = torch.where(scaled < q[:, place], scaled / q[:, place], 1.0)
        scales.append(torch.where(scaled > 0, least, 0.0))
    return torch.stack(scales, 1)


def _longest_prefix(u: torch.Tensor, scales: torch.Tensor, left: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Drafts that block verification accepts: u [B, N-1], scales [B, N] and sums `left` float64 [B, N] -> int64 [B]."""
    place = torch.arange(1, scales.shape[1], device=u.device)
    scale = scales[:, 1:].double()
    left = torch.where(place == drafted[:, None], scale, left[:, 1:])  # after the last draft h is a
    whole = left + 1 - scale
    accepts = ((u * whole < left) | (whole <= 0)) & (place <= drafted[:, None])
    return torch.where(accepts, place, 0).amax(-1)
