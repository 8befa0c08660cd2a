"""The end of a decode step in Triton: accept drafts and commit tokens; chains and trees, greedy and sampled."""

from __future__ import annotations

import torch

from specbatch.kernels.sampling.accept_triton import argmax_partials, commit, greedy_accept
from specbatch.kernels.sampling.filtered_distribution import SamplingTensors
from specbatch.kernels.sampling.filtered_distribution_triton import distribution_of
from specbatch.kernels.sampling.rng import TARGET
from specbatch.kernels.sampling.sample_triton import rejection_sample, sample
from specbatch.kernels.sampling.tree_verify_triton import commit_tree


def accept_and_commit(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    q: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sampling: SamplingTensors,
    simulate: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Accept drafts int64 [B, N-1], of which drafted int64 [B] count, by logits [B, N, V] of nodes at `positions` int64
    [B, N], and commit: two launches if greedy, a handful if sampled.

    q float32 [B, N-1, V]: the distributions that a chain was sampled from, None for deterministic drafts; ancestors
    int64 [B, N]: the words of a tree, None for a chain. Writes tokens int64 [R, W] and lengths int64 [R] of the device
    rows int64 [B]. simulate: mean accept length of a benchmark. Returns int64 [B, N + 3]: tokens, accepted, drafted and
    whether the logits are finite; the path int64 [B, N] of a tree or None; and True, as all is committed.
    """
    return *_accept_and_commit(
        logits, drafts, drafted, q, ancestors, (tokens, lengths, rows), positions, sampling, simulate
    ), True


def _accept_and_commit(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    q: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    sampling: SamplingTensors,
    simulate: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    finite: torch.Tensor | None = None  # None: the kernel checks the chosen logits
    if not sampling.flags.sampled:
        flat = logits.flatten(0, 1)
        if ancestors is None:
            return greedy_accept(flat, drafts, drafted, *batch, simulate=simulate, seeds=sampling.seeds), None
        chosen = argmax_partials(flat)
    else:
        dist, predicted = distribution_of(logits, sampling), positions + 1
        if q is not None and simulate is None:
            chosen, accepted, finite = rejection_sample(dist, drafts, drafted, q, sampling.seeds, predicted)
            return commit(chosen, drafts, drafted, finite, *batch, accepted=accepted), None
        chosen, finite = sample(dist, sampling.seeds, predicted, TARGET)
        if ancestors is None:
            return commit(chosen, drafts, drafted, finite, *batch, simulate=simulate, seeds=sampling.seeds), None
    return commit_tree(chosen, finite, drafts, drafted, ancestors, *batch, simulate=simulate, seeds=sampling.seeds)
