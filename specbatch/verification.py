"""Acceptance rules: which drafted tokens stay, and what follows them. Lossless for every way of drafting.

Deterministic drafts (n-gram, greedy): a token is chosen from the target's own distribution at every row, by argmax or
by a draw keyed on (seed, position), and a draft stays if it is what was chosen. A draft d thus stays with probability
p(d), and the token after a rejection has law p given "not d": the rejection rule for a one-hot draft. As the draw is
plain decoding's own, a seed gives the same tokens with and without drafts.

Sampled drafts, drawn from q: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). d stays if
u * q(d) < p(d); the first rejection is replaced by a draw from max(p - q, 0). Coins are keyed as above, but which of
them decides a token depends on where a verify begins: a retraction, which moves that, may change a seed's tokens (not
their law).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.batch import DeviceBatch, Sampling
from specbatch.context import chain
from specbatch.kernels import dispatch
from specbatch.kernels.sampling import ACCEPT, RESIDUAL, TARGET, draw_ref, simulated_accept_ref


class Proposal(NamedTuple):
    """A chain of N - 1 drafts behind each root.

    tokens [B, N-1] int64; drafted [B] int64: how many of them count (a row without a match drafts nothing);
    probabilities float32 [B, N-1, V]: what each was drawn from, or None for deterministic drafts.
    """

    tokens: torch.Tensor
    drafted: torch.Tensor
    probabilities: torch.Tensor | None = None


class Verdict(NamedTuple):
    """tokens [B, N] int64, of which the first accepted + 1 are emitted; accepted [B]: correct drafts;
    sound [B] bool: false where logits were NaN or infinite."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    sound: torch.Tensor


def settle(
    logits: torch.Tensor,
    proposal: Proposal,
    batch: DeviceBatch,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    sampling: Sampling,
    simulate: float | None = None,
) -> torch.Tensor:
    """`verify` what stands behind the roots of rows [B] at lengths [B], commit it, and pack what the host is told.

    logits [B, N, V]. Returns int64 [B, N + 3]: N tokens, then accepted, drafted and sound. On a CUDA device the rules
    are those of `kernels/accept.py` and `kernels/draw.py`: two launches if greedy, a handful if sampled.
    """
    count = logits.shape[1]
    if not dispatch.runs_kernels(logits):
        tokens, accepted, sound = verify(logits, proposal, chain(lengths + 1, count), sampling, simulate)
        batch.commit(rows, tokens, accepted)
        return torch.cat([tokens, torch.stack([accepted, proposal.drafted, sound.long()], 1)], 1)
    from specbatch.kernels.accept import commit, greedy_accept
    from specbatch.kernels.draw import draw, reject

    drafts, drafted, q = proposal
    where = (batch.tokens, batch.lengths, rows)
    if not sampling.needs.sampled:
        return greedy_accept(logits.flatten(0, 1), drafts, drafted, *where, simulate=simulate, seeds=sampling.seeds)
    law, predicted = sampling.law(logits), chain(lengths + 1, count)
    if q is None or simulate is not None:
        tokens, sound = draw(law, sampling.seeds, predicted, TARGET)
        return commit(tokens, drafts, drafted, sound, *where, simulate=simulate, seeds=sampling.seeds)
    tokens, accepted, sound = reject(law, drafts, drafted, q, sampling.seeds, predicted)
    return commit(tokens, drafts, drafted, sound, *where, accepted=accepted)


def verify(
    logits: torch.Tensor,
    proposal: Proposal,
    positions: torch.Tensor,
    sampling: Sampling,
    simulate: float | None = None,
) -> Verdict:
    """Judge a chain: logits [B, N, V] of [root, d_1 .. d_{N-1}]; positions [B, N] of the tokens they predict.

    simulate: a mean accept length. Then a coin says how many drafts are accepted, whatever they are, and the tokens
    are the target's own choices behind them.
    """
    if proposal.probabilities is None or not sampling.needs.sampled or simulate is not None:
        tokens = sampling.choose(logits, positions, TARGET)
        accepted = _leading(tokens[:, :-1] == proposal.tokens, proposal.drafted)
    else:
        tokens, accepted = _reject(sampling.probabilities(logits), proposal, positions, sampling)
    if simulate is not None:
        accepted = simulated_accept_ref(sampling.seeds, positions[:, 0] - 1, proposal.drafted, simulate)
    return Verdict(tokens, accepted, is_sound(logits, tokens, sampling))


def is_sound(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Are logits [B, n, V], from which `tokens` [B, n] were chosen, free of NaN and infinity? bool [B]."""
    if sampling.needs.sampled:
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
    bonus = draw_ref(residual, coin)
    padded = torch.cat([drafts, drafts[:, :1]], 1)
    return padded.scatter(1, accepted[:, None], bonus[:, None]), accepted
