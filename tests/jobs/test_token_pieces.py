"""Pieces of answers: parts of characters, spaces of SentencePiece, special tokens, text that was cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specbatch.jobs.token_pieces import TokenPieces
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer

_AFTER = [decoders.ByteFallback(), decoders.Fuse()]
_STRIP = decoders.Strip(" ", 1, 0)
SPACED = ["▁cat", "cat", "▁", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
DECODERS = {
    "llama 2": decoders.Sequence([decoders.Replace("▁", " "), *_AFTER, _STRIP]),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), *_AFTER]),
    "metaspace": decoders.Sequence([decoders.Metaspace(), *_AFTER]),
    "byte-level": decoders.ByteLevel(),
}


def tokenizer(name: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "Ġcat", "cat"] if name == "byte-level" else SPACED
    backend = Backend(models.BPE({word: place for place, word in enumerate(words)}, []))
    backend.decoder = DECODERS[name]
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<a▁b>", special=True)])
    backend.add_tokens([AddedToken("▁tool", special=False), AddedToken("naïve", special=False)])
    return Tokenizer(backend, name=name)


def ids_of(found: Tokenizer, *names: str) -> list[int]:
    return [found.vocabulary().index(name) for name in names]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("skips", [True, False])
@given(tokens=st.lists(st.integers(0, 264), max_size=12))
def test_pieces_join_to_the_text(name: str, skips: bool, tokens: list[int]) -> None:
    found = tokenizer(name)
    text = found.decode(tokens, skip_special_tokens=skips)
    special = ids_of(found, "</s>", "<a▁b>") if skips else []
    pieces = TokenPieces(found, skips=skips).split(tokens, text)
    shown = [piece for piece, token in zip(pieces, tokens, strict=True) if token not in special]
    assert all(0 <= piece.offset <= len(text) for piece in pieces)
    assert "".join(piece.text for piece in shown) == text
    assert all(text.startswith(piece.text, piece.offset) for piece in shown)
    if "\ufffd" not in text:
        assert b"".join(piece.data for piece in shown) == text.encode()


def test_character_of_several_tokens() -> None:
    found = ByteTokenizer(300)
    pieces = TokenPieces(found, skips=True).split([*"aé😀".encode()], "aé😀")
    assert [piece.text for piece in pieces] == ["a", "", "é", "", "", "", "😀"]
    assert [piece.offset for piece in pieces] == [0, 1, 1, 2, 2, 2, 2]
    assert [piece.data for piece in pieces] == [bytes([byte]) for byte in "aé😀".encode()]


def test_spaces_of_sentencepiece() -> None:
    found = tokenizer("llama 2")
    tokens = ids_of(found, "</s>", "▁cat", "▁cat", "▁tool", "cat")
    pieces = TokenPieces(found, skips=True).split(tokens, found.decode(tokens))
    assert [piece.text for piece in pieces] == ["</s>", "cat", " cat", " tool", "cat"]
    assert [piece.offset for piece in pieces] == [0, 0, 3, 7, 12]
    assert TokenPieces(found, skips=True).bytes_of(tokens[1]) == b" cat"
    assert TokenPieces(found, skips=True).bytes_of(ids_of(found, "<a▁b>")[0]) == b"<a b>"


def test_one_invalid_byte_in_a_run_of_byte_tokens() -> None:
    """As the decoder shows the whole answer: a replacement character for each of them."""
    found = tokenizer("llama 2")
    valid, invalid = (
        [piece.text for piece in TokenPieces(found, skips=True).split(tokens, found.decode(tokens))]
        for tokens in (ids_of(found, "<0x41>", "<0xC3>", "<0xA9>", *rest, "cat") for rest in ([], ["<0xC3>"]))
    )
    assert valid == ["A", "", "é", "cat"]
    assert invalid == ["\ufffd", "\ufffd", "\ufffd", "\ufffd", "cat"]


def test_answer_that_ends_in_a_character_and_an_end_token() -> None:
    found = tokenizer("byte-level")
    tokens = [*ids_of(found, "cat", "Ã", "</s>")]
    pieces = TokenPieces(found, skips=True).split(tokens, "cat\ufffd")
    assert pieces == [("cat", b"cat", 0), ("\ufffd", b"\xc3", 3), ("</s>", b"</s>", 4)]


def test_offsets_after_a_stop_string_are_the_end_of_the_text() -> None:
    found = ByteTokenizer(300)
    pieces = TokenPieces(found, skips=True).split([*b"ab##"], "ab")
    assert [piece.offset for piece in pieces] == [0, 1, 2, 2]


def test_tokens_that_do_not_join() -> None:
    backend = Backend(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    pieces = TokenPieces(Tokenizer(backend, name="w"), skips=True)
    assert pieces.split([0, 1, 0], "ab a") == [("a", b"a", 0), ("b", b"b", 1), (" a", b" a", 2)]
    assert pieces.bytes_of(1) == b"##b"


def test_ids_without_a_token() -> None:
    found: Any = tokenizer("llama 2")
    pieces = TokenPieces(found, skips=True)
    assert pieces.bytes_of(5000) == b""
    assert [piece.text for piece in pieces.split([5000, 0], "cat")] == ["", "cat"]
