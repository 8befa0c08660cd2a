"""Outputs that cannot be written: one line on standard error, nothing finished is lost, the same command continues."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed, slow_but
from typer.testing import Result

from specbatch.files.atomic_file import is_leftover, temporary_path

from .conftest import TINY_SWEEP

Run = Callable[..., Result]
SWEEP = ("sweep", "--device", "cpu", "--concurrency", "1", "--configs", "baseline,v1", *TINY_SWEEP)


class FailingDisk:
    """Counts writes, and fails with ENOSPC from number `fails_at` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_at: int | None = None
        self.writes = 0
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "write_bytes"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **known: Any) -> Any:
            self.writes += 1
            if self.fails_at is not None and self.writes >= self.fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **known)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch)


def one_line(result: Result, status: int, *texts: str) -> None:
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == lines[0]
    for text in texts:
        assert text in lines[0]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if is_leftover(path)]


@pytest.fixture
def commands(run: Run, jsonl: Callable[..., Path], tmp_path: Path) -> dict[str, Callable[[Path], Result]]:
    """Commands by name, each of which writes to a path."""
    sweep = tmp_path / "swept"
    assert run(*SWEEP, "--output", sweep).exit_code == 0
    policy, prompts = tmp_path / "policy.toml", jsonl(*({"prompt_token_ids": [n]} for n in range(4)))
    policy.write_text("[bounds]\noutput_throughput = { at_least = 0 }\n")
    return {
        "compare": lambda to: run("compare", sweep / "baseline", sweep / "v1", "--output", to),
        "gate": lambda to: run("gate", sweep, "--policy", policy, "--output", to),
        "generate": lambda to: run("generate", prompts, "-o", to / "out.jsonl", "--max-new-tokens", 3),
        "generate parquet": lambda to: run("generate", prompts, "-o", to / "out.parquet", "--max-new-tokens", 3),
        "generate folder": lambda to: run("generate", prompts, "-o", to / "rows", "--max-new-tokens", 3),
        "sweep": lambda to: run(*SWEEP, "--output", to),
    }


@pytest.mark.parametrize(
    "name",
    slow_but(
        ("gate", "generate", "generate folder"),
        ("compare", "gate", "generate", "generate parquet", "generate folder", "sweep"),
    ),
)
def test_full_disk_at_each_write(commands: Any, disk: FailingDisk, tmp_path: Path, name: str) -> None:
    """After each failure the same command continues or starts again, and succeeds."""
    command = commands[name]
    disk.writes = 0
    assert command(tmp_path / "whole").exit_code == 0
    total = disk.writes
    assert total > 2
    for number in range(1, total + 1):
        to = tmp_path / str(number)
        disk.writes, disk.fails_at = 0, number
        result = command(to)
        disk.fails_at = None
        one_line(result, 1, "No space left on device")
        assert not leftovers(tmp_path)
        again = command(to)
        if again.exit_code == 2 and name.startswith("generate"):
            assert "already exists" in again.stderr  # only the record could not be written
            continue
        assert again.exit_code == 0, again.output


@pytest.mark.parametrize("name", ["compare", "sweep", "generate"])
def test_temporary_files_of_a_killed_run_are_removed(commands: Any, tmp_path: Path, name: str) -> None:
    to = tmp_path / "out"
    to.mkdir()
    replaced = ["out.jsonl", "out.jsonl.record.json"] if name == "generate" else ["summary.md"]
    for path in replaced:
        temporary_path(to / path).touch()
    assert commands[name](to).exit_code == 0
    assert not leftovers(tmp_path)


def test_temporary_files_do_not_make_a_folder_of_other_files_an_output(commands: Any, tmp_path: Path) -> None:
    left = temporary_path(tmp_path / "summary.md")
    (tmp_path / "mine.part1").touch()
    left.touch()
    one_line(commands["compare"](tmp_path), 2, "this folder is not empty")
    assert (tmp_path / "mine.part1").exists()
    left.unlink()
    one_line(commands["compare"](tmp_path), 2, "this folder is not empty")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of at most `size` bytes: a write beyond fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_generate_continues_after_its_partial_output_could_not_grow(
    run: Run, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    prompts, out = jsonl(*({"prompt_token_ids": [number]} for number in range(20))), tmp_path / "out.jsonl"
    with largest_file(3_000):
        result = run("generate", prompts, "-o", out, "--max-new-tokens", 3)
    one_line(result, 1, "out.jsonl.partial cannot be written (File too large)", "finished of 20", "continues")
    kept = int(result.stderr.split("kept ")[1].split()[0])
    assert 0 < kept < 20
    again = run("generate", prompts, "-o", out, "--max-new-tokens", 3)
    assert again.exit_code == 0, again.output
    assert f"continuing: {kept} of 20 are finished" in again.stderr
    assert len(out.read_text().splitlines()) == 20


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    crossed(
        ["compare", "gate", "generate", "sweep", "report"],
        [
            ("x" * 300, "File name too long"),
            ("file/under", "Not a directory"),
            ("loop/under", "Too many levels of symbolic links"),
        ],
    ),
)
def test_path_that_cannot_be_written(
    run: Run, commands: Any, tmp_path: Path, name: str, path: str, reason: str
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    commands["report"] = lambda to: run("report", tmp_path / "swept", "--output", to)
    one_line(commands[name](tmp_path / path), 2, reason)
    assert (tmp_path / "file").read_text() == "kept"
