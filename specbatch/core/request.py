"""A request on its way through the engine: tokens so far, stop conditions, what counts. Host only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specbatch.core.completion import INCOMPLETE, Completion, RequestMetrics
from specbatch.core.output_text import Decode, OutputText
from specbatch.core.sampling_flags import SamplingFlags
from specbatch.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from specbatch.grammar.host_matcher import HostMatcher
    from specbatch.grammar.token_automaton import TokenAutomaton
    from specbatch.text.thinking import ReasoningTokens

# What counts of a verify: the context rounded down to a power of two, and for how many of the drafts there was room;
# then the arguments of `Request.count_verify`, and whether the answer had not begun.
_Verify = tuple[int, int, int, int, int, int, bool, bool, bool]


class Logprobs(NamedTuple):
    """Log-probabilities of the N tokens of a result: [N], and of the most likely tokens in their places [N][K]."""

    chosen: list[float]
    top: Sequence[list[float]] = ()
    top_tokens: Sequence[list[int]] = ()


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
        byte_tokens: Mapping[int, int] | None = None,
        submitted: float,
        embeddings: Mapping[int, torch.Tensor] | None = None,
        sample: int = 0,
        request_id: str | None = None,
        streams_text: bool = False,
        banned: tuple[tuple[int, ...], ...] = (),
        automaton: TokenAutomaton | None = None,
        matcher: HostMatcher | None = None,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        """byte_tokens: see `Tokenizer.byte_tokens`; embeddings: see `EmbeddedPrompt`; streams_text: whether `new_text`
        will be called; banned: the tokens of each spelling of `params.bad_words`; automaton, matcher: its grammar, on
        the device or on the host; reasoning: of a model whose vocabulary has marks of it."""
        self.index = index
        self.sample = sample
        self.request_id = request_id
        self.params = params
        self.banned = banned
        self.automaton = automaton
        self.matcher = matcher
        self.tokens = list(prompt)  # prompt and output
        self.prompt_len = len(prompt)
        self.most_tokens = len(prompt) + params.max_new_tokens  # of prompt and output
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        wants = params.prompt_logprobs and not sample
        self.prompt_logprobs: list[float | None] | None = [None] * len(prompt) if wants else None
        self._decode = decode
        self.end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens)
        # Of its next pass. The host lags behind the device, which compares positions: masking too long has no effect.
        self.flags = SamplingFlags.of(
            params,
            has_ends=bool(self.end_tokens),
            banned=bool(banned),
            constrained=automaton is not None or matcher is not None,
        )
        has_text = params.stop or streams_text
        self._reasoning = reasoning
        self._answers = reasoning is None  # whether the answer began before the last tokens
        self._text = OutputText(decode, params.stop, params.reasoning, byte_tokens) if has_text else None

        # Written by the scheduler only.
        self.slot: int | None = None
        self.table = 0  # where the table of its automaton starts
        self.pages: list[int] = []
        self.freed = 0  # so many of `pages`, the first ones, are outside of all windows and freed
        self.most_pages = 0  # that it can need
        self.shared = 0  # pages that it took from the prefix cache, the first of `pages`
        self.unshared = False  # it must not take any again
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
        self._verifies: dict[_Verify, int] = {}  # how many there were of each kind

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def expected_tokens(self) -> float:
        """Generated tokens, plus those that the results in flight should bring: 1 from a prompt, and from each decode
        step the mean accept length so far, or 1 before the first verify."""
        metrics, first = self.metrics, self.pending - self.in_flight
        accept_length = metrics.emitted / metrics.verify_steps if metrics.verify_steps else 1.0
        return self.generated + first + self.in_flight * accept_length

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt were asked for and are not known yet."""
        return self.prompt_logprobs is not None and None in self.prompt_logprobs[1:]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_answered(self) -> bool:
        """Whether it is finished with a complete answer."""
        return self.finished and self.finish_reason not in INCOMPLETE

    def append(self, tokens: list[int], now: float, logprobs: Logprobs | None = None) -> int:
        """Add emitted tokens, up to the first stop token, stop string or the length limit.

        Within the limit, a stop is the finish reason. Returns how many tokens were kept.
        """
        kept = 0
        self._answers = self._reasoning is None or bool(self.metrics.reasoning_tokens)
        for token in tokens[: self.most_tokens - len(self.tokens)]:
            self.tokens.append(token)
            kept += 1
            if not self._answers and self._ends_reasoning(token):
                self.metrics.reasoning_tokens = self.generated
            if token in self.end_tokens or (self._text is not None and self._ends_text(token, self._text)):
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and len(self.tokens) >= self.most_tokens:
            self.finish_reason = "length"
        if self.flags.min_tokens and self.generated >= self.params.min_tokens:
            self.flags = self.flags._replace(min_tokens=False)
        if logprobs is not None:
            self.logprobs.extend(logprobs.chosen[:kept])
            if count := self.params.top_logprobs:
                places = zip(tokens[:kept], logprobs.top_tokens[:kept], logprobs.top[:kept], strict=True)
                for place, (token, tokens_of, values) in enumerate(places, len(self.logprobs) - kept):
                    top = dict(zip(tokens_of[:count], values[:count], strict=True))
                    self.top_logprobs.append(top)
                    # The same number, which two kernels may have rounded differently.
                    self.logprobs[place] = top.get(token, self.logprobs[place])
        if kept:
            if self.last_token is None:
                self.first_token = now
            else:
                self.metrics.itl_s.extend([(now - self.last_token) / kept] * kept)
            self.last_token = now
        return kept

    def count_verify(
        self, kept: int, drafted: int, accepted: int, depth: int, *, of_corpus: bool = False, has_budget: bool = False
    ) -> None:
        """Count a verify that emitted `kept` tokens and can accept at most `depth` drafts; ignored if it emitted none.
        of_corpus: whether the drafts came from the corpus; has_budget: whether `drafted` follows from a verify
        budget. What follows for the metrics is computed with the completion."""
        if not kept:
            return
        self.metrics.verify_steps += 1
        self.metrics.emitted += kept
        before = len(self.tokens) - kept
        context, room = 1 << before.bit_length() - 1, min(self.most_tokens - before, drafted)
        kind = context, room, kept, drafted, accepted, depth, of_corpus, has_budget, not self._answers
        self._verifies[kind] = self._verifies.get(kind, 0) + 1

    def new_text(self, completion: Completion | None = None) -> str:
        """The text since the last call that no later token can change; with its completion, the rest of the text."""
        assert self._text is not None
        return self._text.take(None if completion is None else completion.text)

    def _ends_text(self, token: int, text: OutputText) -> bool:
        """Add the token to the text. Returns whether it ends in a stop string."""
        return text.push(token, may_stop=self.generated > self.params.min_tokens)

    def _ends_reasoning(self, token: int) -> bool:
        """Whether the first end of reasoning is complete with this token, the last one."""
        known = self._reasoning
        if known is None or token not in known.last or self.metrics.reasoning_tokens:
            return False
        return known.ends(self.tokens, self.prompt_len)

    def _count_verifies(self) -> None:
        """Add the verifies to the metrics."""
        metrics = self.metrics
        if self._reasoning is not None and not metrics.reasoning_tokens:
            prompt, output = self.tokens[: self.prompt_len], self.output
            metrics.reasoning_tokens = len(output) if self._reasoning.is_open(prompt, output) else 0
        for kind, times in self._verifies.items():
            context, room, kept, drafted, accepted, depth, of_corpus, has_budget, before_answer = kind
            deep = min(drafted, depth)
            if not metrics.emitted_histogram:
                metrics.emitted_histogram = [0] * (depth + 2)
            metrics.emitted_histogram[kept] += times
            known, right = metrics.acceptance.count(
                context=context, room=room, kept=kept, drafted=deep, accepted=accepted, times=times
            )
            metrics.drafted += times * (drafted - (deep - known))
            metrics.accepted += times * right
            if has_budget:
                metrics.budget_rows += times * (drafted + 1)
            if of_corpus:
                metrics.corpus_verifies += times
                metrics.corpus_emitted += times * kept
                metrics.corpus_drafted += times * known
                metrics.corpus_accepted += times * right
            if self._reasoning is not None:
                in_reasoning = before_answer and bool(metrics.reasoning_tokens)
                metrics.count_part(in_reasoning, times, times * kept, times * (drafted - (deep - known)), times * right)
        self._verifies.clear()

    def completion(self, now: float) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None
        metrics, output = self.metrics, self.output
        self._count_verifies()
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
            sample=self.sample,
            request_id=self.request_id,
            top_logprobs=list(self.top_logprobs) if self.params.top_logprobs else None,
            prompt_logprobs=None if self.lacks_prompt_logprobs else self.prompt_logprobs,
            seed=self.params.seed,
        )

    def _shown(self, output: list[int]) -> str:
        """The output's text, up to its stop string and without its end token."""
        ended = self.finish_reason == "stop" and bool(output) and output[-1] in self.end_tokens
        if self._text is None:
            return self._decode(output[:-1] if ended and self.params.skip_special_tokens else output)
        if ended and not self.params.skip_special_tokens:
            self._text.push(output[-1], may_stop=False)
        return self._text.whole()
