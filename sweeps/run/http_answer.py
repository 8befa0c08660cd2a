"""One answer of an OpenAI-compatible server as it comes, piece by piece."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from specbatch.core.request import Completion, RequestMetrics


class Failed(Exception):
    """A request that the server did not answer as it should; the message says what happened."""


class Answer:
    """A request on its way: what came when."""

    def __init__(self, index: int, prompt: list[int], submitted: float) -> None:
        self.index, self.prompt = index, prompt
        self.submitted = self.sent = submitted
        self.first: float | None = None
        self.last = submitted
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.counted = 0  # tokens in the pieces so far; as usage says
        self.is_counted = True  # did usage come with every piece?
        self.gaps: list[float] = []
        self.finished = submitted  # when the piece with the finish reason came

    def take(self, piece: dict[str, Any], now: float) -> int:
        """Take in a piece of the stream; how many tokens it is known to hold."""
        if error := piece.get("error"):
            raise Failed(f"the stream broke off: {message_of(json.dumps({'error': error}))}")
        usage, choices = piece.get("usage"), piece.get("choices")
        if isinstance(usage, dict):
            self.usage = usage
        if not choices:  # a last piece, of usage alone
            return 0
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise Failed("the stream holds a piece that is none of a completion")
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
        """Behind the stream: refuse what is no whole answer."""
        if self.finish_reason is None:
            raise Failed("the stream ended before its answer did")
        if self.finish_reason not in ("stop", "length"):
            raise Failed(f"the server ended the answer: {self.finish_reason}")
        if self.usage is None or not _whole(self.usage, "completion_tokens"):
            raise Failed("the stream says nothing of usage (stream_options.include_usage), so no token can be counted")
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
        return Completion(self.index, list(self.prompt), [], self.text, self.finish_reason or "abort", metrics)

    def _count(self, new: int, now: float) -> int:
        """Tokens that usage has counted since the last piece, if any."""
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
        piece = json.loads(data)
    except ValueError:
        raise Failed("the stream holds what is not JSON") from None
    if not isinstance(piece, dict):
        raise Failed("the stream holds JSON that is no object")
    return piece


def _whole(table: dict[str, Any], name: str) -> int:
    """A count that a server tells; 0 where it is none."""
    value = table.get(name)
    return value if isinstance(value, int) else 0


def message_of(text: str) -> str:
    """What a server's error says, in a line."""
    with suppress(ValueError, AttributeError):
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:120] or "no reason given"
