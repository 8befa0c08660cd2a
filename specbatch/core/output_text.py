"""Incremental detokenization of an output: stop strings, and text that can be streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Decode = Callable[[list[int]], str]


class IncrementalText:
    """The text of a growing list of tokens: after each push it is what `decode` shows of all tokens.

    settled      the beginning of the text that no later token changes
    byte_tokens  the byte of each token that stands for one under byte fallback (`Tokenizer.byte_tokens`)

    Byte-level tokens can end in the middle of a character, which settles once it is complete. A decoder with byte
    fallback shows a run of byte tokens as its characters, or, with one invalid byte, as replacement characters only; so
    a run settles once another token ends it. Only the last tokens are decoded again on a push.
    """

    def __init__(self, decode: Decode, byte_tokens: Mapping[int, int] | None = None) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens or {}
        self._tokens: list[int] = []
        self._start = 0  # decoding starts here, so that joining rules (leading spaces) see the previous token
        self._whole = 0  # the text of the tokens before this one is settled
        self._known = 0  # characters from _start on that are settled
        self._in_run = False  # the last tokens that have text are byte tokens
        self._tail: str | None = ""  # the text after `settled`; None: not decoded yet
        self.settled = ""

    @property
    def text(self) -> str:
        if self._tail is None:
            self._tail = self._decode(self._tokens[self._start :])[self._known :]
        return self.settled + self._tail

    def shared(self, other: str) -> int:
        """How many characters the text and another one have in common at their beginnings."""
        text = self.text
        if text.startswith(other) or other.startswith(text):
            return min(len(text), len(other))
        start = len(self.settled) if other.startswith(self.settled) else 0
        pairs = enumerate(zip(text[start:], other[start:], strict=False), start)
        return next(place for place, (ours, theirs) in pairs if ours != theirs)

    def push(self, token: int) -> None:
        self._tokens.append(token)
        if token in self._byte_tokens:
            self._in_run = True
        elif self._in_run:  # not ended by special tokens that are left out, as a first space may be
            self._in_run = not self._decode([token, token])
        if self._in_run:  # most runs need no text before their end
            self._tail = None
            return
        decoded = self._decode(self._tokens[self._start :])
        new = decoded.rstrip("\ufffd")[self._known :]
        self.settled += new
        self._known += len(new)
        self._tail = decoded[self._known :]
        if new and not self._tail:
            self._start, self._whole = self._whole, len(self._tokens)
            self._known = len(self._decode(self._tokens[self._start :]))


class OutputText:
    """The text of a growing output up to its first stop string.

    As with lm-eval 0.4.13 and transformers, an output ends with the first token after which its whole decoded text has
    a stop string: also one in replacement characters, though a later token might complete the character.

    stop         stop strings, which end the output and are not part of the text
    reasoning    texts that begin reasoning: see `SamplingParams`
    byte_tokens  see `IncrementalText`
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str],
        reasoning: Sequence[str] = (),
        byte_tokens: Mapping[int, int] | None = None,
    ) -> None:
        self._incremental = IncrementalText(decode, byte_tokens)
        self._byte_tokens = byte_tokens or {}
        self._stop = stop
        invalid = any("\ufffd" in text for text in stop)
        self._last_bytes = set(range(256)) if invalid else {text.encode(errors="surrogatepass")[-1] for text in stop}
        self._reasoning = reasoning
        self._may_open = bool(reasoning)  # the first characters may be the beginning of a mark
        self._early: str | None = None  # text of the first tokens, in which no stop string is looked for
        self._searched = 0  # settled characters that have been searched
        self._cut: int | None = None  # characters before the stop string
        self._streamed = 0  # characters that `take` has returned

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token. Returns whether a stop string ends in its text; without `may_stop` none is looked for."""
        if may_stop and self._early is None:
            self._early = self._incremental.text
        self._incremental.push(token)
        if may_stop and self._stop and self._may_complete(token):
            self._cut = self._first_stop()
        return self._cut is not None

    def _may_complete(self, token: int) -> bool:
        """Whether a stop string may end in the text of a token: in a run of byte tokens, only with its last byte."""
        return token not in self._byte_tokens or self._byte_tokens[token] in self._last_bytes

    def whole(self) -> str:
        """The text of an output that has ended."""
        return self._incremental.text[: self._cut]

    def _first_stop(self) -> int | None:
        """The place of the first stop string that counts."""
        text = self._incremental.text
        if self._may_open:
            start = text.lstrip()
            self._may_open = any(mark.startswith(start) and mark != start for mark in self._reasoning)
            if self._may_open:
                return None  # if no reasoning follows, all of the text is searched then
        after = max(self._searched, self._incremental.shared(self._early or ""))
        places = (text.find(stop, max(0, after - len(stop) + 1)) for stop in self._stop)
        self._searched = len(self._incremental.settled)
        return min((place for place in places if place >= 0 and not self._reasons(text, place)), default=None)

    def _reasons(self, text: str, place: int) -> bool:
        """Whether the text has begun to reason before `place`, or with its first characters."""
        begins = any(text.lstrip().startswith(mark) for mark in self._reasoning)
        return begins or any(0 <= text.find(mark) <= place for mark in self._reasoning)

    def take(self, whole: str | None = None) -> str:
        """The text since the last call, without an end that may begin a stop string. whole: of an output that has
        ended; then the rest of it."""
        text = self._incremental.settled if whole is None else whole
        end = len(text) if whole is not None else len(text) - self._held_back(text)
        new = text[self._streamed : end]
        self._streamed = max(self._streamed, end)
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string; all of it where it may become reasoning."""
        if self._may_open and self._stop:
            return len(text)
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
