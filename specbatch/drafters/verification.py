"""Acceptance rules: which drafted tokens stay, and what follows them. Lossless for every way of drafting.

Deterministic drafts (n-gram, greedy): a token is chosen from the target's own distribution at every row, by argmax or
by a draw keyed on (seed, position), and a draft stays if it is what was chosen. A draft d thus stays with probability
p(d), and the token after a rejection has law p given "not d": the rejection rule for a one-hot draft. As the draw is
plain decoding's own, a seed gives the same tokens with and without drafts.

Trees are judged by that rule alone: their drafts are the likeliest children and not drawn, so that each is a one-hot
proposal. All nodes of one depth share the coin of their position, and the walk goes from the root to the child that
equals what was chosen. That is the law of trying siblings one by one (with p renormalised, SpecInfer: Miao et al. 2023)
with the coin of plain decoding. Siblings drawn without replacement would need another rule, and a draw of their own.

Sampled drafts, drawn from q: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). d stays if
u * q(d) < p(d); the first rejection is replaced by a draw from max(p - q, 0). Coins are keyed as above, but which of
them decides a token depends on where a verify begins: a retraction, which moves that, may change a seed's tokens (not
their law).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.core.device_batch import DeviceBatch, Sampling
from specbatch.core.step_input import Proposal
from specbatch.kernels import dispatch
from specbatch.kernels.sampling.rng import ACCEPT, RESIDUAL, TARGET, simulated_accept_ref
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.kernels.sampling.tree_verify import identity_path, walk_tree_ref


class Verdict(NamedTuple):
    """tokens [B, N] int64, of which the first accepted + 1 are emitted; accepted [B]: correct drafts;
    finite [B] bool: false where logits were NaN or infinite; path [B, N] int64: all nodes of a tree, the root and the
    accepted drafts first, in order (None for a chain, whose nodes are in order)."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    finite: torch.Tensor
    path: torch.Tensor | None = None


