"""The part of an answer's text, and the bytes, that each of its tokens stands for: for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from specbatch.core.output_text import IncrementalText

if TYPE_CHECKING:
    from specbatch.tokenizer import Tokenizer


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
        growing, pieces = IncrementalText(self._decode), list[Piece]()
        shown = list[int]()  # places of tokens that are in the text
        for place, token in enumerate(tokens):
            before, new, data = len(growing.text), growing.push(token), self.bytes_of(token)
            twice = [token, token]  # as the first space of a text may be left out
            if self._decode(twice):
                if self._bytes is None:
                    data = new.encode()
                elif not shown and "\ufffd" not in (first := self._decode([token])):
                    data = first.encode()
                shown.append(place)
            elif self._tokenizer.decode(twice, skip_special_tokens=False):
                new = data.decode(errors="replace")
            pieces.append(Piece(new, data, before))
        if shown and (held := growing.flush()):  # the answer ends in the middle of a character
            last = shown[-1]
            pieces[last] = pieces[last]._replace(text=pieces[last].text + held)
            grown = len(growing.text) + len(held)
            pieces[last + 1 :] = [piece._replace(offset=grown) for piece in pieces[last + 1 :]]
        return [piece._replace(offset=min(piece.offset, len(text))) for piece in pieces]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text; of a special one, its name."""
        if self._bytes is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return (self._bytes[token] or b"") if token < len(self._bytes) else b""
