"""Windows of long text: they share nothing, have their length, and the same ends for every length."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from letters import write_letters

from specbatch.errors import SpecbatchError
from specbatch.jobs.long_text import LongText, Window


class Tokenizer:
    """A token per byte."""

    def __init__(self, eos_id: int = 256, bos_id: int | None = None) -> None:
        self.eos_ids, self.bos_id = frozenset({eos_id}), bos_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        start = [self.bos_id] if add_special_tokens and self.bos_id is not None else []
        return [*start, *text.encode()]


BYTES: Any = Tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three repositories, of 6, 3 and 1 files with 100 different bytes each; and what is not used."""
    letters = random.Random(0)
    for name, count in (("one", 6), ("two", 3)):
        (tmp_path / name / "sub").mkdir(parents=True)
        for number in range(count):
            path = tmp_path / name / ("sub" if number % 2 else ".") / f"f{number}.py"
            path.write_text("".join(letters.choices("abcdefghij", k=100)))
    (tmp_path / "loose.py").write_text("z" * 100)
    (tmp_path / "copy.py").write_bytes((tmp_path / "two/f0.py").read_bytes())
    (tmp_path / "latin.py").write_bytes(b"\xe4" * 100)
    (tmp_path / "large.py").write_bytes(b"l" * (1 << 19))
    (tmp_path / "data.json").write_text("d" * 100)
    (tmp_path / "one/__pycache__").mkdir()
    (tmp_path / "one/__pycache__/cached.py").write_text("c" * 100)
    (tmp_path / "README").write_text("prose " * 20)
    (tmp_path / "two/notes.md").write_text("notes " * 20)
    return tmp_path


def repository(folder: Path) -> LongText:
    found = LongText.named(f"repository:{folder}")
    assert found is not None
    return found


def text(window: Window) -> str:
    return bytes(window.tokens).decode()


def test_windows_of_repositories_share_nothing_and_take_turns(folder: Path) -> None:
    found = repository(folder).windows(BYTES, 90, 9, 0)
    assert {len(window.tokens) for window in found} == {90}
    places = [window.source.partition("/")[0] for window in found]
    assert {*places[:3]} == {"one", "two", "copy.py"}, "each once; the files beside the folders are one more"
    whole = {text(window) for window in found}
    assert len(whole) == 9
    runs = [re.findall("[a-j]{20,}", one) for one in whole]
    pieces = [run[place : place + 20] for own in runs for run in own for place in range(len(run) - 19)]
    assert len(pieces) == len(set(pieces)), "no text twice, the copy included"
    for unused in ("lll", "ddd", "ccc", "prose"):
        assert not any(unused in one for one in whole)
    assert all(f"# {window.source}\n" in "".join(map(text, found)) for window in found)


def test_windows_of_one_file_follow_each_other(tmp_path: Path) -> None:
    content = " ".join(map(str, range(500)))
    (tmp_path / "long.py").write_text(content)
    found = repository(tmp_path).windows(BYTES, 70, 20, 0)
    assert "".join(map(text, found)) == f"# long.py\n{content}"[: 70 * 20]


def test_more_prompts_begin_with_fewer_and_the_seed_chooses(folder: Path) -> None:
    few, many = (repository(folder).windows(BYTES, 50, count, 0) for count in (3, 8))
    assert many[:3] == few
    assert repository(folder).windows(BYTES, 50, 3, 1) != few


