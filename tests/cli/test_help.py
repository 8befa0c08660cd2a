"""Help is fast and complete, and has examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from specbatch.cli.app import app

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "numpy", "matplotlib", "scipy")
COMMANDS = [
    *("eval", "check", "sweep", "report", "bench", "trace", "compare", "gate"),
    *("train-draft", "generate", "send-one", "doctor"),
    "models",
]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from specbatch.cli.app import app;"
        "names = 'generate sweep bench train-draft eval check report compare gate'.split();"
        "commands = [[], *([name] for name in names)];"
        "pages = [[*command, '--help'] for command in commands];"
        "results = [CliRunner().invoke(app, words) for words in pages];"
        "assert all(result.exit_code == 0 for result in results), results;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_takes_less_than_a_second():
    def seconds() -> float:
        """CPU time, which does not grow on a busy machine as wall time does."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "specbatch", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 1.0


def test_help_lists_every_command(run):
    shown = plain(run("--help").output)
    assert all(f" {command} " in shown for command in COMMANDS)


def test_help_shows_text_in_brackets():
    """It passes through a language of marks, in which a table of TOML is one."""
    wide = {"COLUMNS": "1000"}
    commands = typer.main.get_command(app).commands
    for name, command in commands.items():
        shown = re.sub(r"\s+", " ", plain(CliRunner().invoke(app, [name, "--help"], env=wide).output))
        for text in (command.help or "", *(getattr(item, "help", None) or "" for item in command.params)):
            assert all(found in shown for found in re.findall(r"\[[^][\n\\]*\]", text.replace("\\[", "["))), name


@pytest.mark.parametrize("command", ["eval", "check", "sweep", "trace", "generate", "send-one"])
def test_help_of_a_command_has_an_example_and_the_shared_options(run, command):
    result = run(command, "--help")
    shown = plain(result.output)
    assert result.exit_code == 0
    assert f"specbatch {command}" in shown.replace("Usage: specbatch", "")
    for option in ("--model", "--draft", "--ngram-max", "--kv-pages", "--no-prefix-cache", "--json"):
        assert option in shown
    assert ("--spec " in shown) == (command != "sweep")  # a sweep takes its schedules from --configs


def test_help_of_bench_omits_options_that_its_points_set(run):
    shown = plain(run("bench", "--help").output)
    assert "specbatch bench --model qwen3-8b --load-format dummy" in shown
    for option in ("--model", "--dtype", "--page-size", "--prefill-chunk", "--sections", "--draft ", "--json"):
        assert option in shown
    for option in ("--spec ", "--kv-pages", "--max-running", "--prefix-cache", "--prefill-graph"):
        assert option not in shown


def test_help_of_train_draft_omits_options_of_speculation(run):
    shown = plain(run("train-draft", "--help").output)
    assert "specbatch train-draft --algorithm dflash --answers" in shown
    for option in ("--model", "--dtype", "--max-running", "--block-size", "--unroll", "--vocab", "--held-out", "--lr"):
        assert option in shown
    for option in ("--spec ", "--kv-pages", "--draft-tokens", "--draft-topk", "--prefix-cache", "--max-model-len"):
        assert option not in shown


@pytest.mark.parametrize("command", ["compare", "gate"])
def test_help_of_compare_and_gate_has_no_engine_options(run, command):
    shown = plain(run(command, "--help").output)
    assert f"specbatch {command} out/" in shown
    assert "--output" in shown
    assert "--model" not in shown


def test_version(run):
    assert re.fullmatch(r"specbatch \d+\.\d+\.\d+\n", run("--version").stdout)
