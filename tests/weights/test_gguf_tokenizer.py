"""Tokenizers of GGUF files: end tokens as in llama.cpp, ids that mean none, and a file as --tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Field, gguf_bytes, metadata
from gguf.constants import GGUFValueType

from specbatch.errors import SpecbatchError
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights import open_checkpoint, open_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
UINT32, INT32, MANY = GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.ARRAY
NONE = 2**32 - 1
FIRST = 264  # the id of the first additional token
BOS, EOS, START = 256, 257, 258  # of the file without changes; 257 is <|im_end|>


def write(
    path: Path, tokens: Mapping[str, int] | None = None, eos: Any = EOS, template: str | None = None, **roles: Any
) -> Path:
    """A GGUF file with additional tokens (text -> type), and with ids by role."""
    found, more = metadata(), dict(tokens or {})
    for key, new in (("tokens", list(more)), ("token_type", list(more.values()))):
        name = f"tokenizer.ggml.{key}"
        found[name] = found[name]._replace(value=[*found[name].value, *new])
    for role, value in {"eos": eos, **roles}.items():
        field = value if isinstance(value, Field) else Field(UINT32, None, value)
        found[f"tokenizer.ggml.{role}_token_id"] = field
        if value is None:
            del found[f"tokenizer.ggml.{role}_token_id"]
    if template is not None:
        found["tokenizer.chat_template"] = Field(GGUFValueType.STRING, None, template)
    path.write_bytes(gguf_bytes(found))
    return path


def opened(path: Path) -> Tokenizer:
    return open_tokenizer(str(path))


@pytest.mark.parametrize(
    ("tokens", "roles", "ends"),
    [
        ({}, {}, [EOS]),
        ({}, {"eot": 5}, [5, EOS]),
        ({}, {"eom": 6}, [6, EOS]),
        ({}, {"eos": 9, "eot": 5, "eom": 6}, [5, 6, 9, EOS]),
        ({}, {"eos": Field(MANY, UINT32, [9, 10]), "eom": Field(MANY, INT32, [6, 7])}, [6, 7, 9, 10, EOS]),
        ({}, {"eos": Field(MANY, UINT32, [9, NONE])}, [9, EOS]),
        ({}, {"eos": None}, [EOS]),
        ({}, {"eos": NONE, "eot": NONE, "eom": NONE}, [EOS]),
        ({}, {"fim_pad": 5, "fim_rep": 6, "fim_sep": 7}, [5, 6, 7, EOS]),
        ({"<|return|>": CONTROL}, {}, [EOS, FIRST]),
        ({"<|return|>": USER_DEFINED}, {}, [EOS, FIRST]),
        ({"<|return|>": NORMAL}, {}, [EOS]),
        ({"<|other|>": CONTROL}, {}, [EOS]),
        ({"<|end|>": CONTROL}, {}, [EOS, FIRST]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL}, {}, [EOS, FIRST, FIRST + 1]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {}, [EOS, FIRST + 1, FIRST + 2]),
        ({"<|end|>": CONTROL, "<|flush|>": CONTROL, "<|calls|>": CONTROL}, {}, [EOS, FIRST + 1, FIRST + 2]),
        ({"</s>": CONTROL}, {}, [EOS, FIRST]),
        ({"</s>": CONTROL, "<|tool_response>": CONTROL}, {}, [EOS, FIRST + 1]),
        ({"<end_of_turn>": CONTROL, "<|eom_id|>": CONTROL, "[EOT]": CONTROL}, {}, [EOS, FIRST, FIRST + 1, FIRST + 2]),
        ({"<|fim_pad|>": CONTROL, "<|fim_prefix|>": CONTROL, "<|file_sep|>": CONTROL}, {}, [EOS, FIRST, FIRST + 2]),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(
    tokens: dict[str, int], roles: dict[str, Any], ends: list[int], tmp_path: Path
) -> None:
    assert sorted(opened(write(tmp_path / "a.gguf", tokens, **roles)).eos_ids) == ends


@pytest.mark.parametrize("role", ["padding", "unknown", "seperator", "mask", "cls", "bos", "eot", "eom", "fim_pad"])
@pytest.mark.parametrize(
    "field",
    [Field(UINT32, None, NONE), Field(INT32, None, -1), Field(GGUFValueType.UINT64, None, 2**64 - 1),
     Field(MANY, INT32, [-1])],
)  # fmt: skip
def test_ids_that_mean_none(role: str, field: Field, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.gguf", **{role: field})
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.eos_ids == {EOS}
    assert tokenizer.bos_id == (None if role == "bos" else BOS)
    assert opened(path).eos_ids == {EOS}


@pytest.mark.parametrize("role", ["padding", "eot", "eom", "bos", "mask", "fim_sep"])
@pytest.mark.parametrize("field", [Field(UINT32, None, FIRST), Field(INT32, None, -2), Field(MANY, UINT32, [3, 999])])
def test_ids_of_no_token_are_refused(role: str, field: Field, tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match=rf"tokenizer.ggml.{role}_token_id=.*must be the id of one of 264 tokens"):
        opened(write(tmp_path / "a.gguf", **{role: field}))


def test_special_tokens_have_their_names(tmp_path: Path) -> None:
    names = {"padding": "pad", "unknown": "unk", "seperator": "sep", "mask": "mask", "cls": "cls", "bos": "bos"}
    tokens = {f"<{name}!>": CONTROL for name in names.values()}
    template = "".join(f"{{{{ {name}_token }}}}" for name in (*names.values(), "eos"))
    roles = {role: FIRST + place for place, role in enumerate(names)}
    tokenizer = opened(write(tmp_path / "a.gguf", tokens, template=template, **roles))
    assert tokenizer.bos_id == FIRST + 5
    assert tokenizer.apply_chat_template([]) == "".join(tokens) + "<|im_end|>"


def test_the_first_of_several_parts_is_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "a-00001-of-00002.gguf"
    path.write_bytes(gguf_bytes(metadata() | {"split.count": Field(GGUFValueType.UINT16, None, 2)}))
    assert opened(path).eos_ids == {EOS}
    with pytest.raises(SpecbatchError, match="it is one part of several"):
        open_checkpoint(str(path))
    path.write_bytes(gguf_bytes({"general.architecture": metadata()["general.architecture"]}))
    with pytest.raises(SpecbatchError, match=r"tokenizer=.*tokenizer.ggml"):
        opened(path)


def test_a_file_is_a_tokenizer(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf")
    own = open_checkpoint(str(path)).tokenizer()
    (tmp_path / "folder").mkdir()
    shutil.copy(path, tmp_path / "folder" / "b.gguf")
    monkeypatch.chdir(tmp_path)
    before = sorted(cache.rglob("*"))
    for name in (str(path), "a.gguf", "./a.gguf", "folder", "folder/b.gguf"):
        found = open_tokenizer(name)
        assert (found.name, found.eos_ids, found.vocabulary()) == (name, own.eos_ids, own.vocabulary())
        assert found.encode("abc <|im_start|>") == own.encode("abc <|im_start|>")
        assert open_checkpoint("toy", "dummy", tokenizer=name).tokenizer().name == name
    assert sorted(cache.rglob("*")) == before  # no weights were converted
    for wrong in (f"{path}x", "no.gguf", "./no.gguf"):
        with pytest.raises(SpecbatchError, match=r"no such name, file or folder; give .* a .gguf file or a hub id"):
            open_tokenizer(wrong)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(SpecbatchError, match=r"tokenizer=.bad\.gguf.: it is not a complete GGUF file"):
        open_tokenizer("bad.gguf")
    write(tmp_path / "folder" / "c.gguf")
    with pytest.raises(SpecbatchError, match="the folder has no tokenizer"):
        open_tokenizer("folder")