def test_windows_are_reported_as_they_are_made_once(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        repository(folder).windows(BYTES, 40, 3, 0, lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_text_that_does_not_suffice_is_refused(folder: Path) -> None:
    with pytest.raises(SpecbatchError, match=r"input_len=300: .* has text for 2 prompts of 300 tokens, not 4; use"):
        repository(folder).windows(BYTES, 300, 4, 0)
    with pytest.raises(SpecbatchError, match="nowhere is no folder"):
        LongText.named("repository:nowhere")
    with pytest.raises(SpecbatchError, match="name a folder with text files: documents:FOLDER"):
        LongText.named("documents:")
    assert LongText.named("gsm8k") is None


@pytest.mark.parametrize(("kind", "named"), [("repository", r"\.c .* \.ts"), ("documents", r"\.md .* README")])
def test_folder_without_a_file_of_the_kind_is_refused(tmp_path: Path, kind: str, named: str) -> None:
    (tmp_path / "data.json").write_text("x" * 1000)
    (tmp_path / "large.py").write_text("x" * (1 << 19))
    with pytest.raises(SpecbatchError, match=rf"dataset=.* which are {named} .*of at most 256 KiB"):
        LongText.named(f"{kind}:{tmp_path}")


def test_documents_are_prose(folder: Path) -> None:
    found = LongText.named(f"documents:{folder}")
    assert found is not None
    both = "".join(map(text, found.windows(BYTES, 120, 2, 0)))
    assert {"prose", "notes"} <= {*re.findall(r"[a-z]{5}", both)}
    assert "abc" not in both


def test_many_shot_ends_with_a_question_and_uses_each_example_once() -> None:
    shots = LongText.named("many-shot")
    assert shots is not None
    found = shots.windows(BYTES, 3000, 20, 0)
    assert all(len(window.tokens) == 3000 and text(window).endswith("\nAnswer:") for window in found)
    asked = [re.findall(r"Question: (.*)\nAnswer: ", text(window)) for window in found]
    examples = [question for own in asked for question in own]
    assert len(examples) == len(set(examples)) > 60


@pytest.mark.parametrize("make", [repository, lambda folder: LongText.named("many-shot")])
def test_shorter_prompts_are_ends_of_longer_ones(folder: Path, make: Callable[[Path], LongText]) -> None:
    window = make(folder).windows(BYTES, 90, 2, 0)[1]
    assert window.end(BYTES, 40) == window.tokens[-40:]
    with_bos: Any = Tokenizer(bos_id=7)
    assert window.end(with_bos, 40) == [7, *window.tokens[-39:]]


def test_text_with_an_end_token_is_left_out(folder: Path) -> None:
    ends: Any = Tokenizer(eos_id=ord("z"))
    found = repository(folder).windows(ends, 90, 9, 0)
    assert not any("z" in text(window) for window in found)


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes are those of Linux")
def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.py", "w") as file:
        file.write("x" * 100)
    [window] = repository(tmp_path).windows(BYTES, 90, 1, 0)
    assert window.source == "\ufffd.py"
    assert text(window).startswith("# \ufffd.py\nxxx")


def test_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "one/inner").mkdir()
    scan = os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name == "inner":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="inner"):
        repository(folder).digest()


def test_digest_follows_names_and_sizes(folder: Path) -> None:
    before = repository(folder).digest()
    (folder / "data.json").write_text("other")
    assert repository(folder).digest() == before
    (folder / "loose.py").write_text("y")
    assert repository(folder).digest() != before


def test_script_writes_prompts_of_one_length_and_refuses_other_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text/first").mkdir(parents=True)
    (tmp_path / "text/first/f.py").write_text("value = 1\n" * 60)
    out, script = tmp_path / "new/made.jsonl", Path(__file__).parents[2] / "docs/grids/long_prompts.py"
    words = ["--model", str(write_letters(tmp_path / "model")), "--tokens", "64", "--out", str(out), "--prompts"]

    def run(dataset: str, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(script), dataset, *words, *more])
        runpy.run_path(str(script), run_name="__main__")

    text = f"repository:{tmp_path}/text"
    for dataset, more, said in (
        ("gsm8k", "2", "not long text"),
        (text, "99", "--tokens=64: "),
        (text, "99 --window 65", "--window=65: "),
    ):
        with pytest.raises(SystemExit) as ended:
            run(dataset, *more.split())
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr("specbatch.progress.bars.SECONDS_BETWEEN_LINES", 0.0)
    run(text, "2")
    assert "tokenizing prompts: 2/2 prompts, " in capsys.readouterr().err
    assert [len(json.loads(line)["prompt_token_ids"]) for line in out.read_text().splitlines()] == [64, 64]
