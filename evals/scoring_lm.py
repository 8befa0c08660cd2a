"""lm-eval model adapter, its part that scores given texts: log-likelihoods of continuations, and of whole texts.

Splitting a text into context and continuation is lm-eval's own code (`TemplateLM`). A text that is too long loses its
beginning, and a text without a context follows the beginning-of-text token, or else the end-of-text token, as in
lm-eval's model for transformers (`HFLM` of 0.4.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specbatch.errors import SpecbatchError, refuse
from specbatch.evals.encoding import Encoding
from specbatch.evals.finished import Answer, Row, Scored, hash_of

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.engine.scoring import Likelihood, OnScore, Pair
    from specbatch.text.tokenizer import Tokenizer


class ScoringLM(TemplateLM):  # type: ignore[misc]
    """The requests of lm-eval for log-likelihoods, all at once to `engine.score`. Options and results: see
    `SpecBatchLM`."""

    def __init__(
        self,
        engine: InferenceEngine,
        task: str,
        *,
        chat_template: bool,
        add_bos_token: bool | None,
        finished: Mapping[int, Row] | None,
        on_answer: Callable[[Answer | Scored, int], None] | None,
        first_ids: Mapping[str, int] | None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._task = task
        tokenizer = cast("Tokenizer", getattr(engine, "tokenizer", None))  # of a server, which then encodes, unknown
        self._encoding = Encoding(tokenizer, add_bos_token, is_chat=chat_template)
        self._finished = finished or {}
        self._on_answer = on_answer
        self._first_ids = first_ids or {}
        self._requests: list[Instance] = []  # whose tokens reach `_loglikelihood_tokens`
        self.answers: list[Answer] = []
        self.scored: list[Scored] = []
        self.prompts: list[str | list[str]] = []
        self.cut = 0
        self.earlier = 0

    @property
    def tokenizer_name(self) -> str:
        return self._engine.tokenizer.name

    @property
    def eot_token_id(self) -> int:
        end: int | None = self._engine.tokenizer.eos_id
        if end is None:
            works = f"it has no beginning-of-text or end-of-text token, which task {self._task} needs as the context"
            raise refuse("tokenizer", self.tokenizer_name, f"{works}; use a tokenizer with one, or another task")
        return end

    @property
    def prefix_token_id(self) -> int:
        begin = self._engine.tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, by default with the special tokens of `Encoding.scored`."""
        if add_special_tokens is None:
            return self._encoding.scored(string)
        return self._engine.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation given its context, and whether greedy decoding would generate it."""
        self._requests = requests
        self.prompts += [list(request.args) for request in requests]
        for request in requests:
            if not request.args[1]:
                raise self._misfit(request, "an empty continuation")
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        for request, likelihood in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, likelihood)
        return found

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        texts = [
            (request, request.idx, *self._fitted(request, context, continuation))
            for request, (_, context, continuation) in zip(self._requests, requests, strict=True)
        ]
        return [(logprob, is_greedy) for logprob, is_greedy in self._score(texts)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in disjoint windows; each token has as much context as fits."""
        texts = []
        for place, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self._longest_scored, context_len=1
            )
            parts = enumerate(map(make_disjoint_window, windows))
            texts += [(place, (request, part, context, continuation)) for part, (context, continuation) in parts]
        self.prompts += [request.args[0] for request in requests]
        sums: list[list[float]] = [[] for _ in requests]
        for (place, _), likelihood in zip(texts, self._score([text for _, text in texts]), strict=True):
            sums[place].append(likelihood.logprob)
        found = [math.fsum(values) for values in sums]
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    @property
    def _longest(self) -> int:
        return int(self._engine.caps["max_model_len"])

    @property
    def _longest_scored(self) -> int:
        """Tokens of a text to score, without its last one."""
        return self._longest

    def _score(self, texts: list[tuple[Instance, int, list[int], list[int]]]) -> list[Likelihood]:
        """Scores of (request, part, context, continuation)."""
        first = len(self.answers) + len(self.scored)  # of earlier calls
        hashes = [hash_of([context, continuation]) for *_, context, continuation in texts]
        rows = [self._row(first + place, digest) for place, digest in enumerate(hashes)]
        done = {place: Scored.from_row(row) for place, row in enumerate(rows) if row is not None}
        missing = [place for place in range(len(texts)) if place not in done]

        def scored_place(place: int, likelihood: Likelihood) -> Scored:
            request, part, context, continuation = texts[place]
            counts = len(context), len(continuation)
            return Scored(first + place, self._question(request), part, hashes[place], *counts, likelihood)

        def scored(index: int, likelihood: Likelihood) -> None:
            if self._on_answer is not None:
                self._on_answer(scored_place(missing[index], likelihood), len(texts))

        pairs = [(texts[place][2], texts[place][3]) for place in missing]
        found = self._likelihoods(pairs, scored) if pairs else []
        done |= {place: scored_place(place, one) for place, one in zip(missing, found, strict=True)}
        every = [done[place] for place in range(len(texts))]
        self.scored += every
        return [one.likelihood for one in every]

    def _question(self, request: Instance) -> int:
        """The number of the request's question among those of all tasks."""
        return int(request.doc_id) + self._first_ids.get(request.task_name or "", 0)

    def _row(self, index: int, request: str) -> Row | None:
        """The finished row of a request; None if it has none. Refused: the row of another request."""
        row = self._finished.get(index)
        if row is None:
            return None
        if row["request"] != request:
            works = "its prompts are not those of the run that was interrupted; pass overwrite=True to start over"
            raise refuse("task", self._task, works)
        self.earlier += 1
        return row

    def _fitted(self, request: Instance, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Drop the beginning of a context that is too long for the model."""
        if not context or not continuation:
            raise self._misfit(request, f"a {'continuation' if context else 'context'} without tokens")
        if len(continuation) > self._longest_scored:
            works = f"question {request.doc_id} of {self._task} has a continuation of {len(continuation)} tokens"
            raise refuse("max_model_len", self._longest, f"{works}; use at least {len(continuation)}")
        excess = max(0, len(context) + len(continuation) - (self._longest_scored + 1))
        self.cut += excess > 0
        return context[excess:], continuation

    def _misfit(self, request: Instance, what: str) -> SpecbatchError:
        works = f"question {request.doc_id} has {what} and cannot be scored; fix that row, or use another task"
        return refuse("task", self._task, works)

    def _likelihoods(self, pairs: Sequence[Pair], on_score: OnScore) -> list[Likelihood]:
        return self._engine.score(pairs, on_score=on_score)
