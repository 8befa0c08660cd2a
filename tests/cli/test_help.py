"""Help is fast and complete, and has examples; `compare` and `gate` import no heavy library either."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specbatch.cli import advise
from specbatch.cli.app import app
from specbatch.cli.options import EngineOptions
from specbatch.config.speculation import Speculation
from specbatch.config.values import whole_numbers
from specbatch.evals.options import MAX_NEW_TOKENS
from specbatch.models.heads.eagle3 import default_aux
from specbatch.sweeps.check import prompts as check_prompts
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.workload.defaults import CPU, GPU, REPEATS
from specbatch.sweeps.workload.workloads import Workload
from specbatch.training.recipe import HEADS, Recipe

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "numpy", "matplotlib", "scipy")
COMMANDS = [
    "eval",
    "check",
    "sweep",
    "report",
    "bench",
    "trace",
    "compare",
    "gate",
    "train-draft",
    "generate",
    "send-one",
    "doctor",
    "lm-eval",
    "models",
]


@functools.cache
def page(*command: str) -> str:
    """The whole help of a command on a wide terminal, without colours and boxes' line breaks."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "1000"})
    if "--help-all" in result.output:
        result = CliRunner().invoke(app, [*command, "--help-all"], env={"COLUMNS": "1000"})
    assert result.exit_code == 0
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", result.output))


def test_help_compare_gate_and_kernels_import_no_heavy_library(swept):
    (policy := swept.parent / "policy.toml").write_text("[bounds]\naccept_length = {at_least = 1}")
    commands = [[], *([name, "--help"] for name in COMMANDS), ["compare", str(swept), str(swept)]]
    commands.append(["gate", str(swept), "--policy", str(policy)])
    code = f"""
import functools, sys, specbatch, typer.testing
specbatch.EngineConfig, specbatch.SamplingParams
assert "torch" not in sys.modules
from specbatch.cli.app import app
typer.testing._get_command = functools.cache(typer.main.get_command)
for words in {commands!r}:
    result = typer.testing.CliRunner().invoke(app, words or ["--help"])
    assert result.exit_code == 0, result.output
    assert not {set(HEAVY) - {"numpy", "scipy"}!r} & set(sys.modules), words
    assert words[-1:] != ["--help"] or not {{"numpy", "scipy"}} & set(sys.modules), words
import specbatch.kernels.attention.prefill.prefill_backends
assert "triton.language" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_help_takes_less_than_a_second():
    def seconds() -> float:
        """CPU time, which does not grow on a busy machine as wall time does."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "specbatch", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert any(seconds() < 1.0 for _ in range(3))


def test_help_lists_every_command():
    assert all(f" {command} " in page() for command in COMMANDS)


def test_help_shows_text_in_brackets():
    """Help texts are markup, in which a table of TOML would be a tag."""
    for name, command in typer.main.get_command(app).commands.items():
        for text in (command.help or "", *(getattr(item, "help", None) or "" for item in command.params)):
            assert all(found in page(name) for found in re.findall(r"\[[^][\n\\]*\]", text.replace("\\[", "["))), name


ENGINE = "--model --draft --ngram-max --kv-pages --no-prefix-cache --json"
OPTIONS = {  # command: options in its help, options that are not, and the start of its example
    **dict.fromkeys(("eval", "check", "trace", "generate", "send-one"), (f"{ENGINE} --spec ", "", "")),
    "sweep": (ENGINE, "--spec ", ""),  # its schedules are --configs
    "bench": (
        "--model --dtype --page-size --prefill-chunk --sections --decode-graph --draft --json",
        "--spec --kv-pages --max-running --prefix-cache --prefill-graph",
        " --model qwen3-8b --load-format dummy",
    ),
    "train-draft": (
        "--model --dtype --max-running --block-size --unroll --vocab --held-out --lr",
        "--spec --kv-pages --draft-tokens --draft-topk --prefix-cache --max-model-len",
        " --algorithm dflash --answers",
    ),
    "compare": ("--output", "--model", " out/"),
    "gate": ("--output", "--model", " out/"),
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_has_an_example_and_the_options_of_the_command(command):
    shown = page(command).replace("Usage: specbatch", "")
    present, absent, example = OPTIONS[command]
    assert f"specbatch {command}{example}" in shown
    assert [option for option in present.split() if option not in shown] == []
    assert [option for option in absent.split() if f"{option} " in shown] == []


def test_version(run):
    assert re.fullmatch(r"specbatch \d+\.\d+\.\d+\n", run("--version").stdout)


def commands(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *names, name)


@pytest.mark.parametrize("names", [*commands(typer.main.get_command(app))], ids=lambda names: " ".join(names) or "main")
def test_names_of_options_are_whole_at_80_columns(names):
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "80"}).output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    words = set(re.split(r"[\s,│]+", shown))
    options = {option for item in command.params for option in (*item.opts, *item.secondary_opts) if option[0] == "-"}
    assert options <= words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sweep --algorithm eagle", "eagle eagle3"),
        ("eval gsm8k --spec v", "v1 v2"),
        ("check --model smollm2", "smollm2-135m"),
        ("doct", "doctor"),
    ],
)
def test_shells_complete_commands_and_values(words, found):
    where = {"COMP_WORDS": f"specbatch {words}", "COMP_CWORD": str(len(words.split()))}
    result = CliRunner().invoke(app, [], prog_name="specbatch", env={"_SPECBATCH_COMPLETE": "complete_bash", **where})
    assert result.output.split() == found.split()


