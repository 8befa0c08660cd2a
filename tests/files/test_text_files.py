"""Readers of JSON, TOML and YAML files: anything wrong is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbatch import SpecbatchError
from specbatch.files import text_files
from specbatch.files.atomic_file import temporary_path
from specbatch.files.text_files import (
    UnreadableError,
    open_regular,
    parse_json,
    read_json,
    read_text,
    read_toml,
    read_yaml,
)

READERS = {"JSON": read_json, "TOML": read_toml, "YAML": read_yaml}


def refusal(read: Callable[..., Any], path: Path) -> str:
    with pytest.raises(SpecbatchError) as caught:
        read("policy", path, "name another")
    message = str(caught.value)
    assert message.startswith("policy=")
    assert "\n" not in message
    assert message.endswith("; name another")
    return message


def test_values(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for read, text, value in (
        (read_json, '{"a": [1, "é"]}', {"a": [1, "é"]}),
        (read_toml, "a = [1, 'é']", {"a": [1, "é"]}),
        (read_yaml, "a: [1, é, off]", {"a": [1, "é", "off"]}),
        (read_yaml, "a: &x {b: true}\nc: *x", {"a": {"b": True}, "c": {"b": True}}),
        (read_text, "text", "text"),
    ):
        path.write_text(text, encoding="utf-8")
        assert read("policy", path) == value
        path.write_text(text, encoding="utf-8-sig")  # some editors put a byte order mark first
        assert read("policy", path) == value


def test_keys_that_an_object_has_twice() -> None:
    text = '[{"a": 1, "b": {"c": 2, "c": 3}, "a": 4}]'
    assert parse_json(text) == [{"a": 4, "b": {"c": 3}}]
    with pytest.raises(UnreadableError, match=r'^has the key "c" more than once in an object$'):
        parse_json(text, unique=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a" :1, "a" :2, "b": "\\":"}',
        '{"a": {"b": 1}, "a": 2}',
        '{"b": [1, {"a": 1, "a": 2}]}',
        '{"a": 1, "\\u0061": 2}',
        '{"a": ":", "a": ":"}',
        ' {"a": [{}, {"b": 1}], "a": 1} ',
    ],
)
def test_every_key_that_is_there_twice_is_found(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"more than once in an object$"):
        parse_json(text, unique=True)


@pytest.mark.parametrize(
    "text",
    ['{"a": ":", "b": [":", {"a": "x: y"}]}', '{":": {":": 1}}', " [] ", '\t{"a": {"a": {"a": "a"}}}\r\n', "1", '":"'],
)
def test_keys_that_an_object_has_once(text: str) -> None:
    assert parse_json(text, unique=True) == parse_json(text.encode(), unique=True) == json.loads(text)


@pytest.mark.parametrize("text", ["", " ", "{} {}", "1 2", '{"a": 1} x', "\ufeff{}", "nul", "\x0b{}", '{"a": 1}\x00'])
def test_text_that_is_not_one_value(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"^is not JSON"):
        parse_json(text, unique=True)


@pytest.mark.parametrize("read", [*READERS.values(), read_text])
def test_paths_that_cannot_be_read(read: Callable[..., Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in (
        (tmp_path / "missing", "cannot be read (No such file or directory)"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "loop", "cannot be read (Too many levels of symbolic links)"),
        (tmp_path / ("a" * 300), "cannot be read (File name too long)"),
        (tmp_path / "a\0b", "embedded null "),
    ):
        assert reason in refusal(read, path)


@pytest.mark.parametrize(
    ("form", "content", "reason"),
    [
        ("JSON", b"{", "is not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("JSON", b'{\n"a": x}', "is not JSON (Expecting value at line 2 column 6)"),
        ("JSON", b"\xff", "is not UTF-8 (byte 1)"),
        ("JSON", b"[" * 100_000, "is not JSON that can be read (nested too deeply)"),
        ("JSON", b"[" * 101 + b"]" * 101, "is not JSON that can be read (nested too deeply)"),
        ("JSON", b"9" * 5_000, "is not JSON that can be read (Exceeds the limit"),
        ("JSON", b'["\\ud800"]', "is not text (it has half of a surrogate pair)"),
        ("TOML", b"a = ", "is not TOML (Invalid value"),
        ("TOML", b"a = \xff", "is not UTF-8 (byte 5)"),
        ("TOML", b"a = " + b"[" * 100_000, "is not TOML that can be read (nested too deeply)"),
        ("TOML", b"a = " + b"[" * 200 + b"]" * 200, "is not TOML that can be read (nested too deeply)"),
        ("YAML", b"[a", "is not YAML (while parsing a flow sequence"),
        ("YAML", b"[" * 2_000 + b"]" * 2_000, "is not YAML that can be read (nested too deeply)"),
        ("YAML", b"&a [*a]", "is not YAML that can be read (nested too deeply)"),
        ("YAML", b"!!timestamp x", "is not YAML ('NoneType' object"),
        ("YAML", b"!!bool x", "is not YAML ('x')"),
        ("YAML", b"!!int ''", "is not YAML (string index"),
        ("YAML", b"2001-99-99", "is not YAML (month must be"),
        ("YAML", b"!!python/object/apply:os.system [id]", "is not YAML (could not determine a constructor"),
    ],
)  # fmt: skip
def test_content_that_cannot_be_read(form: str, content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert reason in refusal(READERS[form], path)


def test_nesting_up_to_the_limit_is_read() -> None:
    deepest = "[" * 100 + "]" * 100
    assert parse_json(deepest)
    assert parse_json('"' + "[" * 1_000 + '"') == "[" * 1_000
    with pytest.raises(UnreadableError, match="nested too deeply"):
        parse_json(f"[{deepest}]")


def test_aliases_of_yaml_are_not_expanded_to_check_their_depth(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60)]
    path = tmp_path / "file.yaml"
    path.write_text("\n".join(lines))
    assert len(read_yaml("configs", path)) == 60


def test_large_files_are_refused_before_they_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    assert "is larger than 1 MiB" in refusal(read_yaml, path)
    assert "is larger than 1 MiB" in refusal(read_toml, path)
    with pytest.raises(UnreadableError, match="is larger than 1 MiB"):
        text_files.read_bytes(path, 1 << 20)


def test_temporary_file_is_not_an_input(tmp_path):
    """A later run would remove it."""
    path = temporary_path(tmp_path / "out.jsonl")
    path.write_text("{}")
    with pytest.raises(UnreadableError, match=r"is a temporary file of specbatch, .* give it another name"):
        open_regular(path)
    assert open_regular(path.rename(tmp_path / f"{path.name}.jsonl")).read() == b"{}"
