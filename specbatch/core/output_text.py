"""Incremental detokenization of an output: stop strings, and text that can be streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


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

    def flush(self) -> str:
        """What is held back, as it is: the end of an output that ends in the middle of a character."""
        return self._decode(self._tokens[self._start :])[self._known :]


class OutputText:
    """The text of a growing output up to its first stop string.

    stop       stop strings, which end the output and are not part of the text
    reasoning  texts that begin reasoning: see `SamplingParams`
    """

    def __init__(self, decode: Decode, stop: Sequence[str], reasoning: Sequence[str] = ()) -> None:
        self._incremental = IncrementalText(decode)
        self._stop = stop
        self._reasoning = reasoning
        self._may_stop = True  # at the last token
        self._cut: int | None = None  # characters before the stop string
        self._streamed = 0  # characters that `take` has returned

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token. Returns whether a stop string ends in its text; without `may_stop` none is looked for."""
        self._may_stop = may_stop
        new = self._incremental.push(token)
        return self._finds_stop(self._incremental.text, new)

    def end(self) -> bool:
        """No token follows. Returns whether a stop string ends in the text that was held back."""
        if self._cut is None:
            held = self._incremental.flush()
            self._finds_stop(self._incremental.text + held, held)
        return self._cut is not None

    def whole(self) -> str:
        """The text of an output that has ended."""
        self.end()
        return (self._incremental.text + self._incremental.flush())[: self._cut]

    def _finds_stop(self, text: str, new: str) -> bool:
        """Look for the first stop string that ends in `new`, the end of the text."""
        if not (self._may_stop and new and self._stop):
            return False
        before = len(text) - len(new)
        # A stop string that ended before is no match: it was found then, or was not looked for.
        places = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        self._cut = min((place for place in places if place >= 0 and not self._reasons(text, place)), default=None)
        return self._cut is not None

    def _reasons(self, text: str, place: int) -> bool:
        """Whether the text has begun to reason before `place`, or may do so with what follows its first characters."""
        begins = any(mark.startswith(text.lstrip()[: len(mark)]) for mark in self._reasoning)
        return begins or any(0 <= text.find(mark) <= place for mark in self._reasoning)

    def take(self, whole: str | None = None) -> str:
        """The text since the last call, without an end that may begin a stop string. whole: of an output that has
        ended; then the rest of it."""
        text = self._incremental.text if whole is None else whole
        end = len(text) if whole is not None else len(text) - self._held_back(text)
        new = text[self._streamed : end]
        self._streamed = max(self._streamed, end)
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