LONG = ["sweep", "generate", "eval", "check", "bench", "train-draft", "trace", "send-one"]


@pytest.mark.parametrize("command", LONG)
def test_long_help_fits_on_120_lines_and_help_all_has_everything(command):
    narrow = {"COLUMNS": "80"}
    short = CliRunner().invoke(app, [command, "--help"], env=narrow).output
    assert len(short.splitlines()) <= 120
    assert re.search(r"--model .*--help-all .*Others, which --help-all describes", short, re.DOTALL)
    assert "Details:" not in short
    whole = page(command)
    for item in typer.main.get_command(app).commands[command].params:
        assert item.param_type_name == "argument" or item.opts[0] in whole
        text = re.sub(r"\s+", " ", (item.help or "").replace("\\[", "["))
        assert text in whole, item.name


def test_help_all_of_a_wrong_value_is_not_needed():
    """It is shown before other options are checked."""
    result = CliRunner().invoke(app, ["sweep", "--help-all", "--repeats", "x"])
    assert result.exit_code == 0
    assert "Batch and memory" in result.output


def trained(name: str) -> set[Any]:
    """The defaults of a setting of `train-draft`."""
    return {value for head in HEADS if (value := getattr(Recipe(head), name)) is not None}


STATED = {  # numbers that a help text calls the default, and what the code does without the option
    **{
        (command, name): numbers
        for command, repeats in (("sweep", REPEATS), ("advise", advise.REPEATS))
        for name, numbers in {
            "concurrency": (*whole_numbers("", GPU.concurrency), *whole_numbers("", CPU.concurrency)),
            "input_len": (Workload.input_len,),
            "output_len": (GPU.output_len, CPU.output_len),
            "prompts_per_concurrency": (GPU.prompts_per_concurrency, CPU.prompts_per_concurrency),
            "repeats": (repeats,),
        }.items()
    },
    ("eval", "max_new_tokens"): (MAX_NEW_TOKENS,),
    ("check", "source"): (len(check_prompts.read(CheckOptions()) or ()),),
    ("check", "prompts"): (
        check_prompts.RANDOM_PROMPTS,
        len(check_prompts.read(CheckOptions(sampled=True)) or ()),
    ),
    **{
        ("train-draft", name): trained(name)
        for name in (
            *("unroll", "draft_layers", "block_size", "anchors", "markov_rank", "token_weight", "selector_rank"),
            *("gru_size", "correction_rank", "lattice_width", "refiner_rank"),
        )
    },
    ("train-draft", "vocab"): (Recipe("eagle3").vocabulary(10**6),),
    ("train-draft", "aux_layers"): (default_aux(100)[0],),
    ("send-one", "max_running"): (EngineOptions().config(concurrency=1).max_running,),
    ("", "corpus_min"): (
        Speculation("ngram", corpus="run").corpus_ngram,
        Speculation("standalone", draft="x", corpus="run").corpus_ngram,
    ),
    ("", "spec"): (2,),  # v2: `test_meaning_of_spec`
}


def test_numbers_that_help_calls_defaults_are_those_of_the_code():
    stated = {}
    for name, command in typer.main.get_command(app).commands.items():
        for item in getattr(command, "params", ()):
            text = re.sub(r"SGLang counts.*|; 1: cross.*|v1 or v2.*", "", item.help or "")
            for found in re.findall(r"Default: (.*?)(?:\.(?!\d)|$)", text):
                if numbers := re.findall(r"(?<![a-z0-9])v?\d[\d.]*", re.sub(r"gsm8k|eagle3", "", found)):
                    stated[name, item.name] = {float(number.strip("v.")) for number in numbers}
    for (name, option), numbers in stated.items():
        expected = STATED.get((name, option)) or STATED["", option]
        assert numbers == set(expected), (name, option)
    assert {name for name in STATED if name[0]} <= stated.keys()
