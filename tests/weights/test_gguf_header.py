"""GGUF files whose counts, lengths, offsets or types are wrong are refused before anything is allocated."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import Field, gguf_bytes, gguf_tensors, metadata, text_bytes
from gguf.constants import GGUFValueType
from limits import limited

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint
from specbatch.weights.gguf_header import GgufError, read_gguf

TEXT, WHOLE, MANY = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.ARRAY
NORM = "output_norm.weight"


def with_field(key: str, field: Field) -> bytes:
    return gguf_bytes(metadata() | {key: field})


def after(key: str, *replaced: tuple[str, int]) -> bytes:
    """The file with other numbers from the type of `key` on."""
    content = bytearray(gguf_bytes())
    at = content.index(text_bytes(key)) + len(text_bytes(key))
    for form, number in replaced:
        struct.pack_into(f"<{form}", content, at, number)
        at += struct.calcsize(f"<{form}")
    return bytes(content)


def counts(tensors: int, keys: int) -> bytes:
    return gguf_bytes()[:8] + struct.pack("<QQ", tensors, keys) + gguf_bytes()[24:]


def with_tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    return gguf_bytes(changes={NORM: (len(dims) if count is None else count, dims, kind, offset)})


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    fields, tensors = read_gguf(path)
    assert fields.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert fields.items() <= {key: field.value for key, field in metadata().items()}.items()
    assert len(fields) == len(metadata()) - 1
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in gguf_tensors().items()
    }
    assert all(torch.equal(torch.tensor(tensors[name].data), tensor) for name, tensor in gguf_tensors().items())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (counts(2**63, 23), "has 0 dimensions"),
        (counts(11, 2**64 - 1), "not a complete GGUF file|unknown type|is not UTF-8|bytes"),
        (after("general.architecture", ("I", 8), ("Q", 2**62)), "a text of 4611686018427387904 bytes"),
        (after("general.architecture", ("I", 8), ("Q", 2**23)), "not a complete GGUF file"),
        (after("general.architecture", ("I", 77)), "a value of the unknown type 77"),
        (after("tokenizer.ggml.tokens", ("I", 9), ("I", 0), ("Q", 2**63)), "a list of 9223372036854775808 items"),
        (after("tokenizer.ggml.tokens", ("I", 9), ("I", 10), ("Q", 2**22)), "not a complete GGUF file"),
        (after("tokenizer.ggml.tokens", ("I", 9), ("I", 9), ("Q", 1)), "lists in a list"),
        (with_field("general.alignment", Field(WHOLE, None, 0)), "general.alignment is 0"),
        (with_field("general.alignment", Field(WHOLE, None, 48)), "general.alignment is 48"),
        (with_field("general.alignment", Field(WHOLE, None, 2**31)), "general.alignment is 2147483648"),
        (with_field("general.alignment", Field(TEXT, None, "32")), "general.alignment is '32'"),
        (with_field("a", Field(TEXT, None, "\ud800")), "a text that is not UTF-8"),
        (with_tensor((2**63, 2)), "ends after it"),
        (with_tensor((2**32, 2**32)), "ends after it"),
        (with_tensor((0, 32)), r"is \[32, 0\]"),
        (with_tensor((32,), count=2**32 - 1), "has 4294967295 dimensions"),
        (with_tensor((32,), offset=2**63), "ends after it"),
        (with_tensor((33,), kind=2), r"is \[33\]; rows of Q4_0 are multiples of 32"),
        (with_tensor((32,), kind=5), "has the unknown type 5"),
        (with_tensor((32, 264), offset=0), "ends after it"),  # it would share bytes with other tensors
        (gguf_bytes().replace(text_bytes("general.alignment"), text_bytes("llama.block_count")), "block_count twice"),
        (gguf_bytes().replace(text_bytes("blk.0.attn_q.weight"), text_bytes("blk.0.attn_k.weight")), "twice"),
    ],
)  # fmt: skip
def test_wrong_structure_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with limited(5, 1 << 28), pytest.raises(SpecbatchError, match=reason) as caught:
        open_checkpoint(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "field", "reason"),
    [
        ("general.architecture", Field(WHOLE, None, 5), r"architecture=5: it must be of type str"),
        ("llama.attention.head_count", Field(WHOLE, None, 0), "head_count=0"),
        ("llama.attention.head_count", Field(TEXT, None, "2"), "head_count='2'"),
        ("llama.attention.head_count", Field(MANY, WHOLE, []), r"head_count=\[\]"),
        ("llama.embedding_length", Field(GGUFValueType.INT64, None, -32), "embedding_length=-32"),
        ("llama.block_count", Field(WHOLE, None, 2**32 - 1), "num_hidden_layers=4294967295"),
        ("llama.attention.key_length", Field(TEXT, None, "x"), "key_length='x'"),
        ("llama.attention.layer_norm_rms_epsilon", Field(GGUFValueType.FLOAT32, None, float("nan")), "epsilon=nan"),
        ("llama.rope.freq_base", Field(TEXT, None, "x"), "freq_base='x'"),
        ("split.count", Field(TEXT, None, "x"), "one part of several"),
    ],
)
def test_metadata_of_a_wrong_type_is_refused(key: str, field: Field, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_field(key, field))
    with pytest.raises(SpecbatchError, match=reason):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("key", "field", "reason"),
    [
        ("tokens", Field(WHOLE, None, 5), "tokens=5: it must be of type list"),
        ("tokens", Field(MANY, WHOLE, [1, 2]), "tokens with items that are not of type str"),
        ("token_type", Field(MANY, GGUFValueType.INT32, [1]), "264 tokens and the types of 1"),
        ("merges", Field(MANY, TEXT, ["a"]), "its tokenizer cannot be read"),
        ("merges", Field(MANY, TEXT, ["no such"]), "its tokenizer cannot be read"),
        ("bos_token_id", Field(WHOLE, None, 264), "bos_token_id=264: it must be the id of one of 264 tokens"),
        ("eos_token_id", Field(TEXT, None, "x"), "eos_token_id='x'"),
        ("add_bos_token", Field(TEXT, None, "x"), "add_bos_token='x': use true or false"),
        ("pre", Field(MANY, TEXT, []), r"pre=\[\]"),
    ],
)
def test_tokenizers_of_a_wrong_form_are_refused(key: str, field: Field, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_field(f"tokenizer.ggml.{key}", field))
    with pytest.raises(SpecbatchError, match=reason):
        open_checkpoint(str(path)).tokenizer()


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "loop.gguf").symlink_to("loop.gguf")
    for name, reason in (
        ("", "is not a regular file"),
        ("model.gguf", "this file is not a model"),
        ("loop", "cannot be read .Too many levels of symbolic links"),
        ("loop/loop.gguf", "no such file"),
    ):
        with limited(5), pytest.raises(SpecbatchError, match=reason):
            open_checkpoint(str(tmp_path / name))


def test_errors_of_the_parser_name_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(GgufError, match="shorter than a header"):
        read_gguf(path)
