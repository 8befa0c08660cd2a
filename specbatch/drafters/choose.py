"""Chooses draft tokens from logits: the most likely ones, or samples with the distributions they are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specbatch.core.attention_metadata import positions_from
from specbatch.core.step_input import Proposal, StepInput
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.sampling.argmax_topk import Scores, argmax, argmax_embedding
from specbatch.kernels.sampling.rng import DRAFT, TARGET, verify_keys


class Choice(NamedTuple):
    """What is known of one draft of each request.

    distribution  float32 [B, 1, V]: that it was sampled from; None for argmax
    confidence    float32 [B]: see `Proposal.confidence`
    """

    distribution: torch.Tensor | None
    confidence: torch.Tensor | None


def proposal_of(step: StepInput, drafts: torch.Tensor, choices: Sequence[Choice]) -> Proposal:
    """Drafts int64 [B, n] that were chosen one after the other."""
    distributions = [item.distribution for item in choices if item.distribution is not None]
    confidence = [item.confidence for item in choices if item.confidence is not None]
    return Proposal(
        drafts,
        step.batch.filled(step.num_drafts, step.slots),
        torch.cat(distributions, 1) if distributions else None,
        confidence=torch.stack(confidence, 1) if confidence else None,
    )


def confidence_of(scores: Scores, step: StepInput) -> torch.Tensor | None:
    """The largest probability of each row of scores [..., V], as the predicted probability that its draft is accepted:
    float32 [...]; None if the step needs none. It is that of the most likely token, whichever is drafted."""
    if not step.needs_confidence:
        return None
    assert isinstance(scores, torch.Tensor), "a model that is divided over ranks has no budget"
    wide = scores.float()
    return (wide.amax(-1) - wide.logsumexp(-1)).exp()


def choose_next(
    scores: Scores,
    step: StepInput,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
    *,
    ids: torch.Tensor | None,
    vocabulary: int,
    confidence: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Choice]:
    """Choose one token per request from scores [B, Vd] and write it to `out` int64 [B].

    positions int64 [B]: of the token; embedding [vocabulary, H]; ids, vocabulary: see `sample_drafts`; confidence
    float32 [B]: of a drafter that predicts it, None for `confidence_of` the scores. Returns its embedding [B, H], too.
    """
    if confidence is None:
        confidence = confidence_of(scores, step)
    if not step.sampling.flags.sampled:
        return argmax_embedding(scores, embedding, ids, out), Choice(None, confidence)
    assert isinstance(scores, torch.Tensor)
    tokens, distribution = sample_drafts(scores[:, None], step, positions[:, None], ids=ids, vocabulary=vocabulary)
    return F.embedding(out.copy_(tokens[:, 0]), embedding), Choice(distribution, confidence)


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


def choose_at_once(scores: Scores, step: StepInput, *, ids: torch.Tensor | None, vocabulary: int) -> Proposal:
    """Choose drafts that do not depend on each other from scores [B, n, Vd]. ids, vocabulary: see `sample_drafts`."""
    drafted, confidence = step.batch.filled(step.num_drafts, step.slots), confidence_of(scores, step)
    if not step.sampling.flags.sampled:
        return Proposal(argmax(scores, ids), drafted, confidence=confidence)
    assert isinstance(scores, torch.Tensor)
    positions = positions_from(step.lengths + 1, step.num_drafts)
    drafts, distributions = sample_drafts(scores, step, positions, ids=ids, vocabulary=vocabulary)
    return Proposal(drafts, drafted, distributions, confidence=confidence)


def choose_in_turn(
    scores: Callable[[int, torch.Tensor], Scores],
    step: StepInput,
    roots: torch.Tensor,
    embedding: torch.Tensor,
    *,
    ids: torch.Tensor | None,
    vocabulary: int,
    confidence: Callable[[int, torch.Tensor], torch.Tensor | None] = lambda place, embedded: None,
) -> Proposal:
    """Choose the drafts int64 [B, n] after roots int64 [B] one after the other.

    scores, confidence: of a place, given the embedding [B, width] of the token before it; the others are as for
    `choose_next`
    """
    drafts = roots.new_empty(len(roots), step.num_drafts)
    embedded = F.embedding(roots, embedding)
    choices: list[Choice] = []
    for place in range(step.num_drafts):
        embedded, choice = choose_next(
            scores(place, embedded),
            step,
            step.lengths + 1 + place,
            embedding,
            drafts[:, place],
            ids=ids,
            vocabulary=vocabulary,
            confidence=confidence(place, embedded),
        )
        choices.append(choice)
    return proposal_of(step, drafts, choices)
