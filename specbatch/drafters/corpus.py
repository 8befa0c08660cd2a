"""Corpus drafting: drafts what followed the last few tokens in other answers, of this run and of files.

Where the corpus has nothing, the algorithm itself drafts. The corpus is an index in device memory of fixed size
(`kernels.drafting.corpus`). Each step adds the tokens of running requests to it, and the host adds answers as they
finish, between steps and without a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from specbatch.core.attention_metadata import PrefillMetadata
from specbatch.core.completion import Completion
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.sampling import SamplingFlags
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import Drafter
from specbatch.drafters.choose import allowed_drafts
from specbatch.kernels.common.upload import upload
from specbatch.kernels.drafting.corpus import SEPARATOR, CorpusIndex, corpus_drafts, corpus_extend, corpus_insert
from specbatch.models.decoder import Features

_TABLE = 1 << 16  # tokens of a table with several answers


class Answer(NamedTuple):
    """An earlier answer: tokens, of which the first `prompt` are the end of its prompt. These are matched, so that the
    first tokens of the answer can be drafted, but are no drafts themselves."""

    tokens: Sequence[int]
    prompt: int


class CorpusPlan(NamedTuple):
    """What a corpus holds at most, and what it holds at the beginning.

    size      tokens of finished answers
    shortest  length of the shortest n-grams
    given     answers that files hold, in order
    """

    size: int
    shortest: int
    given: list[Answer]

    def bytes(self, running: int) -> int:
        """Its memory with room for so many tokens of running requests."""
        return CorpusIndex.bytes_of(self.size, running)


class Corpus:
    """The index and the place in its ring where the next answer goes, which the host knows."""

    def __init__(self, plan: CorpusPlan, batch: DeviceBatch) -> None:
        self.index = CorpusIndex.empty(plan.size, plan.shortest, batch.tokens)
        self._given = list(_tables(plan.given, plan.size))
        self._device = batch.device
        self._place = 0
        self.forget()

    def answer(self, tokens: list[int], prompt: int) -> Answer:
        """The answer of a request with prompt and output `tokens`, of which `prompt` are the prompt's."""
        first = max(0, prompt - self.index.lengths[0])
        return Answer(tokens[first:], prompt - first)

    @torch.inference_mode()
    def add(self, answers: Iterable[Answer]) -> None:
        """Add answers; the oldest ones are overwritten."""
        for table in _tables(answers, len(self.index.ring)):
            self._insert(table)

    @torch.inference_mode()
    def forget(self) -> None:
        """Go back to the answers of the files."""
        self.index.clear()
        self._place = 0
        for table in self._given:
            self._insert(table)
        self.add([Answer((), 0)])  # so that the kernel is compiled

    def _insert(self, table: np.ndarray) -> None:
        corpus_insert(self.index, upload(table, self._device, torch.int32), self._place)
        self._place = (self._place + table.shape[1]) % len(self.index.ring)


def _tables(answers: Iterable[Answer], size: int) -> Iterator[np.ndarray]:
    """Tables int32 [2, T], T <= size, as `corpus_insert` takes them, of an answer or several."""
    parts: list[np.ndarray] = []
    held = 0
    for answer in answers:
        tokens = np.array([*answer.tokens[: size - 1], SEPARATOR], np.int32)
        adds = np.zeros(len(tokens), np.int32)
        adds[max(answer.prompt - 1, 0) : max(len(tokens) - 2, 0)] = 1  # the last token is followed by nothing
        if parts and held + len(tokens) > min(size, _TABLE):
            yield np.concatenate(parts, 1)
            parts, held = [], 0
        parts.append(np.stack([tokens, adds]))
        held += len(tokens)
    if parts:
        yield np.concatenate(parts, 1)


class CorpusDrafter:
    """Drafts from the corpus where it has something, and with another drafter elsewhere.

    The other drafter always runs, as shapes are fixed, and learns from the verified tokens whoever drafted them. It
    drafts the most likely tokens of sampled requests, too. All drafts are then verified by comparison with the token
    that the target samples, so that the tokens of a seed do not depend on the corpus, which may hold some of that seed.
    """

    def __init__(self, drafter: Drafter, index: CorpusIndex) -> None:
        self._drafter = drafter
        self._index = index

    def prefill(self, batch: DeviceBatch, metadata: PrefillMetadata, features: Features) -> None:
        self._drafter.prefill(batch, metadata, features)

    def propose(self, step: StepInput) -> Proposal:
        greedy = replace(step, sampling=replace(step.sampling, flags=SamplingFlags()), needs_confidence=False)
        own = self._drafter.propose(greedy)
        if not step.num_drafts:
            return own
        batch = step.batch
        tokens, drafted, found = corpus_drafts(
            self._index, batch.tokens, batch.lengths, step.slots, own.tokens, own.drafted
        )
        return Proposal(*allowed_drafts(step, tokens, drafted), of_corpus=found)

    def update(self, step: StepInput, features: Features, accepted: torch.Tensor, path: torch.Tensor | None) -> None:
        self._drafter.update(step, features, accepted, path)
        corpus_extend(self._index, step.batch.tokens, step.slots, step.lengths, accepted, step.num_drafts + 1)

    def shorten(self, step: StepInput) -> None:
        self._drafter.shorten(step)

    def catch_up(self, batch: DeviceBatch, metadata: PrefillMetadata) -> None:
        self._drafter.catch_up(batch, metadata)

    def diagnose(self, completions: Sequence[Completion]) -> str | None:
        return self._drafter.diagnose(completions)
