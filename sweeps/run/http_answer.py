"""Parses the streamed answer of an OpenAI-compatible server and records when its tokens arrive."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from specbatch.core.request import Completion, RequestMetrics


class Failed(Exception):
    """A request that failed; the message has the reason."""


class Answer:
    """A request in flight, and what has arrived of it."""

    def __init__(self, index: int, prompt: list[int], submitted: float) -> None:
        self.index, self.prompt = index, prompt
        self.submitted = self.sent = submitted
        self.first: float | None = None
        self.last = submitted
        self.text = ""
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.usage: dict[str, Any] | None = None
        self.counted = 0  # tokens so far, according to usage
        self.is_counted = True  # does every chunk have usage?
        self.gaps: list[float] = []
        self.finished = submitted  # when the finish reason arrived

    def take(self, chunk: dict[str, Any], now: float) -> int:
        """Add a chunk of the stream; return how many tokens it is known to hold."""
        if error := chunk.get("error"):
            raise Failed(f"the stream ended with an error: {message_of(json.dumps({'error': error}))}")
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if isinstance(usage, dict):
            self.usage = usage
        if not choices:  # a last chunk, only of usage
            return 0
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise Failed("the stream has a chunk that is not of a completion")
        text = choices[0].get("text") or ""
        self.text += str(text)
        if reason := choices[0].get("finish_reason"):
            self.finish_reason, self.finished = str(reason), now
        if isinstance(usage, dict):
            return self._count(_whole(usage, "completion_tokens") - self.counted, now)
        if text:
            self.is_counted = False
        if text or (reason and not self.counted):  # the end token of an answer has no text
            self._arrived(now)
        return 0

    def check(self) -> None:
        """Refuse an answer that is not complete, at the end of the stream."""
        if self.finish_reason is None:
            raise Failed("the stream ended before its answer did")
        if self.finish_reason not in ("stop", "length"):
            raise Failed(f"the server ended the answer: {self.finish_reason}")
        if self.usage is None or not _whole(self.usage, "completion_tokens"):
            raise Failed("the stream has no usage (stream_options.include_usage), so tokens cannot be counted")
        if self.is_counted:  # an end token may come with the finish reason, uncounted
            self._count(_whole(self.usage, "completion_tokens") - self.counted, self.finished)

    def completion(self) -> Completion:
        usage = self.usage or {}
        tokens, details = _whole(usage, "completion_tokens"), usage.get("prompt_tokens_details")
        metrics = RequestMetrics(
            prompt_tokens=_whole(usage, "prompt_tokens") or len(self.prompt),
            cached_tokens=_whole(details, "cached_tokens") if isinstance(details, dict) else 0,
            output_tokens=tokens,
            queue_s=self.sent - self.submitted,
            ttft_s=None if self.first is None else self.first - self.submitted,
            tpot_s=(self.last - self.first) / (tokens - 1) if self.first is not None and tokens > 1 else None,
            e2e_s=self.last - self.submitted,
            itl_s=self.gaps if self.is_counted else [],
        )
        reason = self.finish_reason or "abort"
        return Completion(self.index, list(self.prompt), [], self.text, reason, metrics, error=self.error)

    def _count(self, new: int, now: float) -> int:
        """Tokens that usage has counted since the last chunk."""
        if new <= 0:
            return 0
        self.counted += new
        if self.first is not None:
            self.gaps += [(now - self.last) / new] * new
        self._arrived(now)
        return new

    def _arrived(self, now: float) -> None:
        if self.first is None:
            self.first = now
        self.last = now


def parsed(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise Failed("the stream has a line that is not JSON") from None
    if not isinstance(chunk, dict):
        raise Failed("the stream has JSON that is not an object")
    return chunk


def _whole(table: dict[str, Any], name: str) -> int:
    """A count from the server; 0 if it is not a whole number."""
    value = table.get(name)
    return value if isinstance(value, int) else 0


def message_of(text: str) -> str:
    """The message of a server's error, in one line."""
    with suppress(ValueError, AttributeError):
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:120] or "no reason given"
