"""A request from its parameters to its completion: tokens so far, stop conditions, metrics. Host only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from specbatch.core.acceptance import Acceptance
from specbatch.errors import refuse
from specbatch.settings import Rule, check_fields, is_whole, number, setting, whole

if TYPE_CHECKING:
    import torch

Decode = Callable[[list[int]], str]
INCOMPLETE = ("abort", "error")  # finish reasons without a complete answer
_STOP = Rule(
    lambda x: isinstance(x, tuple) and all(isinstance(text, str) for text in x), "use a text or a list of texts"
)
_STOP_TOKENS = Rule(
    lambda x: isinstance(x, tuple) and all(is_whole(token) and token >= 0 for token in x), "use a list of token ids"
)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off; they apply in the order temperature, top-k,
    top-p, min-p. `stop` strings end the output and are not part of the text; `stop_token_ids` end it like the
    model's own end tokens, which `ignore_eos` switches off. `seed` None derives one from the engine's seed and
    the request's index. `logprobs` asks for the log-probability of each emitted token under the model's own
    distribution (before temperature and truncation).
    """

    temperature: float = setting(
        0.0, "Sampling temperature; 0 is greedy.", number(lambda x: x >= 0, "use 0 (greedy) or a positive number")
    )
    top_p: float = setting(
        1.0,
        "Nucleus sampling; 1 is off.",
        number(lambda x: 0 < x <= 1, "use a value above 0 and up to 1 (1 is off)"),
    )
    top_k: int = setting(
        0,
        "Sample from the K most likely tokens; 0 is off.",
        whole(0, works="use 0 (off) or a positive whole number"),
    )
    min_p: float = setting(
        0.0,
        "Least probability relative to the most likely token; 0 is off.",
        number(lambda x: 0 <= x <= 1, "use a value from 0 (off) to 1"),
    )
    max_new_tokens: int = setting(128, "Maximum number of tokens per answer.", whole(1))
    stop: Sequence[str] = setting((), "", _STOP)
    stop_token_ids: Sequence[int] = setting((), "", _STOP_TOKENS)
    ignore_eos: bool = setting(False, "Continue after the model's end-of-text tokens.")
    seed: int | None = setting(None, "", Rule(is_whole, "use a whole number, or None"))
    logprobs: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple_of([self.stop] if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple_of(self.stop_token_ids))
        check_fields(self)
        if not all(self.stop):
            raise refuse("stop", self.stop, "a stop string must not be empty")


def _tuple_of(values: Any) -> Any:
    """`values` as a tuple; what is not iterable stays as it is, and is refused."""
    return tuple(values) if isinstance(values, Iterable) else values


@dataclass
class RequestMetrics:
    """Times in seconds, counts in tokens. Definitions: see `specbatch.records.metrics`."""

    prompt_tokens: int = 0
    embedded_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    verify_steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    accept_length: float | None = None
    emitted_histogram: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    itl_s: list[float] = field(default_factory=list)
    retractions: int = 0


@dataclass
class Completion:
    """The result of one prompt. `index` is its place in the input.

    finish_reason   "stop" or "length"; or, of an incomplete one, "abort" (ended by the caller) or "error"
    error           why it failed, if `finish_reason` is "error"
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: RequestMetrics
    logprobs: list[float] | None = None
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Incomplete ones count in no metric."""
        return self.finish_reason not in INCOMPLETE

    def as_row(self) -> dict[str, Any]:
        """The request's entry in a record: its numbers, not its tokens."""
        row = asdict(self.metrics)
        error = {} if self.error is None else {"error": self.error}
        return {"index": self.index, "finish_reason": self.finish_reason, **error, **row}


class IncrementalText:
    """Incremental detokenization, one push per token, that never splits a character.

    Byte-level tokens can end in the middle of a character; that end is held back until it is complete. Only the
    last few tokens are decoded again on each push.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0  # decoding starts here, so that joining rules (leading spaces) see the previous token
        self._whole = 0  # tokens before this one are complete characters and have been returned
        self._known = 0  # characters from _start on that have been returned
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token and return the new text (may be empty)."""
        self._tokens.append(token)
        decoded = self._decode(self._tokens[self._start :])
        new = decoded.rstrip("\ufffd")[self._known :]
        self._known += len(new)
        if new and self._known == len(decoded):  # nothing is held back
            self._start, self._whole = self._whole, len(self._tokens)
            self._known = len(self._decode(self._tokens[self._start :]))
        self.text += new
        return new


