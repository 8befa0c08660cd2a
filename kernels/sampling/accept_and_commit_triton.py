"""Last operation of a decode step in Triton: accepts drafts and commits tokens.

It chooses the kernels for chains or trees, greedy or sampled.
"""

from __future__ import annotations

import torch

from specbatch.kernels.sampling.accept import BatchRows, Proposal
from specbatch.kernels.sampling.accept_triton import Chosen, commit, score_partials
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.kernels.sampling.filtered_distribution import SamplingTensors
from specbatch.kernels.sampling.filtered_distribution_triton import sampling_distribution
from specbatch.kernels.sampling.rng import TARGET
from specbatch.kernels.sampling.sample_triton import rejection_sample, sample
from specbatch.kernels.sampling.tree_verify_triton import commit_tree


def accept_and_commit(
    logits: Scores,
    proposal: Proposal,
    rows: BatchRows,
    positions: torch.Tensor,
    sampling: SamplingTensors,
    simulate: torch.Tensor | None = None,
    verification: str = "token",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`acceptance.accept_and_commit_ref`: two launches if greedy, a handful if sampled."""
    seeds, predicted = sampling.seeds, positions + 1
    if not sampling.flags.sampled:
        chosen = Chosen(score_partials(logits), None)
    else:
        assert isinstance(logits, torch.Tensor), "sampling needs all logits"
        dist, q = sampling_distribution(logits, sampling), proposal.probabilities
        if q is not None and simulate is None:
            chain = proposal.tokens, proposal.drafted, q
            tokens, accepted, finite = rejection_sample(dist, *chain, seeds, predicted, verification)
            return commit(Chosen(tokens, finite), proposal, rows, seeds, accepted=accepted), None
        chosen = Chosen(*sample(dist, seeds, predicted, TARGET))
    if proposal.ancestors is None:
        return commit(chosen, proposal, rows, seeds, simulate), None
    return commit_tree(chosen, proposal, rows, seeds, simulate)
