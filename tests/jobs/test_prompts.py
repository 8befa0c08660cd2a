"""Prompts from JSONL and data sets: their forms, and malformed lines with their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from specbatch.errors import SpecbatchError
from specbatch.jobs.prompts import MalformedLine, Prompt, PromptReader, UnreadKeys, read_prompts, scan_prompts

CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
def scanned(tmp_path):
    def scan(content, **options):
        (tmp_path / "in.jsonl").write_bytes(content)
        return scan_prompts(tmp_path / "in.jsonl", **options)

    return scan


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'{"prompt": "a"} x', "not JSON (Extra data at column 17)"),
        (b'{"prompt": "a\0b"}', "not JSON (Invalid control character at column 14)"),
        (b"\0\0\0\0", "not JSON (Expecting value at column 1)"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 13)"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8 (byte 1)"),
        (b"1" * 5000, "not JSON that can be read (Exceeds the limit"),
        (b"[" * 100_000, "not JSON that can be read (nested too deeply)"),
        (b'{"prompt": "a", "sampling": {"logit_bias": {"5": 1, "5": 2}}}', 'has the key "5" more than once'),
        (b"5", "write a JSON object with one of the keys prompt, prompt_token_ids, question, messages"),
        (b"null", "write a JSON object"),
        (b'{"text": "a"}', "write a JSON object"),
        (b'{"prompt": null}', "prompt is empty"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"prompt": "a", "id": true}', "id=true: use a string or a whole number"),
        (b'{"prompt": "a", "id": "\\ud800"}', 'id="\\ud800" has half of a surrogate pair'),
    ],
)
def test_malformed_line_is_returned_between_the_others(scanned, line, what):
    before, bad, after = scanned(b'{"prompt": "a"}\n\n' + line + b'\n{"question": "b", "id": 7}')
    assert before == Prompt(1, "prompt", "a")
    assert isinstance(bad, MalformedLine)
    assert bad.line == 3
    assert bad.problem.startswith(what)
    assert after == Prompt(4, "question", "b", 7)


def test_byte_order_marks_and_line_endings_are_ignored(scanned):
    lines = [
        '\ufeff{"prompt": "a"}',
        "",
        " \t",
        '{"prompt": "b", "id": "x"}',
        '{"prompt": "\\u0000", "id": "x"}',
        "",
        "",
    ]
    found = [Prompt(1, "prompt", "a"), Prompt(4, "prompt", "b", "x"), Prompt(5, "prompt", "\0", "x")]
    assert scanned("\r\n".join(lines).encode()) == found


def test_json_file_has_an_array_or_lines(tmp_path):
    path = tmp_path / "in.json"
    path.write_text('\n[{"prompt": "2024-01-01", "id": "a"},\n 5, {"messages": [{"role": "user", "content": "x"}]}]')
    first, bad, last = scan_prompts(path)
    assert (first, last) == (Prompt(1, "prompt", "2024-01-01", "a"), Prompt(3, "messages", CHAT))
    assert isinstance(bad, MalformedLine)
    with pytest.raises(SpecbatchError, match=r"in\.json row 2': write a JSON object"):
        read_prompts(path)
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [item.value for item in read_prompts(path)] == ["a", "b"]
    path.write_text('[{"prompt": "a"},\n{]')
    with pytest.raises(SpecbatchError, match=r"in\.json': not JSON \(.* at line 2 column 2\); write an array"):
        scan_prompts(path)


def _notes(path: Path, column: str | None = None) -> list[str]:
    """What `generate` logs of the keys of a file."""
    reader, lines = PromptReader(column=column), list[str]()
    unread = UnreadKeys(path, lines.append)
    for number, row in reader.rows("input", path, None):
        unread.add(reader.read(number, row))
    return [line.removeprefix(f"note: {path}") for line in lines]


def test_keys_that_are_not_read_are_named_once(tmp_path):
    rows = [
        {"id": 1, "prompt": "a", "sampling": None, "seed": None},
        {"prompt": "a", "level": 3, "json_schema": {}},
        {"prompt": "b", "level": 3, "json_shcema": {}, "turns": [], "id": "x"},
        {"prompt": "b", "samplin": {}, "json_schema": {}, "max_new_token": 3},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert _notes(tmp_path / "in.jsonl") == [
        ':2: json_schema beside the prompt has no effect; parameters of a row go into "sampling"',
        ":2: keys that are not read: level",
        ":3: keys that are not read: json_shcema (did you mean json_schema?), turns",
        ":4: keys that are not read: max_new_token (did you mean max_new_tokens?), samplin (did you mean sampling?)",
    ]
    rows = [{"prompt": "a", f"key{n}": 1, f"other{n}": 1} for n in range(1000)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert _notes(tmp_path / "in.jsonl")[-1] == ":11: further keys that are not read are not listed"
    rows = [{"prompt": "a", **{f"{row}{n}": 1 for n in range(15)}} for row in "ab"]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert _notes(tmp_path / "in.jsonl")[1:] == [
        ":2: keys that are not read: b0, b1, b10, b11, b12",
        ":2: further keys that are not read are not listed",
    ]


def test_keys_that_are_no_names_are_quoted(tmp_path):
    line = r'{"prompt": "a", "": 1, "\"b\"": 1, "c, d": 1, "\ud800": 1, "\n": 1, "ключ": 1}'
    (tmp_path / "in.jsonl").write_text(line)
    assert _notes(tmp_path / "in.jsonl") == [r':1: keys that are not read: "", "\n", "\"b\"", "c, d", ключ, "\ud800"']


@pytest.mark.parametrize("name", ["d.csv", "d.parquet"])
def test_columns_that_are_not_read_are_named(tmp_path, name):
    table = datasets.Dataset.from_list([{"body": "a", "json_schema": "{}", "level": "3", "id": "x"}] * 2)
    (table.to_csv if name == "d.csv" else table.to_parquet)(tmp_path / name)
    assert _notes(tmp_path / name, "body") == [
        ' row 1: json_schema beside the prompt has no effect; parameters of a row go into "sampling"',
        " row 1: keys that are not read: level",
    ]


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_empty_file_is_an_error(scanned, content):
    with pytest.raises(SpecbatchError, match=r"in\.jsonl': has no prompts"):
        scanned(content)


def test_read_prompts_raises_for_the_first_malformed_line(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{\n[\n')
    with pytest.raises(SpecbatchError, match=r"data='.*in\.jsonl:2': not JSON"):
        read_prompts(tmp_path / "in.jsonl", "data")


@pytest.mark.parametrize(
    ("column", "value", "form"),
    [
        ("body", "a", "prompt"),
        ("body", [1, 2], "prompt_token_ids"),
        ("body", CHAT, "messages"),
        ("question", "a", "question"),
        ("prompt", "a", "prompt"),
        ("messages", CHAT, "messages"),
    ],
)
def test_column_has_any_form_or_the_one_of_its_name(scanned, column, value, form):
    row = {"prompt": "other", "messages": CHAT, column: value, "id": 3}
    unread = tuple(name for name in ("prompt", "messages") if name != column)
    assert scanned(json.dumps(row).encode(), column=column) == [Prompt(1, form, value, 3, unread=unread)]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a"}, "write a JSON object with the key body"),
        ({"body": ""}, "body is empty"),
        ({"body": 5}, "body must be a string, a list of whole numbers from 0, or of messages"),
        ({"body": [1, "a"]}, "body must be a string, a list"),
        ({"body": [{"role": "user"}]}, "body must be a string, a list"),
    ],
)
def test_row_without_a_prompt_in_the_column_is_malformed(scanned, row, what):
    (bad,) = scanned(json.dumps(row).encode(), column="body")
    assert isinstance(bad, MalformedLine)
    assert bad.problem.startswith(what)


def test_jsonl_has_no_splits(scanned):
    with pytest.raises(SpecbatchError, match=r"split='test': .*in\.jsonl has no splits"):
        scanned(b'{"prompt": "a"}', split="test")


@pytest.mark.parametrize("form", ["prompt", "question", "messages"])
def test_texts_that_cannot_fit_are_refused_before_they_are_encoded(form):
    """Neither the template nor the whole text is tried."""
    longest = []

    class Spy:
        def encode(self, text, **options):
            longest.append(len(text))
            return list(text)

        def apply_chat_template(self, messages, **options):
            return "<" + messages[0]["content"] + ">"

    def encoded(text, **options):
        value = [{"role": "user", "content": text}] if form == "messages" else text
        return Prompt(1, form, value).encode(Spy(), most=100, **options)

    with pytest.raises(
        SpecbatchError, match=r"prompt='\d+ characters': its first 800 characters have more than max_model"
    ):
        encoded("a" * 30_000_000)
    assert longest == [800]
    assert len(encoded("a" * 500)) >= 500  # the engine refuses it
