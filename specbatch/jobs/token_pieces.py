"""The part of an answer's text, and the bytes, that each of its tokens stands for: for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from specbatch.core.output_text import IncrementalText

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """A token of an answer.

    text    what it adds to the answer's text: empty for the first tokens of a character that has several, of which the
            last one has the whole. Special tokens that the text leaves out have their name
    data    its bytes, which may be part of a character
    offset  characters of the answer's text before it
    """

    text: str
    data: bytes
    offset: int


class TokenPieces:
    """Splits answers into the pieces of their tokens. skips: whether their texts leave out special tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skips: bool) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.shown_bytes
        self._decode = partial(tokenizer.decode, skip_special_tokens=skips)

    def split(self, tokens: Sequence[int], text: str) -> list[Piece]:
        """text: of the answer, which ends before a stop string and an end token."""
        in_run = self._tokenizer.byte_tokens
        growing, pieces = IncrementalText(self._decode, in_run), list[Piece]()
        whole = self._decode(list(tokens))
        shown, end = False, 0
        for token in tokens:
            growing.push(token)
            alone = token in in_run and whole[end : end + 1] == "\ufffd"  # each byte of an invalid run has one
            before, end, data = end, max(growing.shared(whole), end + alone), self.bytes_of(token)
            new = whole[before:end]
            twice = [token, token]  # as the first space of a text may be left out
            if self._decode(twice):
                if self._bytes is None:
                    data = new.encode()
                elif not shown and "\ufffd" not in (first := self._decode([token])):
                    data = first.encode()
                shown = True
            elif self._tokenizer.decode(twice, skip_special_tokens=False):
                new = data.decode(errors="replace")
            pieces.append(Piece(new, data, min(before, len(text))))
        return pieces

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text; of a special one, its name."""
        if self._bytes is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return (self._bytes[token] or b"") if token < len(self._bytes) else b""
