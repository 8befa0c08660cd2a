"""Files that something else changes or removes during a job, and leftovers beside an output that are not the job's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import specbatch
from specbatch.files.atomic_file import temporary_path
from specbatch.jobs import batch_job, missing_rows

LINES = [json.dumps({"prompt": f"a{place}", "id": place}) for place in range(400)]
ASKED = {"method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
BATCH = [json.dumps({"custom_id": str(place), **ASKED}) for place in range(400)]
CSV = ["id,prompt", *(f"{place},a{place}" for place in range(3_000))]
Change = Callable[[Path], object]


@pytest.fixture
def changed(run: Any, engine: Any, tmp_path: Path) -> Callable[..., Result]:
    """`changed(lines, change, path)` runs a job during which `change(path)` is called once, after 20 answers."""

    def call(lines: list[str], change: Change, path: Path, name: str = "in.jsonl") -> Result:
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        answers: Iterator[int] = iter(range(10**9))

        def then(prompt: Any, params: Any) -> Any:
            if next(answers) == 20:
                change(path)
            return prompt

        engine.answering = then
        return run("generate", tmp_path / name, "-o", tmp_path / "out.jsonl", "--concurrency", "4")

    return call


def ended(result: Result) -> str:
    """The last line of a job that was refused."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    return last


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is called when a job has all answers and is about to write its output; a test adds to it."""
    publish, found = batch_job.BatchJob._publish, list[Callable[[], object]]()

    def noted(job: batch_job.BatchJob) -> None:
        for call in found:
            call()
        publish(job)

    monkeypatch.setattr(batch_job.BatchJob, "_publish", noted)
    return found


def shorter(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[-1])


def test_output_that_something_else_writes_is_kept(changed: Any, run: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    last = ended(changed(LINES, lambda path: path.write_text("mine"), output))
    assert "something else wrote it during the job; move it away, then the same command writes the answers" in last
    again = run("generate", tmp_path / "in.jsonl", "-o", output, "--concurrency", "4")
    assert "did not write it; move it away, then the same command continues" in ended(again)
    assert output.read_text() == "mine"
    output.rename(tmp_path / "mine")
    assert run("generate", tmp_path / "in.jsonl", "-o", output, "--concurrency", "4").exit_code == 0
    assert len(output.read_text().splitlines()) == 400


@pytest.mark.parametrize(
    "change", [shorter, *(pytest.param(other, marks=pytest.mark.slow) for other in (longer, Path.unlink))]
)
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


def test_input_that_changes_while_the_model_loads(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl(*map(json.loads, LINES))
    engine.entering = lambda: shorter(source)
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
        interrupt()

    result = changed(LINES, interrupted, tmp_path / "out.jsonl.partial")
    assert result.exit_code == 130
    assert "so its answers are lost" in result.stderr.splitlines()[-1]
    assert "kept" not in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("change", [emptied, replaced, Path.unlink])
def test_partial_output_that_changes_while_the_output_is_written(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, publishing: list[Callable[[], object]], change: Change
) -> None:
    publishing.append(lambda: change(tmp_path / "out.jsonl.partial"))
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


@pytest.mark.parametrize(
    ("name", "lines"),
    [("out.jsonl.record.json", LINES[:2]), ("out.jsonl.record.json", BATCH[:2]), ("out.jsonl.errors.jsonl", BATCH[:2])],
)
@pytest.mark.parametrize("content", ["mine", '{"metrics": {}, "workload": {"command": "mine"}}'])
def test_other_files_of_an_output_are_not_replaced(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, name: str, lines: list[str], content: str
) -> None:
    source = jsonl(*map(json.loads, lines))
    (tmp_path / name).write_text(content)
    command = ("generate", source, "-o", tmp_path / "out.jsonl")
    assert f"{name} already exists; name another output or pass --overwrite" in ended(run(*command))
    assert (tmp_path / name).read_text() == content
    assert run(*command, "--overwrite").exit_code == 0


def test_record_of_an_output_that_was_removed_is_replaced(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    command = ("generate", jsonl({"prompt": "a"}), "-o", tmp_path / "out.jsonl")
    assert run(*command).exit_code == 0
    (tmp_path / "out.jsonl").unlink()
    assert run(*command).exit_code == 0


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_finished_job_is_not_run_again(run: Any, engine: Any, jsonl: Any, tmp_path: Path, name: str) -> None:
    command = ("generate", jsonl({"prompt": "a"}, {"prompt": "b", "sampling": {"n": 2}}), "-o", tmp_path / name)
    first = run(*command, "--json")
    engine.built.clear()
    again = run(*command, "--json")
    assert (again.exit_code, engine.built) == (0, []), again.output
    assert again.stdout == first.stdout
    assert f"{name} is complete: an earlier run has finished this job" in again.stderr
    assert run(*command).stdout.startswith("answers to 2 prompts in ")
    assert "already exists" in ended(run(*command, "--max-new-tokens", "3"))
    assert run(*command, "--overwrite").exit_code == 0
    assert len(engine.built) == 1


def test_finished_batch_is_not_run_again(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    bad = {"custom_id": "bad", **ASKED, "body": {"model": "m", "prompt": "x" * 300}}
    command = ("generate", jsonl(json.loads(BATCH[0]), bad), "-o", tmp_path / "out.jsonl")
    first = run(*command, "--max-failures", "1")
    assert first.exit_code == 0, first.output
    engine.built.clear()
    again = run(*command, "--max-failures", "1")
    assert (again.exit_code, again.stdout, engine.built) == (0, first.stdout, [])
    assert run(*command).exit_code == 1, "a row failed"


def test_a_job_that_was_killed_after_it_wrote_its_output_ends(
    run: Any, tmp_path: Path, publishing: list[Callable[[], object]]
) -> None:
    """Its partial output is still there; also where the output replaces another one."""
    (tmp_path / "in.jsonl").write_text("\n".join(LINES[:9]) + "\n")
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    command = ("generate", tmp_path / "in.jsonl", "-o", output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbatch.jobs.partial_output.PartialRows.remove", lambda _: None)
        assert run(*command).exit_code == 0
    assert partial.exists()
    assert run(*command).exit_code == 0
    assert not partial.exists()
    publishing.append(interrupt)
    assert run(*command, "--overwrite").exit_code == 130
    publishing.clear()
    assert '"replaces": true' in partial.read_text().splitlines()[0]
    again = run(*command)
    assert (again.exit_code, "continuing: 9 of 9 are finished" in again.stderr) == (0, True)
    assert not partial.exists()


@pytest.mark.parametrize("change", [shorter, longer, emptied, lambda path: path.write_text("mine")])
def test_output_that_was_changed_is_not_finished(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, change: Change
) -> None:
    command = ("generate", jsonl({"prompt": "a"}, {"prompt": "b"}), "-o", tmp_path / "out.jsonl")
    assert run(*command).exit_code == 0
    change(tmp_path / "out.jsonl")
    content = (tmp_path / "out.jsonl").read_bytes()
    assert "already exists" in ended(run(*command))
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_prompts_after_the_first_are_checked_as_they_run(
    run: Any, engine: Any, jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a job begins soon, however long its input is."""
    monkeypatch.setattr(missing_rows, "CHECKED_TOKENS", 4)
    long = {"prompt": "x" * 300}  # the stub takes 256 tokens
    early = run("generate", jsonl({"prompt": "ab"}, long, *([{"prompt": "ab"}] * 9)), "-o", tmp_path / "out.jsonl")
    assert "in.jsonl:2': prompt='300 tokens': too long for the stub (--skip-bad leaves it out)" in ended(early)
    source = jsonl(*([{"prompt": "ab"}] * 9), long, {"prompt": "b"})
    late = run("generate", source, "-o", tmp_path / "out.jsonl")
    assert late.exit_code == 1
    assert "in.jsonl:10: prompt='300 tokens': too long for the stub" in late.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows if row.get("error")] == [9]
    assert "1 of them failed" in late.stdout
    skipped = run("generate", source, "-o", tmp_path / "out.jsonl", "--skip-bad", "--overwrite")
    assert skipped.exit_code == 0, skipped.output
    assert "skipped " in skipped.stderr
    assert "answers to 10 prompts" in skipped.stdout
    assert "1 malformed lines skipped" in skipped.stdout
    again = run("generate", source, "-o", tmp_path / "out.jsonl", "--skip-bad")
    assert (again.exit_code, again.stdout) == (0, skipped.stdout)


