"""Chooses draft tokens from logits: the most likely ones, or samples with the distributions they are drawn from."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from specbatch.core.step_input import StepInput
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.sampling.argmax_topk import Scores, argmax_embedding
from specbatch.kernels.sampling.rng import DRAFT, TARGET, verify_keys


def choose_next(
    scores: Scores,
    step: StepInput,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
    *,
    ids: torch.Tensor | None,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose one token per request from scores [B, Vd] and write it to `out` int64 [B].

    positions int64 [B]: of the token; embedding [vocabulary, H]; ids, vocabulary: see `sample_drafts`. Returns its
    embedding [B, H] and the distribution float32 [B, 1, vocabulary] that it was sampled from, None for argmax.
    """
    if not step.sampling.flags.sampled:
        return argmax_embedding(scores, embedding, ids, out), None
    assert isinstance(scores, torch.Tensor)
    tokens, distribution = sample_drafts(scores[:, None], step, positions[:, None], ids=ids, vocabulary=vocabulary)
    return F.embedding(out.copy_(tokens[:, 0]), embedding), distribution


def sample_drafts(
    logits: torch.Tensor, step: StepInput, positions: torch.Tensor, *, ids: torch.Tensor | None, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample tokens int64 [B, n] at positions int64 [B, n] from logits [B, n, Vd]. Returns them and their distributions
    float32 [B, n, vocabulary].

    ids int64 [Vd]: the target's token of each draft token, None if they are the same; tokens outside the draft
    vocabulary have probability 0. vocabulary: size of the target's.

    In deterministic mode a draft is sampled with the random number that the target will use at its position, and is
    accepted if the target chooses the same token: there are no distributions (None), and the tokens of a seed do not
    depend on the draft. Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding".
    """
    if is_deterministic():
        tokens = step.sampling.sample(logits, positions, TARGET)
        return tokens if ids is None else ids[tokens], None
    keys = verify_keys(positions, step.lengths[:, None])
    tokens, distributions = step.sampling.sample_with_probabilities(logits, keys, DRAFT)
    if ids is None:
        return tokens, distributions
    padded = distributions.new_zeros(*distributions.shape[:2], vocabulary)
    return ids[tokens], padded.index_copy_(2, ids, distributions)


def choose_in_turn(
    scores: Callable[[int, torch.Tensor], Scores],
    step: StepInput,
    roots: torch.Tensor,
    embedding: torch.Tensor,
    *,
    ids: torch.Tensor | None,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choose the drafts int64 [B, n] after roots int64 [B] one after the other. Returns the distributions float32 [B,
    n, V] that they were sampled from, None for argmax.

    scores: of a place, given the embedding [B, width] of the token before it; the others are as for `choose_next`
    """
    drafts = roots.new_empty(len(roots), step.num_drafts)
    embedded = F.embedding(roots, embedding)
    distributions: list[torch.Tensor] = []
    for place in range(step.num_drafts):
        embedded, distribution = choose_next(
            scores(place, embedded),
            step,
            step.lengths + 1 + place,
            embedding,
            drafts[:, place],
            ids=ids,
            vocabulary=vocabulary,
        )
        distributions += [] if distribution is None else [distribution]
    return drafts, torch.cat(distributions, 1) if distributions else None
