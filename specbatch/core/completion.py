"""The result of a request: its tokens and text, and what was counted and timed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import MutableSequence
from dataclasses import asdict, dataclass, field, fields
from reprlib import Repr
from typing import Annotated, Any

from specbatch.core.acceptance import Acceptance

INCOMPLETE = ("abort", "error")  # finish reasons without a complete answer
_SHOWN = 6  # items of a list in a `repr`


class _ShortRepr(Repr):
    """`reprlib` with texts as a whole: one number per token, or per token of the vocabulary, is too much to read."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxarray = self.maxdict = _SHOWN
        self.maxstring = self.maxother = sys.maxsize


_short = _ShortRepr()


def _short_repr(item: Any) -> str:
    values = ", ".join(f"{each.name}={_short.repr(getattr(item, each.name))}" for each in fields(item))
    return f"{type(item).__name__}({values})"


@dataclass(repr=False)
class RequestMetrics:
    """Times in seconds, counts in tokens. Definitions: see `specbatch.records.metrics`. Its `repr` shortens lists.

    The schema of records, their totals and docs/records.md follow from the fields and what is written beside them.
    """

    prompt_tokens: Annotated[int, "tokens of the prompt"] = 0
    embedded_tokens: Annotated[int, "of them, tokens that were given as embeddings"] = 0
    cached_tokens: Annotated[int, "of them, tokens that came from the prefix cache"] = 0
    output_tokens: Annotated[int, "tokens generated"] = 0
    queue_s: Annotated[float, "seconds until the request was admitted"] = 0.0
    ttft_s: Annotated[float | None, "seconds until its first token"] = None
    tpot_s: Annotated[float | None, "seconds per token after the first; null with one token"] = None
    e2e_s: Annotated[float, "seconds until its last token"] = 0.0
    verify_steps: Annotated[int, "verifies from which a token was kept"] = 0
    emitted: Annotated[int, "tokens emitted by them"] = 0
    drafted: Annotated[int, "drafts that count in the accept rate"] = 0
    accepted: Annotated[int, "drafts that were accepted"] = 0
    budget_rows: Annotated[int, "rows of them with a verify budget: newest token and drafts that were verified"] = 0
    corpus_verifies: Annotated[int, "verifies whose drafts came from the corpus"] = 0
    corpus_emitted: Annotated[int, "tokens emitted by them"] = 0
    corpus_drafted: Annotated[int, "their drafts that count in the accept rate"] = 0
    corpus_accepted: Annotated[int, "their drafts that were accepted"] = 0
    reasoning_tokens: Annotated[int, "tokens of the reasoning, with the marks around it"] = 0
    reasoning_verifies: Annotated[int, "verifies that began in the reasoning"] = 0
    reasoning_emitted: Annotated[int, "tokens emitted by them"] = 0
    reasoning_drafted: Annotated[int, "their drafts that count in the accept rate"] = 0
    reasoning_accepted: Annotated[int, "their drafts that were accepted"] = 0
    answer_verifies: Annotated[int, "verifies that began after it, of a model that can reason"] = 0
    answer_emitted: Annotated[int, "tokens emitted by them"] = 0
    answer_drafted: Annotated[int, "their drafts that count in the accept rate"] = 0
    answer_accepted: Annotated[int, "their drafts that were accepted"] = 0
    accept_length: Annotated[float | None, "emitted / verifies; null without a verify"] = None
    emitted_histogram: Annotated[list[int], "verifies that emitted 0, 1, 2, ... tokens"] = field(default_factory=list)
    acceptance: Annotated[
        Acceptance,
        "counts by draft position (`drafted`, `tried`, `accepted`) and by length of the context (`context`: tokens, "
        "verifies, emitted tokens)",
    ] = field(default_factory=Acceptance)
    untrimmed_histogram: Annotated[
        list[int],
        "of a server that does not tell each verify: verifies with drafts that accepted 0, 1, 2, ... of them, those "
        "after the end of the answer included",
    ] = field(default_factory=list)
    itl_s: Annotated[
        MutableSequence[float], "seconds between arrivals of tokens, divided among the tokens of an arrival"
    ] = field(default_factory=lambda: array("d"))
    retractions: Annotated[int, "times that the request gave its KV pages back"] = 0

    __repr__ = _short_repr

    def count_part(self, in_reasoning: bool, verifies: int, emitted: int, drafted: int, accepted: int) -> None:
        """Count verifies of the reasoning, or of the answer."""
        if in_reasoning:
            self.reasoning_verifies += verifies
            self.reasoning_emitted += emitted
            self.reasoning_drafted += drafted
            self.reasoning_accepted += accepted
        else:
            self.answer_verifies += verifies
            self.answer_emitted += emitted
            self.answer_drafted += drafted
            self.answer_accepted += accepted


@dataclass(repr=False)
class Completion:
    """One sample of a prompt. Its `repr` shortens lists.

    index           the prompt's place in the input, from 0
    finish_reason   "stop" or "length"; or, of an incomplete one, "abort" (ended by the caller) or "error"
    logprobs        of each token, if asked for
    prompt_logprobs of each token of the prompt after those before it, if asked for, and the first sample; of the first
                    token None
    error           why it failed, if `finish_reason` is "error"
    sample          from 0 to `SamplingParams.n` - 1
    request_id      the caller's name of the prompt, if given
    top_logprobs    for each token, the most likely tokens in its place with their log-probabilities, if asked for
    seed            of `SamplingParams`; None: derived from the engine's seed and the prompt's index
    reasoning       that a server split off, if any
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: RequestMetrics
    logprobs: list[float] | None = None
    error: str | None = None
    sample: int = 0
    request_id: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    seed: int | None = None
    reasoning: str | None = None

    __repr__ = _short_repr

    @property
    def is_complete(self) -> bool:
        """Incomplete ones count in no metric."""
        return self.finish_reason not in INCOMPLETE

    def as_row(self) -> dict[str, Any]:
        """The request's entry in a record: its numbers, not its tokens."""
        row: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason, "seed": self.seed}
        row |= {"sample": self.sample} if self.sample else {}
        row |= {} if self.request_id is None else {"request_id": self.request_id}
        row |= {} if self.error is None else {"error": self.error}
        return row | asdict(self.metrics) | {"itl_s": list(self.metrics.itl_s)}