SCRIPT = ("generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--load-format", "dummy", "--device", "cpu")


@pytest.mark.parametrize(
    "redirection",
    [
        ">/dev/full",
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ("2>&1 | true", ">&-", "| true", "2>/dev/full", "<&- >&- 2>&-")
        ),
    ],
)
def test_streams_that_cannot_be_written(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"prompt_token_ids": [1, place]}) for place in range(1, 5)))
    command = [sys.executable, "-m", "specbatch", *SCRIPT, "--max-new-tokens", "2"]
    shell = ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash", *command]
    environment = os.environ | {"PYTHONPATH": str(Path(specbatch.__file__).parents[1])}
    ran = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.record.json"}
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    assert "Traceback" not in ran.stderr
    if redirection == ">/dev/full":
        note = "note: standard output cannot be written (No space left on device); out.jsonl is complete"
        assert ran.stderr.splitlines()[-1] == note


def test_large_input_is_named_before_it_is_read(run: Any, engine: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl({"prompt": "a"})
    command = ("generate", source, "-o", tmp_path / "out.jsonl")
    assert "reading" not in run(*command, "--max-new-tokens", "3").stderr
    with source.open("a") as file:
        file.write((" " * 999 + "\n") * 17_000)
    lines = run(*command, "--overwrite").stderr.splitlines()
    assert lines[0] == f"reading {source}: 17 MB"


@pytest.mark.parametrize(("number", "status"), [(errno.EPIPE, 0), (errno.ENOSPC, 1)])
def test_reader_of_a_report_may_go(run: Any, monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    """`specbatch models list | head -1`."""

    def fails(text: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("specbatch.cli.output.print_markdown", fails)
    result = run("models", "list")
    assert (result.exit_code, bool(result.stderr)) == (status, status > 0)
