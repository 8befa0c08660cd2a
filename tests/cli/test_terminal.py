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


def test_long_cells_and_notes_are_wrapped_to_the_width(capsys, terminal):
    terminal(40)  # taken as 80
    print_markdown(f"| a | b |\n|---|---|\n| {'word ' * 30}| 1 |\n* {'long note ' * 20}")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert sum(line.count("word") for line in lines) == 30
    assert [line[:2] for line in lines if "long" in line] == ["* ", "  ", "  "]


def test_wide_table_is_drawn_in_parts(capsys, terminal):
    terminal(80)
    names = [f"metric_{n:015}" for n in range(9)]
    print_markdown(f"| n | name | {' | '.join(names)} |\n|{'---|' * 11}\n| 7 | spec | {' | '.join('0123456789'[:9])} |")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines if "metric_" in line]
    assert [name for line in shown for name in line[2:]] == names, "each column is shown once"
    assert len(shown) == 3
    assert all(line[:2] == ["n", "name"] for line in shown)


def test_pipe_gets_markdown_of_100_columns_or_as_many_as_the_environment_names(capsys, monkeypatch):
    rows = [f"| a \\| b | {'word ' * 30}| {'7 | ' * 20}" for _ in range(2)]
    text = "\n".join([f"| name | why | {'number | ' * 20}", f"|{'---|' * 22}", *rows])
    for setting, most in ((None, 100), ("120", 120), ("40", 80)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if setting:
            monkeypatch.setenv("COLUMNS", setting)
        print_markdown(f"{text}\n* a note {'that goes on ' * 20}")
        *lines, note = capsys.readouterr().out.splitlines()
        assert most - 20 < max(map(len, lines)) <= most
        assert note.endswith("that goes on "), "notes can be searched"
        tables = "\n".join(lines).split("\n\n")
        assert len(tables) > 1
        for part in tables:
            head, rule, *body = part.splitlines()
            assert head.startswith("name "), "every part begins with the names"
            assert set(rule) == {"─"}
            assert body[0].startswith("a | b ")
        assert sum(line.count("word") for line in lines) == 60
        assert sum(line.split().count("7") for line in lines) == 40


@pytest.mark.parametrize(
    "text",
    [
        f"| {'1 | ' * 40}b |\n|{'---|' * 41}\n| {'1 | ' * 40}b |",  # too wide: every part would begin with all columns
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
