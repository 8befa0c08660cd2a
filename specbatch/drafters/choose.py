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
    adjustments = step.sampling.adjustments
    if adjustments is not None and adjustments.constraint is not None:
        drafts, drafted = adjustments.constraint.replace(drafts, drafted)
    if adjustments is not None and adjustments.host is not None:
        drafts, drafted = adjustments.host.replace(drafts, drafted)
    return drafts, drafted


def takes_argmax(step: StepInput) -> bool:
    """Whether drafts need no more of a draft's logits than what their argmax needs."""
    return not step.sampling.flags.sampled and step.sampling.adjustments is None


class DraftChain:
    """The drafts of a step, chosen one after the other.

    tokens  int64 [B, step.num_drafts], of which the first are chosen
    """

    def __init__(
        self, step: StepInput, *, ids: torch.Tensor | None, vocabulary: int, predicts_confidence: bool = False
    ) -> None:
        """ids, vocabulary: see `sample_drafts`; predicts_confidence: the drafter gives it to `proposal`."""
        self.tokens = step.slots.new_empty(len(step.slots), step.num_drafts)
        self._step = step
        self._ids = ids
        self._vocabulary = vocabulary
        self._states = draft_states(step, vocabulary)
        self._count = 0
        self._distributions: list[torch.Tensor] = []  # that drafts were sampled from
        self._confidence = None if predicts_confidence else _empty_confidence(step)

    def choose(self, scores: Scores) -> torch.Tensor:
        """Choose the next token of each request from scores [B, Vd], which are adjusted in place: int64 [B]."""
        tokens, confidence = self._begin(scores)
        if self._step.sampling.flags.sampled:
            self._sample(scores, tokens, confidence)
        else:
            argmax(scores, self._ids, tokens, confidence)
        self._end(tokens)
        return tokens

    def choose_embedded(self, scores: Scores, embedding: torch.Tensor) -> torch.Tensor:
        """As `choose`. Returns the embeddings [B, H] of the tokens, from embedding [tokens, H]."""
        tokens, confidence = self._begin(scores)
        if self._step.sampling.flags.sampled:
            self._sample(scores, tokens, confidence)
            embedded = F.embedding(tokens, embedding)
        else:
            embedded = argmax_embedding(scores, embedding, self._ids, tokens, confidence)
        self._end(tokens)
        return embedded

    def proposal(self, confidence: torch.Tensor | None = None) -> Proposal:
        """The drafts, all of which are chosen. confidence float32 [B, n]: that the drafter predicts; None for the
        probabilities of the most likely tokens, if the step needs any."""
        return Proposal(
            self.tokens,
            self._step.batch.filled(self._step.num_drafts, self._step.slots),
            torch.cat(self._distributions, 1) if self._distributions else None,
            confidence=self._confidence if confidence is None else confidence,
        )

    def _begin(self, scores: Scores) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adjust the scores. Returns where the tokens and the confidence in them go."""
        if self._states is not None:
            assert isinstance(scores, torch.Tensor), "see `takes_argmax`"
            self._states.mask(scores[:, None], self._ids)
        confidence = self._confidence
        return self.tokens[:, self._count], None if confidence is None else confidence[:, self._count]

    def _sample(self, scores: Scores, out: torch.Tensor, confidence: torch.Tensor | None) -> None:
        assert isinstance(scores, torch.Tensor), "see `takes_argmax`"
        if confidence is not None:
            argmax(scores, chances=confidence)
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


def _empty_confidence(step: StepInput) -> torch.Tensor | None:
    """Where the confidence in drafts goes, float32 [B, n]; None if the step needs none. It is the probability of the
    most likely token, whichever is drafted."""
    shape = len(step.slots), step.num_drafts
    return step.slots.new_empty(shape, dtype=torch.float32) if step.needs_confidence else None


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


def guess(scores: Scores, step: StepInput) -> torch.Tensor:
    """The drafts int64 [B, n] that `choose_at_once` would choose from scores [B, n, V] of the target's vocabulary, by
    the same random numbers, for a drafter that computes better scores from them. Nothing may be adjusted."""
    if not step.sampling.flags.sampled:
        return argmax(scores)
    assert isinstance(scores, torch.Tensor)
    positions = positions_from(step.lengths + 1, scores.shape[1])
    if is_deterministic():
        return step.sampling.sample(scores, positions, TARGET)
    return step.sampling.sample(scores, verify_keys(positions, step.lengths[:, None]), DRAFT)


def choose_at_once(scores: Scores, step: StepInput, *, ids: torch.Tensor | None, vocabulary: int) -> Proposal:
    """Choose drafts from scores [B, n, Vd] that do not depend on each other. With a grammar they do: each is one that
    may follow those before it. ids, vocabulary: see `sample_drafts`."""
    if step.sampling.adjustments is not None:
        chain = DraftChain(step, ids=ids, vocabulary=vocabulary)
        for place in range(step.num_drafts):
            chain.choose(scores[:, place])
        return chain.proposal()
    drafted, confidence = step.batch.filled(step.num_drafts, step.slots), _empty_confidence(step)
    if not step.sampling.flags.sampled:
        return Proposal(argmax(scores, ids, chances=confidence), drafted, confidence=confidence)
    assert isinstance(scores, torch.Tensor)
    if confidence is not None:
        argmax(scores, chances=confidence)
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
    confidence: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Proposal:
    """Choose the drafts int64 [B, n] after roots int64 [B] one after the other.

    scores: of a place, given the embedding [B, width] of the token before it, for `DraftChain.choose`; ids, vocabulary:
    see `sample_drafts`; confidence: of a drafter that predicts it, float32 [n, B] given the embeddings [n, B, width] of
    the tokens before each place
    """
    chain = DraftChain(step, ids=ids, vocabulary=vocabulary, predicts_confidence=confidence is not None)
    embedded = [F.embedding(roots, embedding)]
    for place in range(step.num_drafts):
        embedded.append(chain.choose_embedded(scores(place, embedded[-1]), embedding))
    return chain.proposal(None if confidence is None else confidence(torch.stack(embedded[:-1])).T)
