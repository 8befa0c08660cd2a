"""The streamed answer of an OpenAI-compatible server: its text, when its tokens arrive, and whether its counts can be
right."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.servers.client import Failed, message_of, one_line
from specbatch.servers.verifies import (
    Drafting,
    Progress,
    Timings,
    add_verifies,
    count_of,
    of_llamacpp,
    of_sglang,
    of_vllm,
    progress_of,
)

SPECIAL_TOKENS = 8  # that a server may add to a prompt
TEMPLATE_TOKENS = 2_048  # that a server's chat template may add, such as a system prompt
_BASE_BYTES, _TOKEN_BYTES = 2**20, 2**13  # of a stream, with the JSON around its tokens


class Answer:
    """A request in flight, and what has arrived of it."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        submitted: float,
        max_tokens: int,
        text: str | None = None,
        *,
        templated: bool = False,
    ) -> None:
        """text: the prompt, if it is sent as text. templated: whether the server renders it with a chat template."""
        self.index, self.prompt, self.max_tokens, self.text = index, prompt, max_tokens, text
        # A server that drops part of a prompt measures something else. A token has at least one byte.
        least, most = (len(prompt),) * 2 if text is None else (bool(text), len(text.encode("utf-8", "replace")))
        self._size = f"{len(prompt)} tokens" if prompt or text is None else f"{len(text)} characters"
        self.prompt_range = (1, 2 * most + TEMPLATE_TOKENS) if templated else (least, most + SPECIAL_TOKENS)
        self.submitted = self.sent = submitted
        self.first: float | None = None
        self.last = submitted
        self.texts: list[str] = []  # of the chunks
        self.reasoning: list[str] = []  # that the server split off, of the chunks
        self.pieces = 0  # chunks with some text
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
        self.completion_tokens: int | None = None  # by the last usage
        self.reasoning_tokens: int | None = None  # by the last usage
        self._reasoned = 0  # tokens until the last chunk of reasoning, by its usage
        self.counted = 0  # tokens that have arrived, by the usage of their chunks
        self.is_counted = True  # does every chunk have usage?
        self.arrivals: list[tuple[float, int]] = []  # of counted tokens: when, and how many
        self.finished = submitted  # when the finish reason arrived
        self._drafting: Drafting | None = None  # by vLLM or SGLang
        self._progress: list[Progress] = []  # by llama.cpp

    @property
    def drafting(self) -> Drafting | Timings | None:
        """What the server reported of its verifies."""
        return self._drafting or of_llamacpp(self._progress)

    @property
    def most_bytes(self) -> int:
        """How long the stream may be."""
        return _BASE_BYTES + _TOKEN_BYTES * self.max_tokens

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Add a chunk of the stream. Raises Failed."""
        if error := chunk.get("error"):
            raise Failed(f"the stream ended with an error: {message_of(json.dumps({'error': error}))}")
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if usage is not None:
            self._take_usage(usage)
        self._drafting = of_vllm(chunk.get("metrics")) or of_sglang(chunk.get("sglext")) or self._drafting
        if (progress := progress_of(chunk.get("timings"))) is not None:
            self._progress.append(progress)
        if not choices:  # a last chunk, only of usage
            return
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise Failed("the stream has a chunk that is not of a completion")
        (reasoning, content), reason = texts_of(choices[0]), choices[0].get("finish_reason")
        text = reasoning + content
        if not isinstance(reason, str | None):
            raise Failed("the stream has a text or finish_reason that is not a string")
        if text:
            self._take_text(reasoning, content)
        if reason:
            self.finish_reason, self.finished = reason, now
        if usage is not None:
            assert self.completion_tokens is not None
            self._count(self.completion_tokens - self.counted, now)
            self._reasoned = self.counted if reasoning else self._reasoned
            return
        if text:
            self.is_counted = False
        if text or (reason and not self.counted):  # the end token of an answer has no text
            self._arrived(now)

    def _take_text(self, reasoning: str, text: str) -> None:
        if self.finish_reason is not None:
            raise Failed("the stream has text after its finish_reason")
        self.texts.append(text)
        self.reasoning.append(reasoning)
        self.pieces += 1
        if self.pieces > self.max_tokens + 1:  # the last chunk may be text that was held back
            raise Failed(f"the stream has more than {self.max_tokens + 1} chunks for max_tokens={self.max_tokens}")

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            raise Failed("the stream has usage that is not an object")
        prompt, completion = count_of(usage, "prompt_tokens"), count_of(usage, "completion_tokens")
        total, details = count_of(usage, "total_tokens"), usage.get("prompt_tokens_details")
        if completion is None:
            raise Failed("usage has no completion_tokens")
        if completion > self.max_tokens:
            raise Failed(f"usage has {completion} completion_tokens for max_tokens={self.max_tokens}")
        if completion < (self.completion_tokens or 0):
            raise Failed(f"completion_tokens of usage fell from {self.completion_tokens} to {completion}")
        self.completion_tokens = completion
        if prompt is not None:
            if self.prompt_tokens not in (None, prompt):
                raise Failed(f"prompt_tokens of usage changed from {self.prompt_tokens} to {prompt}")
            least, most = self.prompt_range
            if not least <= prompt <= most:
                raise Failed(f"usage has {prompt} prompt_tokens for a prompt of {self._size}")
            if total is not None and total != prompt + completion:
                raise Failed(f"usage has {total} total_tokens, but {prompt} + {completion}")
            self.prompt_tokens = prompt
        self._take_reasoning(usage, completion)
        if isinstance(details, dict) and (cached := count_of(details, "cached_tokens")) is not None:
            if cached > (self.prompt_tokens or 0):
                raise Failed(f"usage has {cached} cached_tokens of {self.prompt_tokens} prompt_tokens")
            self.cached_tokens = cached

    def _take_reasoning(self, usage: dict[str, Any], completion: int) -> None:
        """The tokens of the reasoning, if usage has them: as in OpenAI's API, or as SGLang writes them."""
        details = usage.get("completion_tokens_details")
        found = count_of(details if isinstance(details, dict) else usage, "reasoning_tokens")
        if found is not None and found > completion:
            raise Failed(f"usage has {found} reasoning_tokens of {completion} completion_tokens")
        self.reasoning_tokens = found if found is not None else self.reasoning_tokens

    def _all_reasoning_tokens(self) -> int:
        """Those that usage has, else those that had arrived with the last chunk of reasoning; 0 where neither is
        known."""
        if self.reasoning_tokens or not self.is_counted:  # servers write 0 where they do not count them
            return self.reasoning_tokens or 0
        return self._reasoned

    def check(self) -> None:
        """Refuse an answer that is not complete, at the end of the stream."""
        if self.finish_reason is None:
            raise Failed("the stream ended before its answer did")
        if self.finish_reason not in ("stop", "length"):
            raise Failed(f"the server ended the answer: {one_line(self.finish_reason, 40)}")
        tokens = self.completion_tokens
        if tokens is None:
            raise Failed("the stream has no usage (stream_options.include_usage), so tokens cannot be counted")
        if not tokens or tokens < self.pieces - 1:
            raise Failed(f"usage has {tokens} completion_tokens for {self.pieces} chunks of text")
        if self.is_counted:  # an end token may come with the finish reason, uncounted
            self._count(tokens - self.counted, self.finished)

    def completion(self) -> Completion:
        tokens = self.completion_tokens or 0
        metrics = RequestMetrics(
            prompt_tokens=len(self.prompt) if self.prompt_tokens is None else self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=tokens,
            reasoning_tokens=self._all_reasoning_tokens(),
            queue_s=self.sent - self.submitted,
            ttft_s=None if self.first is None else self.first - self.submitted,
            tpot_s=(self.last - self.first) / (tokens - 1) if self.first is not None and tokens > 1 else None,
            e2e_s=self.last - self.submitted,
            itl_s=self._gaps() if self.is_counted else [],
        )
        add_verifies(metrics, self.drafting, max_tokens=self.max_tokens, ended_early=tokens != self.max_tokens)
        text, reasoning = _joined(self.texts), _joined(self.reasoning) or None
        reason, error = self.finish_reason or "abort", self.error
        return Completion(self.index, list(self.prompt), [], text, reason, metrics, error=error, reasoning=reasoning)

    def _gaps(self) -> list[float]:
        """Inter-token latencies: each token of an arrival has an equal share of the time since the one before."""
        found = []
        for (before, _), (now, tokens) in pairwise(self.arrivals):
            found += [(now - before) / tokens] * tokens
        return found

    def _count(self, new: int, now: float) -> None:
        """Tokens that usage has counted since the last chunk."""
        if new > 0:
            self.counted += new
            self.arrivals.append((now, new))
            self._arrived(now)

    def _arrived(self, now: float) -> None:
        if self.first is None:
            self.first = now
        self.last = now


def texts_of(choice: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text of a chunk of /v1/completions or /v1/chat/completions. The field of reasoning is `reasoning`
    of vLLM, some releases of which repeat it as `reasoning_content`, the field of SGLang and llama.cpp."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning, text = delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""
    else:
        reasoning, text = "", choice.get("text") or ""
    if not isinstance(reasoning, str) or not isinstance(text, str):
        raise Failed("the stream has a text that is not a string")
    return reasoning, text


def _joined(parts: list[str]) -> str:
    """The text of chunks. Surrogates that JSON escapes: pairs are joined, others are replaced."""
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
