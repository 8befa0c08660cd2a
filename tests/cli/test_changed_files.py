"""Files that something else changes or removes during a job, and leftovers beside an output that are not the job's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from specbatch.atomic_file import temporary_path
from specbatch.jobs import batch_job

LINES = [json.dumps({"prompt": f"a{place}", "id": place}) for place in range(400)]
BATCH = [
    json.dumps(
        {"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
    )
    for place in range(400)
]
CSV = ["id,prompt", *(f"{place},a{place}" for place in range(3_000))]
Change = Callable[[Path], object]


@pytest.fixture
def changed(run: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`changed(lines, change, path)` runs a job during which `change(path)` is called once, after 20 answers."""

    def call(lines: list[str], change: Change, path: Path, name: str = "in.jsonl") -> Result:
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        answers: Iterator[int] = iter(range(10**9))
        complete = engine._complete

        def then(*args: Any) -> Any:
            if next(answers) == 20:
                change(path)
            return complete(*args)

        monkeypatch.setattr(engine, "_complete", then)
        return run("generate", tmp_path / name, "-o", tmp_path / "out.jsonl", "--concurrency", "4")

    return call


def ended(result: Result) -> str:
    """The last line of a job that was refused."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    return last


def shorter(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[-1])


@pytest.mark.parametrize("change", [shorter, longer, Path.unlink])
@pytest.mark.parametrize(("name", "lines"), [("in.jsonl", LINES), ("in.jsonl", BATCH), ("in.csv", CSV)])
def test_input_that_changes_ends_the_job(
    changed: Any, run: Any, tmp_path: Path, name: str, lines: list[str], change: Change
) -> None:
    """What was answered is kept, and the job continues when the input is back."""
    path = tmp_path / name
    last = ended(changed(lines, change, path, name))
    assert "changed while it was read" in last or "was removed while it was read" in last
    assert f" finished of {len(lines) - name.endswith('csv')} in {tmp_path}/out.jsonl.partial" in last
    assert not (tmp_path / "out.jsonl").exists()
    path.write_text("\n".join(lines) + "\n")
    again = run("generate", path, "-o", tmp_path / "out.jsonl")
    assert again.exit_code == 0, again.output
    assert "continuing: " in again.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(lines) - name.endswith("csv")


def test_input_that_changes_while_the_model_loads(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(*map(json.loads, LINES))
    start = engine.__enter__
    monkeypatch.setattr(engine, "__enter__", lambda self: (shorter(source), start(self))[1])
    assert "kept 0 finished" not in ended(run("generate", source, "-o", tmp_path / "out.jsonl"))


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def replaced(path: Path) -> None:
    path.unlink()
    path.write_text("mine\n")


@pytest.mark.parametrize("change", [emptied, shorter, longer, replaced, Path.unlink])
def test_partial_output_that_changes(changed: Any, tmp_path: Path, change: Change) -> None:
    partial = tmp_path / "out.jsonl.partial"
    last = ended(changed(LINES, change, partial))
    assert "by something else during the job, so its answers are lost; run the job again" in last
    assert "kept" not in last
    assert not (tmp_path / "out.jsonl").exists()
    if change is replaced:
        assert partial.read_text() == "mine\n"


@pytest.mark.parametrize("change", [emptied, replaced, Path.unlink])
def test_partial_output_that_changes_before_ctrl_c(changed: Any, engine: Any, tmp_path: Path, change: Change) -> None:
    """After the last answer that was written to it."""

    def interrupted(path: Path) -> None:
        change(path)
        raise KeyboardInterrupt

    result = changed(LINES, interrupted, tmp_path / "out.jsonl.partial")
    assert result.exit_code == 130
    assert "so its answers are lost" in result.stderr.splitlines()[-1]
    assert "kept" not in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("change", [emptied, replaced, Path.unlink])
def test_partial_output_that_changes_while_the_output_is_written(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    publish = batch_job.BatchJob._publish
    partial = tmp_path / "out.jsonl.partial"
    monkeypatch.setattr(batch_job.BatchJob, "_publish", lambda job: (change(partial), publish(job))[1])
    last = ended(run("generate", jsonl({"prompt": "a"}, {"prompt": "b"}), "-o", tmp_path / "out.jsonl"))
    assert "so its answers are lost" in last
    assert "kept" not in last


def test_files_of_the_user_beside_an_output_stay(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl({"prompt": "a"})
    mine = ["out.jsonl.part1", "out.jsonl.old1", "out.jsonl.part", "out.jsonl.record.json.part3", "out.jsonl.tmp"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    left = temporary_path(tmp_path / "out.jsonl")
    left.write_text("of a killed run")
    assert run("generate", source, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "in.jsonl", "out.jsonl", "out.jsonl.record.json"}


@pytest.mark.parametrize("name", ["out.jsonl.part1", "out.jsonl.old27"])
def test_input_with_the_name_of_an_earlier_leftover_is_refused(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, name: str
) -> None:
    source = jsonl({"prompt": "a"}).rename(tmp_path / name)
    last = ended(run("generate", source, "-o", tmp_path / "out.jsonl"))
    assert f"the input {source} has the name of an unfinished output of an earlier version; rename it" in last
    assert source.exists()
    assert run("generate", source, "-o", tmp_path / "other.jsonl").exit_code == 0


def test_input_that_is_a_leftover_is_refused(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl({"prompt": "a"}).rename(temporary_path(tmp_path / "out.jsonl"))
    for output in ("out.jsonl", "other.jsonl"):
        assert "is a temporary file of specbatch" in ended(run("generate", source, "-o", tmp_path / output))
    assert source.exists()


def test_standard_output_is_no_output(run: Any, engine: Any, jsonl: Any) -> None:
    assert "output='-': standard output cannot be continued" in ended(
        run("generate", jsonl({"prompt": "a"}), "-o", "-")
    )
