"""Tokens that two vocabularies share: by bytes, special ones by name, and the ends of texts."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specbatch.text import tokenizer
from specbatch.text.shared_tokens import shared_tokens
from specbatch.text.token_bytes import token_bytes


class Known(tokenizer.Tokenizer):
    """Of a backend, without files."""

    def __init__(self, backend: Tokenizer, end: str | None) -> None:
        self._backend, self._special_tokens = backend, {} if end is None else {"eos_token": end}
        self.name, self.vocab_size = "known", backend.get_vocab_size()
        self.eos_ids = frozenset() if end is None else frozenset({backend.token_to_id(end)})


def made(words: list[str], decoder: Any, special: list[str], end: str | None = None) -> Known:
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoder
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Known(backend, end)


SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def test_byte_level_and_sentencepiece() -> None:
    target = made(
        ["a", "Ġthe", "Ġwalrus", "Ã", "Ġthere", "zz"], decoders.ByteLevel(), ["<|im_end|>", "<x>"], "<|im_end|>"
    )
    draft = made(["▁the", "us", "a", "<0xC3>", "re"], SENTENCEPIECE, ["<x>", "</s>"], "</s>")
    found = shared_tokens(target, draft)
    assert found is not None
    pairs = dict(zip(found.target, found.draft, strict=True))
    assert pairs == {0: 2, 1: 0, 3: 3, 7: 5, 6: 6}, "a, the, a byte, <x>, and the ends of texts"
    ends = {2: 1, 4: 4, 5: 6}  # " walrus" as "us", " there" as "re", and what has no such end as the end of a text
    assert found.known == [pairs.get(token, ends.get(token)) for token in range(8)]


def test_special_tokens_are_no_text() -> None:
    target = made(["a", "<x>"], decoders.ByteLevel(), ["<s>"])
    draft = made(["a", "<s>"], decoders.ByteLevel(), ["<x>"])
    found = shared_tokens(target, draft)
    assert found is not None
    assert (found.target, found.draft) == ([0], [0])


def test_vocabularies_without_a_shared_text() -> None:
    words = made(["a", "b"], decoders.ByteLevel(), ["<s>"], "<s>")
    assert shared_tokens(words, made(["c"], decoders.ByteLevel(), ["<s>"], "<s>")) is None
    assert shared_tokens(words, made(["a", "##b"], decoders.WordPiece(), [])) is None, "tokens do not join to a text"
    assert token_bytes(words._backend) == [b"a", b"b", None]
