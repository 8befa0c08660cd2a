"""Messages of the command line name options; what they say of files keeps the keys of the files."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest
import typer
from named_in import sources

from specbatch.cli.app import app
from specbatch.cli.configs import Words
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.flags import flags_of, in_flags, in_keys
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError, about, refuse
from specbatch.evals.options import EvalOptions
from specbatch.sweeps.check.options import CheckOptions
from specbatch.training.recipe import Recipe

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def written(error: SpecbatchError, command: str = "generate") -> str:
    return in_flags(error, flags_of(COMMANDS[command].params))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refuse("max_running", 0, "use 1"), "--max-running=0: use 1"),
        (refuse("draft", "x y", "no such folder"), "--draft='x y': no such folder"),
        (refuse("aux_layers", (2, 1), "use others"), "--aux-layers=2,1: use others"),
        (refuse("deterministic", True, "leave it out"), "--deterministic: leave it out"),
        (refuse("prefix_cache", False, "leave it out"), "--no-prefix-cache: leave it out"),
        (refuse("retry_failed", True, "leave it out"), "--retry-failed: leave it out"),
        (refuse("split", None, "name one"), "--split: name one"),
        (refuse("graphs.decode", "x", "use off"), "--decode-graph='x': use off"),
        (refuse("schedule", "v3", "use v2"), "--spec='v3': use v2"),
        (refuse("kv_pages", 3, "with page_size=16 use more"), "--kv-pages=3: with --page-size=16 use more"),
        (refuse("seed", 1, "use draft='dummy' or regex='a b'"), "--seed=1: use --draft=dummy or --regex='a b'"),
        (refuse("seed", 1, "algorithm 'none' drafts; a model"), "--seed=1: algorithm 'none' drafts; a model"),
        (refuse("seed", 1, "head_dim=3 of config.json"), "--seed=1: head_dim=3 of config.json"),
        (refuse("seed", 1, "body.top_logprobs=2"), "--seed=1: body.top_logprobs=2"),
        (refuse("seed", 1, "add --kv-pages or kv_pages"), "--seed=1: add --kv-pages or --kv-pages"),
        (SpecbatchError("memory_fraction=0.5: use a lower kv_pages"), "--memory-fraction=0.5: use a lower --kv-pages"),
        (refuse("input", "in.jsonl:2", "max_new_tokens=0: use 1"), "IN='in.jsonl:2': max_new_tokens=0: use 1"),
        (refuse("no_such_setting", 1, "use 2"), "no_such_setting=1: use 2"),
    ],
)
def test_messages(error, message):
    assert written(error) == message


def test_names_of_other_commands():
    assert written(refuse("max_model_len", 9, "use more"), "train-draft") == "--max-len=9: use more"
    assert written(refuse("engine", "x", "use http"), "sweep") == "--engine='x': use http"
    assert written(refuse("dataset", "f:2", "turns=1"), "sweep") == "--dataset='f:2': turns=1"
    arguments = refuse("gen_kwargs", "top_p", "use temperature=0.8,top_p=0.95")
    assert written(arguments, "eval") == "--gen-kwargs='top_p': use temperature=0.8,top_p=0.95"
    assert written(refuse("kv_pages", 9, "use more"), "compare") == "kv_pages=9: use more"  # it has no such option


@pytest.mark.parametrize(
    ("command", "given", "error", "message"),
    [
        ("sweep", ["concurrency"], refuse("max_running", 99, "use 1"), "--concurrency=99: use 1"),
        ("sweep", ["concurrency", "max_running"], refuse("max_running", 99, "use 1"), "--max-running=99: use 1"),
        ("sweep", ["concurrency", "data_parallel"], refuse("max_running", 9, "use 1"), "--max-running=9: use 1"),
        ("sweep", ["input_len"], refuse("window", 99, "use 1"), "--input-len=99: use 1"),
        ("sweep", ["compare_thinking"], refuse("thinking", True, "use -"), "--compare-thinking: use -"),
        ("eval", ["ablation"], refuse("configs", "v1, v2", "use -"), "--ablation='v1, v2': use -"),
        ("trace", ["batch"], refuse("concurrency", 99, "use 1"), "--batch=99: use 1"),
        ("bench", ["batch"], refuse("max_running", 99, "use 1"), "--batch=99: use 1"),
    ],
)
def test_a_setting_has_the_name_of_the_option_that_set_it(command, given, error, message):
    assert in_flags(error, flags_of(COMMANDS[command].params, given)) == message


def test_a_command_knows_which_options_were_given(run):
    result = run("sweep", "--dataset", "gsm8k", "--compare-thinking", "--no-chat-template", "--device", "cpu")
    assert "error: --compare-thinking: no prompt is rendered by a chat template" in result.stderr


def test_tables_of_files_have_keys():
    error = refuse("max_running", 0, "use 1 or draft_tokens='auto', with draft='x'")
    assert in_keys(error, ["max_running", "draft_tokens"]) == (
        "max-running=0: use 1 or draft-tokens='auto', with draft='x'"
    )
    assert in_keys(refuse("graphs.decode", "x", "use off"), []) == "decode-graph='x': use off"


def test_words_of_a_command_with_a_file():
    tables = {"v1": frozenset({"kv_pages", "draft"}), "v2": frozenset({"draft"})}
    words = pickle.loads(pickle.dumps(Words(flags_of(COMMANDS["sweep"].params), "grid.toml", tables)))

    def of(name: str) -> SpecbatchError:
        with pytest.raises(SpecbatchError) as caught, about(name):
            raise refuse("kv_pages", 3, "with page_size=16 and burst='all' use more")
        return caught.value

    assert words.reason(of("v1")) == "kv-pages=3: with page-size=16 and --burst=all use more"
    assert words.message(of("v1")) == f"--configs='grid.toml: v1': {words.reason(of('v1'))}"
    assert (
        words.reason(of("v2"))
        == words.message(of("v2"))
        == "--kv-pages=3: with --page-size=16 and --burst=all use more"
    )
    assert words.message(SpecbatchError("a: draft='x'\nb: lost", setting="configs")) == (
        "grid.toml: a: draft='x'\ngrid.toml: b: lost"
    )
    both = SpecbatchError("a: draft='x'", setting="configs", value="a", works="draft='x'")
    assert words.message(both) == "--configs='grid.toml: a': draft='x'"
    assert words.message(refuse("configs", "grid.toml: a", "draft='x'")) == "--configs='grid.toml: a': draft='x'"


# What messages may say of other programs, and of files, whose errors the command line leaves as they are.
OTHER_FLAGS = {
    "specbatch/jobs/dataset.py", "specbatch/jobs/input_scan.py", "specbatch/training/answers.py", "evals/gate/gate.py",
    "specbatch/replicas/ray_cluster.py", "specbatch/records/lm_eval_results.py", "specbatch/weights/gguf_file.py",
    "specbatch/weights/known_models.py", "specbatch/jobs/partial_output.py", "specbatch/training/source.py",
    "evals/encoding.py",
}  # fmt: skip
MESSAGES = {"refuse", "refuse_json", "SpecbatchError", "FailedError", "Failed"}


def test_messages_of_the_library_name_no_flags():
    """It has fields; flags are put in their place by the command line alone."""
    flag, found = re.compile(r"(?<!\w)--(?!out\b)[a-z]"), []
    files = {name: text for name, text in sources().items() if not name.startswith("kernels/")}
    for name, source in files.items():
        if name.startswith("specbatch/cli/") or name in OTHER_FLAGS or not flag.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") in MESSAGES
            works = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "works"
            if called or works:
                texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                found += [(name, text) for text in texts if isinstance(text, str) and flag.search(text)]
    assert len(files) > 100
    assert not found


SETTINGS = (EngineConfig, Speculation, SamplingParams)
OF_COMMANDS = {
    **dict.fromkeys(("generate", "send-one", "trace", "sweep", "bench"), SETTINGS),
    "check": (*SETTINGS[:2], CheckOptions),
    "eval": (*SETTINGS[:2], EvalOptions),
    "train-draft": (EngineConfig, Recipe),
}


@pytest.mark.parametrize("command", OF_COMMANDS)
def test_each_refusal_of_a_setting_names_an_option_of_the_command(command):
    """Of all settings with a rule that the command has as options."""
    params = COMMANDS[command].params
    known = {name for item in params for name in (*item.opts, *item.secondary_opts)}
    tried = 0
    for settings in (*OF_COMMANDS[command], Graphs):
        for item in fields(settings):
            option = f"{item.name}_graph" if settings is Graphs else item.name
            if item.metadata.get("rule") is None or option not in {param.name for param in params}:
                continue
            given: dict[str, Any] = {"task": "t"} if settings is EvalOptions else {}
            with pytest.raises(SpecbatchError) as caught:
                settings(**given | {item.name: object()})
            message = written(caught.value, command)
            assert message.split("=")[0] in known, message
            assert option not in message or "_" not in option, message
            tried += 1
    assert tried > 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("send-one Hello", "Hello: send-one takes no arguments; name the option, such as --prompt Hello"),
        ("sweep gsm8k", "gsm8k: sweep takes no arguments; name the option, such as --dataset gsm8k"),
        ("bench a b", "a b: bench takes no arguments; name the option, such as --model a b"),
        ("train-draft --algorithm eagle3 x", "x: train-draft takes no arguments; name the option, such as --data x"),
        ("generate a b -o c", "b: generate takes no more than IN; name the option, such as --output b"),
        ("doctor x", "x: doctor takes no arguments; leave it out"),
    ],
)
def test_words_without_an_option(run, words, message):
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message} (see ")
    (_,) = result.stderr.splitlines()
