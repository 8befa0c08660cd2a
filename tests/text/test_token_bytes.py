"""The bytes of tokens: byte-level BPE, SentencePiece with byte pieces, and tokenizers that have none."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specbatch.text.token_bytes import byte_tokens, token_bytes


def backend(vocabulary: list[str], decoder: object) -> Tokenizer:
    found = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    found.decoder = decoder
    found.add_special_tokens([AddedToken("<end>", special=True)])
    found.add_tokens([AddedToken("<tool> é", special=False)])
    return found


def test_byte_level() -> None:
    every = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = backend([*every, "Ġhi", "Ã©"], decoders.ByteLevel())
    bytes_of = token_bytes(found)
    assert bytes_of is not None
    assert sorted(item for item in bytes_of[:256] if item) == [bytes([byte]) for byte in range(256)]
    assert bytes_of[256:] == [b" hi", "é".encode(), None, "<tool> é".encode()]
    assert found.decode([256, 257]) == " hié"


def test_sentencepiece() -> None:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = backend(["▁a", "é", "<0xC3>", "<0x0A>", "▁▁"], decoder)
    assert token_bytes(found) == [b" a", "é".encode(), b"\xc3", b"\n", b"  ", None, "<tool> é".encode()]
    found.decoder = decoders.Metaspace()
    assert (token_bytes(found) or [])[:3] == [b" a", "é".encode(), b"<0xC3>"]


def test_byte_tokens_of_byte_fallback() -> None:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = ["▁a", "<0xC3>", "<0x0A>", "<0x20>", "\n"]
    found = backend(words, decoder)
    found.add_special_tokens([AddedToken("<0x41>", special=True)])
    assert byte_tokens(found) == {1: 0xC3, 2: 0x0A, 3: 0x20, found.token_to_id("<0x41>"): 0x41}
    found.decoder = decoders.Sequence([decoder, decoders.Strip(" ", 1, 0)])
    assert byte_tokens(found)[3] == 0x20
    for other in (decoders.Metaspace(), decoders.ByteLevel(), decoders.WordPiece()):
        assert byte_tokens(backend(words, other)) == {}


def test_wordpiece_has_none() -> None:
    assert token_bytes(backend(["a", "##b"], decoders.WordPiece())) is None


def test_added_tokens_are_what_the_decoder_shows() -> None:
    every = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = backend([*every, "Ġhi"], decoders.ByteLevel())
    spaced = backend(["▁a"], decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
    for found in (level, spaced):
        found.add_tokens([AddedToken("naïve", special=False), AddedToken("▁x", special=False)])
        found.add_special_tokens([AddedToken("<a▁é>", special=True)])
        bytes_of = token_bytes(found, special=True)
        assert bytes_of is not None
        for token, data in enumerate(bytes_of):
            assert data is not None
            assert found.decode([token], skip_special_tokens=False) == data.decode(errors="replace")
    assert b"na\xefve" in (token_bytes(level) or [])
    assert b"<a \xc3\xa9>" in (token_bytes(spaced, special=True) or [])
    assert b"<a \xc3\xa9>" not in (token_bytes(spaced) or [])