class Request:
    """One prompt on its way through the engine. The scheduler alone writes the fields of its section."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        end_tokens: frozenset[int],
        decode: Decode,
        submitted: float,
        embeddings: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """embeddings: see `EmbeddedPrompt`."""
        self.index = index
        self.params = params
        self.tokens = list(prompt)  # prompt and output
        self.prompt_len = len(prompt)
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[float] = []
        self._decode = decode
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens)
        self._text = IncrementalText(decode) if params.stop else None
        self._cut: int | None = None  # characters before the stop string

        # Written by the scheduler only.
        self.slot: int | None = None
        self.pages: list[int] = []
        self.shared = 0  # pages that it took from the prefix cache, the first of `pages`
        self.prefilled = 0  # tokens whose prefill is launched
        self.branch = 0  # tokens of its prompt that another prompt began with
        self.committed = 0  # KV length by the last handled result
        self.in_flight = 0  # decode steps launched whose result is not handled yet
        self.pending = 0  # the same, with a first token from prefill: each leaves at least one token
        # From this position on the draft, which was idle, has no keys. None: it has them all.
        self.draft_kv_valid_until: int | None = None
        self.epoch = 0  # incremented by each retraction: results launched before it are void

        self.submitted = submitted
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.embeddings = embeddings or {}
        # The tokens before the first given embedding: they alone identify a prefix.
        self.textual = min(self.embeddings, default=sys.maxsize)
        embedded = sum(map(len, self.embeddings.values()))
        self.metrics = RequestMetrics(prompt_tokens=self.prompt_len, embedded_tokens=embedded)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: list[int], now: float, logprobs: list[float] | None = None) -> int:
        """Add emitted tokens, up to the first stop token, stop string or the length limit.

        Within the limit, a stop is the finish reason. Returns how many tokens were kept.
        """
        kept = 0
        for token in tokens[: self.params.max_new_tokens - self.generated]:
            self.tokens.append(token)
            kept += 1
            if token in self._ends or self._hits_stop_string(token):
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and self.generated >= self.params.max_new_tokens:
            self.finish_reason = "length"
        if logprobs is not None:
            self.logprobs.extend(logprobs[:kept])
        if kept:
            if self.last_token is None:
                self.first_token = now
            else:
                self.metrics.itl_s.extend([(now - self.last_token) / kept] * kept)
            self.last_token = now
        return kept

    def count_verify(self, kept: int, drafted: int, accepted: int, depth: int) -> None:
        """Count a verify that emitted `kept` tokens and can accept at most `depth` drafts; ignored if it emitted
        none."""
        if not kept:
            return
        metrics = self.metrics
        if not metrics.emitted_histogram:
            metrics.emitted_histogram = [0] * (depth + 2)
        metrics.verify_steps += 1
        metrics.emitted += kept
        metrics.emitted_histogram[kept] += 1
        before = len(self.tokens) - kept
        room = self.prompt_len + self.params.max_new_tokens - before
        deep = min(drafted, depth)
        known, right = metrics.acceptance.count(context=before, room=room, kept=kept, drafted=deep, accepted=accepted)
        metrics.drafted += drafted - (deep - known)
        metrics.accepted += right

    def _hits_stop_string(self, token: int) -> bool:
        if self._text is None:
            return False
        new = self._text.push(token)
        if not new:
            return False
        text = self._text.text
        start = max(0, len(text) - len(new) - max(map(len, self.params.stop)))
        found = [at for at in (text.find(stop, start) for stop in self.params.stop) if at >= 0]
        if found:
            self._cut = min(found)
        return bool(found)

    def completion(self, now: float) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None
        metrics, output = self.metrics, self.output
        metrics.output_tokens = len(output)
        metrics.e2e_s = (self.last_token if self.last_token is not None else now) - self.submitted
        metrics.queue_s = (self.admitted if self.admitted is not None else now) - self.submitted
        if self.first_token is not None and self.last_token is not None:
            metrics.ttft_s = self.first_token - self.submitted
            if len(output) > 1:
                metrics.tpot_s = (self.last_token - self.first_token) / (len(output) - 1)
        if metrics.verify_steps:
            metrics.accept_length = metrics.emitted / metrics.verify_steps
        return Completion(
            index=self.index,
            prompt_token_ids=self.tokens[: self.prompt_len],
            token_ids=output,
            text=self._shown(output),
            finish_reason=self.finish_reason,
            metrics=metrics,
            logprobs=list(self.logprobs) if self.params.logprobs else None,
            error=self.error,
        )

    def _shown(self, output: list[int]) -> str:
        """The output's text, up to its stop string and without its end token."""
        if self._text is not None and self._cut is not None:
            return self._text.text[: self._cut]
        ended = self.finish_reason == "stop" and bool(output) and output[-1] in self._ends
        return self._decode(output[:-1] if ended and self.params.skip_special_tokens else output)