def accept_and_commit(
    logits: torch.Tensor,
    proposal: Proposal,
    batch: DeviceBatch,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    simulate: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`verify` what stands behind the roots of rows [B], commit it, and pack what the host is told.

    logits [B, N, V] of nodes at `positions` [B, N]. Returns int64 [B, N + 3]: N tokens, then accepted, drafted and
    sound; and the path of a tree or None. On a CUDA device this takes two launches if greedy, a handful
    if sampled.
    """
    if not dispatch.runs_kernels(logits):
        tokens, accepted, finite, path = verify(logits, proposal, positions + 1, sampling, simulate)
        batch.commit(rows, tokens, accepted)
        return torch.cat([tokens, torch.stack([accepted, proposal.drafted, finite.long()], 1)], 1), path
    from specbatch.kernels.sampling.accept_triton import argmax_partials, commit, greedy_accept
    from specbatch.kernels.sampling.sample_triton import rejection_sample, sample
    from specbatch.kernels.sampling.tree_verify_triton import commit_tree

    drafts, drafted, q, ancestors = proposal
    where = (batch.tokens, batch.lengths, rows)
    rows_finite: torch.Tensor | None = None  # None: the kernel checks the chosen logits
    if not sampling.flags.sampled:
        flat = logits.flatten(0, 1)
        if ancestors is None:
            return greedy_accept(flat, drafts, drafted, *where, simulate=simulate, seeds=sampling.seeds), None
        chosen = argmax_partials(flat)
    else:
        law, predicted = sampling.law(logits), positions + 1
        if q is not None and simulate is None:
            tokens, accepted, finite = rejection_sample(law, drafts, drafted, q, sampling.seeds, predicted)
            return commit(tokens, drafts, drafted, finite, *where, accepted=accepted), None
        chosen, rows_finite = sample(law, sampling.seeds, predicted, TARGET)
        if ancestors is None:
            return commit(chosen, drafts, drafted, rows_finite, *where, simulate=simulate, seeds=sampling.seeds), None
    return commit_tree(chosen, rows_finite, drafts, drafted, ancestors, *where, simulate=simulate, seeds=sampling.seeds)


def verify(
    logits: torch.Tensor,
    proposal: Proposal,
    positions: torch.Tensor,
    sampling: Sampling,
    simulate: float | None = None,
) -> Verdict:
    """Judge a chain or a tree: logits [B, N, V] of [root, d_1 .. d_{N-1}]; positions [B, N] of the tokens they predict.

    simulate: a mean accept length. Then a coin says how many drafts are accepted, whatever they are, and the tokens
    are the target's own choices behind the first nodes.
    """
    assert proposal.ancestors is None or proposal.probabilities is None, "drafts of a tree are not drawn"
    ancestors, path = proposal.ancestors, None
    if proposal.probabilities is not None and sampling.flags.sampled and simulate is None:
        tokens, accepted = _reject(sampling.probabilities(logits), proposal, positions, sampling)
        return Verdict(tokens, accepted, are_finite(logits, tokens, sampling))
    tokens = sampling.choose(logits, positions, TARGET)
    finite = are_finite(logits, tokens, sampling)
    if simulate is not None:
        accepted = simulated_accept_ref(sampling.seeds, positions[:, 0] - 1, proposal.drafted, simulate)
        path = None if ancestors is None else identity_path(ancestors)
    elif ancestors is None:
        accepted = _leading(tokens[:, :-1] == proposal.tokens, proposal.drafted)
    else:
        accepted, path = walk_tree_ref(tokens, proposal.tokens, proposal.drafted, ancestors)
        tokens = tokens.gather(1, path)
    return Verdict(tokens, accepted, finite, path)


def are_finite(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Are logits [B, n, V], from which `tokens` [B, n] were chosen, free of NaN and infinity? bool [B]."""
    if sampling.flags.sampled:
        return logits.amax(-1).isfinite().all(-1)
    # The argmax is a NaN where there is one: what it picked tells, without another pass.
    return logits.gather(-1, tokens[..., None]).isfinite().flatten(1).all(-1)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) under the model's own distribution: logits [B, N, V], tokens [B, N] -> float32 [B, N]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _leading(correct: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Length of the correct prefix: bool [B, N-1], at most drafted [B] -> int64 [B]."""
    place = torch.arange(correct.shape[1], device=correct.device)
    return (correct & (place < drafted[:, None])).long().cumprod(-1).sum(-1)


def _reject(
    p: torch.Tensor, proposal: Proposal, positions: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling of a chain: p [B, N, V] -> (tokens [B, N], accepted [B])."""
    q, drafts = proposal.probabilities, proposal.tokens
    assert q is not None
    drafts_p = p[:, :-1].gather(-1, drafts[..., None])[..., 0]
    drafts_q = q.gather(-1, drafts[..., None])[..., 0]
    coins = sampling.coins(positions[:, :-1], ACCEPT)
    accepted = _leading(coins * drafts_q < drafts_p, proposal.drafted)
    at = accepted[:, None, None]
    p_next = p.gather(1, at.expand(-1, 1, p.shape[-1]))[:, 0]
    # Behind the last draft there is nothing to subtract.
    q_next = torch.cat([q, torch.zeros_like(q[:, :1])], 1).gather(1, at.expand(-1, 1, q.shape[-1]))[:, 0]
    q_next = torch.where((accepted < proposal.drafted)[:, None], q_next, 0.0)
    residual = (p_next - q_next).clamp(min=0)
    # p == q up to rounding leaves nothing: then p itself is the law.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    coin = sampling.coins(positions.gather(1, accepted[:, None]), RESIDUAL)[:, 0]
    bonus = sample_ref(residual, coin)
    padded = torch.cat([drafts, drafts[:, :1]], 1)
    return padded.scatter(1, accepted[:, None], bonus[:, None]), accepted
