"""Chooses draft tokens from logits: the most likely ones, or samples with the distributions they are drawn from.

Where a request has a grammar, drafts are chosen from the tokens that it allows after the drafts before them, and
penalties, biases and bad words change the logits of drafts, too (see `DraftStates`). The distributions are those of the
changed logits, so that rejection sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from specbatch.core.attention_metadata import positions_from
from specbatch.core.draft_states import DraftStates
from specbatch.core.logit_adjustments import History
from specbatch.core.step_input import Proposal, StepInput
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.sampling.argmax_topk import Scores, argmax, argmax_embedding
from specbatch.kernels.sampling.rng import DRAFT, TARGET, verify_keys


def draft_states(step: StepInput, vocabulary: int) -> DraftStates | None:
    """What changes the logits of drafts, with the states of grammars at the roots; None if no request asks for it.
    vocabulary: size of the target's."""
    adjustments = step.sampling.adjustments
    if adjustments is None:
        return None
    tokens = step.batch.tokens[step.slots, : step.bound + 1]
    return DraftStates(adjustments, History(tokens, step.lengths + 1), vocabulary)


def allowed_drafts(step: StepInput, drafts: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of drafts int64 [B, n] that were looked up, of which the first `drafted` int64 [B] count, those that grammars
    allow, and after them tokens that are forced (`Constraint.replace`): drafts, and how many of them count."""
    constraint = step.sampling.constraint
    return (drafts, drafted) if constraint is None else constraint.replace(drafts, drafted)


def takes_argmax(step: StepInput) -> bool:
    """Whether drafts need no more of a draft's logits than what their argmax needs."""
    return not step.sampling.flags.sampled and step.sampling.adjustments is None


class DraftChain:
    """The drafts of a step, chosen one after the other.

    tokens  int64 [B, step.num_drafts], of which the first are chosen
    """

    def __init__(self, step: StepInput, *, ids: torch.Tensor | None, vocabulary: int) -> None:
        """ids, vocabulary: see `sample_drafts`."""
        self.tokens = step.slots.new_empty(len(step.slots), step.num_drafts)
        self._step = step
        self._ids = ids
        self._vocabulary = vocabulary
        self._states = draft_states(step, vocabulary)
        self._count = 0
        self._distributions: list[torch.Tensor] = []  # that drafts were sampled from
        self._confidence: list[torch.Tensor] = []

    def choose(self, scores: Scores, confidence: torch.Tensor | None = None) -> torch.Tensor:
        """Choose the next token of each request from scores [B, Vd], which are adjusted in place: int64 [B].

        confidence float32 [B]: see `Proposal.confidence`; of a drafter that predicts it, None for `confidence_of` the
        scores.
        """
        tokens = self._begin(scores, confidence)
        if self._step.sampling.flags.sampled:
            self._sample(scores, tokens)
        else:
            argmax(scores, self._ids, tokens)
        self._end(tokens)
        return tokens

    def choose_embedded(
        self, scores: Scores, embedding: torch.Tensor, confidence: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `choose`. Returns the embeddings [B, H] of the tokens, from embedding [tokens, H]."""
        tokens = self._begin(scores, confidence)
        if self._step.sampling.flags.sampled:
            self._sample(scores, tokens)
            embedded = F.embedding(tokens, embedding)
        else:
            embedded = argmax_embedding(scores, embedding, self._ids, tokens)
        self._end(tokens)
        return embedded

    def proposal(self) -> Proposal:
        """The drafts, all of which are chosen."""
        return Proposal(
            self.tokens,
            self._step.batch.filled(self._step.num_drafts, self._step.slots),
            torch.cat(self._distributions, 1) if self._distributions else None,
            confidence=torch.stack(self._confidence, 1) if self._confidence else None,
        )

    def _begin(self, scores: Scores, confidence: torch.Tensor | None) -> torch.Tensor:
        """Adjust the scores. Returns where the tokens go."""
        if self._states is not None:
            assert isinstance(scores, torch.Tensor), "see `takes_argmax`"
            self._states.mask(scores[:, None], self._ids)
        if confidence is None:
            confidence = confidence_of(scores, self._step)
        if confidence is not None:
            self._confidence.append(confidence)
        return self.tokens[:, self._count]

    def _sample(self, scores: Scores, out: torch.Tensor) -> None:
        assert isinstance(scores, torch.Tensor), "see `takes_argmax`"
        step = self._step
        positions = (step.lengths + 1 + self._count)[:, None]
        tokens, distribution = sample_drafts(
            scores[:, None], step, positions, ids=self._ids, vocabulary=self._vocabulary
        )
        out.copy_(tokens[:, 0])
        if distribution is not None:
            self._distributions.append(distribution)

    def _end(self, tokens: torch.Tensor) -> None:
        self._count += 1
        if self._states is not None and self._count < self._step.num_drafts:
            self._states.follow(tokens[:, None])


def confidence_of(scores: Scores, step: StepInput) -> torch.Tensor | None:
    """The largest probability of each row of scores [..., V], as the predicted probability that its draft is accepted:
    float32 [...]; None if the step needs none. It is that of the most likely token, whichever is drafted."""
    if not step.needs_confidence:
        return None
    assert isinstance(scores, torch.Tensor), "a model that is divided over ranks has no budget"
    wide = scores.float()
    return (wide.amax(-1) - wide.logsumexp(-1)).exp()


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
    """Choose drafts from scores [B, n, Vd] that do not depend on each other. With a grammar they do: each is one that
    may follow those before it. ids, vocabulary: see `sample_drafts`."""
    if step.sampling.adjustments is not None:
        chain = DraftChain(step, ids=ids, vocabulary=vocabulary)
        for place in range(step.num_drafts):
            chain.choose(scores[:, place])
        return chain.proposal()
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

    scores, confidence: of a place, given the embedding [B, width] of the token before it, for `DraftChain.choose`; ids,
    vocabulary: see `sample_drafts`
    """
    chain = DraftChain(step, ids=ids, vocabulary=vocabulary)
    embedded = F.embedding(roots, embedding)
    for place in range(step.num_drafts):
        embedded = chain.choose_embedded(scores(place, embedded), embedding, confidence(place, embedded))
    return chain.proposal()
