"""The bytes that each token of a vocabulary stands for: byte-level BPE, and SentencePiece with byte pieces."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: Any, *, special: bool = False) -> list[bytes | None] | None:
    """The bytes of each token of a `tokenizers.Tokenizer`, by id, as its decoder shows them; None for unused ids and,
    without `special`, for special tokens. None in place of the list for a tokenizer whose tokens do not join to a text
    (WordPiece)."""
    described = json.loads(backend.to_str())
    decoders = _flattened(described["decoder"] or {})
    kinds = {item["type"] for item in decoders}
    space = next((text for item in decoders if (text := _space(item)) is not None), None)
    if "ByteLevel" not in kinds and space is None:
        return None
    hidden = {item["id"] for item in described["added_tokens"] if item["special"] and not special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    found: list[bytes | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    for token, index in vocabulary.items():
        if index in hidden:
            continue
        if "ByteLevel" in kinds:  # also of added tokens, though these are matched in a text as they are
            found[index] = _of_characters(token)
        elif "ByteFallback" in kinds and (piece := _BYTE_PIECE.fullmatch(token)):
            found[index] = bytes.fromhex(piece[1])
        else:
            found[index] = token.replace(space or " ", " ").encode()
    return found


def byte_tokens(backend: Any) -> dict[int, int]:
    """The byte of each token, by id, that the decoder of a `tokenizers.Tokenizer` shows as one under byte fallback:
    <0x0A> and the like. It decodes a run of them as a whole."""
    named = ((f"<0x{byte:02X}>", byte) for byte in range(256))
    found = ((backend.token_to_id(name), name, byte) for name, byte in named)
    return {
        index: byte
        for index, name, byte in found
        if index is not None and backend.decode([index], skip_special_tokens=False) != name
    }


def _flattened(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    parts = decoder.get("decoders")
    return [item for part in parts for item in _flattened(part)] if parts is not None else [decoder] if decoder else []


def _space(decoder: dict[str, Any]) -> str | None:
    """What SentencePiece writes for a space, if the decoder makes spaces of it."""
    if decoder["type"] == "Metaspace":
        return str(decoder["replacement"])
    if decoder["type"] == "Replace" and decoder["content"] == " ":
        return str(decoder["pattern"].get("String"))
    return None


def _of_characters(token: str) -> bytes:
    """The bytes of a byte-level token, each written as one character (GPT-2, Radford et al. 2019)."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, and characters from 256 on for the other bytes in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
