"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specbatch.cli.terminal import print_markdown

TEXT = """## Results

| name      |   tok/s | note   |
|-----------|---------|--------|
| a [red]b  |    12.5 | x \\| y |
| baseline  |     3   |        |

results: out/sweep_1"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):
    def columns(count: int) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(count))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")

    return columns


def test_pipe_gets_markdown(capsys):
    print_markdown(TEXT)
    assert capsys.readouterr().out == f"{TEXT}\n"


def test_terminal_gets_a_drawn_table(capsys, terminal):
    terminal(60)
    print_markdown(TEXT)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "## Results"
    assert lines[-1] == "results: out/sweep_1"
    assert "|--" not in "".join(lines)
    (first,) = [line for line in lines if "12.5" in line]
    (second,) = [line for line in lines if "baseline" in line]
    assert "a [red]b" in first, "cells are no markup"
    assert "x | y" in first
    assert first.index("12.5") + 4 == second.index(" 3") + 2, "numbers are aligned at the right"


def test_long_cells_are_folded_to_the_width(capsys, terminal):
    terminal(40)
    print_markdown(f"| a | b |\n|---|---|\n| {'word ' * 20}| 1 |")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    assert sum(line.count("word") for line in lines) == 20


def test_wide_table_is_drawn_in_parts(capsys, terminal):
    terminal(40)
    names = [f"metric_{n:02}" for n in range(9)]
    print_markdown(f"| n | name | {' | '.join(names)} |\n|{'---|' * 11}\n| 7 | spec | {' | '.join('0123456789'[:9])} |")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    shown = [line.split() for line in lines if "metric_" in line]
    assert [name for line in shown for name in line[2:]] == names, "each column is shown once"
    assert len(shown) >= 5
    assert all(line[:2] == ["n", "name"] for line in shown)


@pytest.mark.parametrize(
    "text",
    [
        f"| {'a' * 30} | {'b' * 30} |\n|---|---|\n| {'c' * 30} | {'d' * 30} |",  # too wide
        "| a | b |",  # no headings
        "| a | b |\n|---|---|\n| 1 |",  # a cell is missing
        "|\n|",
        "",
    ],
)
def test_other_lines_are_printed_as_they_are(capsys, terminal, text):
    terminal(40)
    print_markdown(text)
    assert capsys.readouterr().out.rstrip("\n") == text


def test_command_draws_its_table_on_a_terminal(tmp_path: Path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "SPECBATCH_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "specbatch", "models", "list"]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        assert process.wait(timeout=60) == 0
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "smollm2-135m" in shown
    assert "|---" not in shown
    assert "─" in shown
