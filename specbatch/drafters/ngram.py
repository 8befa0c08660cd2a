"""NGRAM ("prompt lookup"): what followed the last few tokens when they occurred before. No draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbatch.drafters.base import DraftPlan, NoDraft, Step
from specbatch.kernels import dispatch
from specbatch.kernels.ngram import ngram_match_ref
from specbatch.verification import Proposal

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.weights import Checkpoint, Log


class NGram(NoDraft):
    """Looks up suffixes of `longest` to `shortest` tokens in the request's own prompt and output."""

    def __init__(self, count: int, shortest: int, longest: int) -> None:
        self._count = count
        self._shortest = shortest
        self._longest = longest

    def propose(self, step: Step) -> Proposal:
        batch, sizes = step.batch, (self._longest, self._shortest, self._count)
        if dispatch.runs_kernels(step.rows):
            from specbatch.kernels.ngram_triton import ngram_match

            tokens, found = ngram_match(batch.tokens, step.rows, step.lengths, *sizes)
        else:
            tokens, found = ngram_match_ref(batch.tokens[step.rows, : step.bound + 1], step.lengths, *sizes)
        return Proposal(tokens, found * self._count)


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """No memory: the tokens are on the device already."""
    asked = config.speculation
    return DraftPlan(lambda *_: NGram(asked.drafted, asked.ngram_min, asked.ngram_max), target.config)
