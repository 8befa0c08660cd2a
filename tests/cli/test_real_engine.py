"""The commands with the real engine, on random weights of a toy model."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

import specbatch
from specbatch.cli.app import app

TOY = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--max-model-len", "64")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def call(*words: Any) -> Result:
        result = CliRunner().invoke(app, [*map(str, words), *TOY])
        assert result.exit_code == 0, result.output
        return result

    return call


def test_sweep(run):
    run("sweep", "--concurrency", "1,3", "--input-len", 8, "--output-len", 12, "--repeats", 2, "--output", "out")
    rows = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    assert [row["configuration"] for row in rows] == ["baseline", "v1", "v2"] * 2
    assert all(float(row["output_tok_s"]) > 0 for row in rows)
    assert all(float(row["accept_length"]) >= 1 for row in rows if row["configuration"] != "baseline")
    summary = Path("out/summary.md").read_text()
    assert "same output tokens at every point" in summary
    assert "INCOMPLETE" not in summary
    record = json.loads(Path("out/v2/c3/r2/record.json").read_text())
    assert record["metrics"]["output_tokens"] == 4 * 12  # the window holds this point and nothing else
    assert record["metrics"]["cached_tokens"] == 0


def test_eval_of_likelihoods(run):
    """Which are longer than this model: a byte is a token."""
    words = ("eval", "one_digit_choices", "--limit", 12, "--output")
    result = run(*words, "a")
    assert "48 texts lost their beginning because they are longer than max_model_len=64." in result.stdout
    assert "multiple_choice" not in result.stdout
    assert len(Path("a/questions.jsonl").read_text().splitlines()) == 12
    assert len(Path("a/requests.jsonl").read_text().splitlines()) == 48
    said = json.loads(run(*words, "b", "--num-fewshot", 0, "--json").stdout)
    assert {score["metric"] for score in said["scores"]} == {"acc", "acc_norm"}
    assert (said["kind"], said["num_fewshot"], said["cut"], said["metrics"]["requests"]) == (
        "multiple_choice",
        0,
        48,
        48,
    )


def test_a_sweep_reports_where_speculation_is_slower_and_why(run):
    # Eight passes of half a model that agrees with the whole one by chance: nothing can pay for that.
    words = ("--draft", "self:skip=0", "--draft-tokens", 8, "--input-len", 8, "--output-len", 12)
    result = run("sweep", "--concurrency", "1,3", "--configs", "baseline,v1", *words, "--output", "out")
    assert "low acceptance: below break-even: v1 at concurrency 1 (accept length " in result.stderr
    assert "; v1 at concurrency 3 (accept length " in result.stderr
    assert result.stderr.count("below break-even") == 1
    assert "likely causes: the weights are random" in result.stderr
    rows = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    for row in rows:
        drafts = row["configuration"] == "v1"
        assert bool(row["break_even"]) == drafts
        assert (row["speculation"].startswith("-") and row["speculation"].endswith("% (one repeat)")) == drafts
        assert not drafts or float(row["break_even"]) > 2
    assert "| reached draft 1, 2, ... (%)" in Path("out/summary.md").read_text()


def test_send_one_and_generate_report_acceptance(run):
    words = ("--prompt", "abab", "--max-new-tokens", 30)
    assert "reached draft 1, 2, ... (%)" in run("send-one", *words, "--draft", "self:skip=0").stdout
    assert "reached draft" not in run("send-one", *words).stdout
    Path("in.jsonl").write_text(json.dumps({"prompt": "abab"}) + "\n")
    run("generate", "in.jsonl", "-o", "out.jsonl", "--max-new-tokens", 30, "--draft", "self:skip=0")
    record = json.loads(Path("out.jsonl.record.json").read_text())
    counts = record["counters"]["acceptance"]
    assert record["metrics"]["first_draft_accept_rate"] == counts["accepted"][0] / counts["drafted"][0]
    assert sum(verifies for _, verifies, _ in counts["context"]) == record["metrics"]["verify_steps"]


@pytest.mark.parametrize("spec", ["off", "v1", "v2"])
def test_generate_gives_the_same_tokens_under_every_schedule(run, spec):
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": text * 3}) + "\n" for text in ("ab", "xyz", "q")))
    run("generate", "in.jsonl", "-o", f"{spec}.jsonl", "--max-new-tokens", 10, "--concurrency", 2, "--spec", spec)
    run("generate", "in.jsonl", "-o", "plain.jsonl", "--max-new-tokens", 10)
    tokens, plain = (
        [json.loads(line)["token_ids"] for line in Path(f"{name}.jsonl").read_text().splitlines()]
        for name in (spec, "plain")
    )
    assert tokens == plain
    assert len(plain) == 3


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_same_generate_command_continues_after_a_kill(run, sent):
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": f"{n}" * 3}) + "\n" for n in range(24)))
    words = ("generate", "in.jsonl", "--max-new-tokens", "30", "--temperature", "1", "--concurrency", "2")
    command = [sys.executable, "-m", "specbatch", *words, "-o", "out.jsonl", *TOY]
    here = {**os.environ, "PYTHONPATH": str(Path(specbatch.__file__).parents[1])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here)
    partial = Path("out.jsonl.partial")
    deadline = time.monotonic() + 60
    while not partial.exists() or partial.read_text().count("\n") < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    said = process.communicate()[1]
    assert process.returncode == (130 if sent == signal.SIGINT else -sent)
    assert sent != signal.SIGINT or "the same command continues" in said
    assert not Path("out.jsonl").exists()
    kept = partial.read_text().count("\n") - 1
    assert 3 <= kept < 24
    assert f"continuing: {kept} of 24 are finished" in run(*words, "-o", "out.jsonl").stderr
    run(*words, "-o", "once.jsonl")
    made = [[json.loads(line) for line in Path(name).read_text().splitlines()] for name in ("out.jsonl", "once.jsonl")]
    same = [[(row["index"], row["token_ids"], row["text"]) for row in each] for each in made]
    assert same[0] == same[1]
    assert not partial.exists()


def test_a_prompt_that_the_model_cannot_take_is_a_malformed_line(run):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    lines = [{"prompt": "ab"}, {"prompt_token_ids": [999999]}, chat, {"prompt": "x" * 90}, {"prompt_token_ids": [3]}]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = run("generate", "in.jsonl", "-o", "out.jsonl", "--max-new-tokens", 4, "--skip-bad").stderr
    assert "skipped in.jsonl:2: prompt 1='token 999999': token ids go from 0 to 256\n" in said
    assert "skipped in.jsonl:3: chat_template=None: bytes has none" in said
    assert "skipped in.jsonl:4: max_new_tokens of prompt 3=4: the prompt has 90 tokens and max_model_len=64" in said
    assert [json.loads(line)["index"] for line in Path("out.jsonl").read_text().splitlines()] == [0, 4]


def test_send_one_streams_what_it_returns(run):
    words = ("--prompt", "hello", "--max-new-tokens", 12, "--spec", "v2")
    result = json.loads(run("send-one", *words, "--json").stdout)
    assert result["tokens"] == 12
    streamed = run("send-one", *words, "--stream").stdout
    assert streamed.startswith(result["text"])


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_prompts_that_are_too_long_are_an_error(tmp_path, dry):
    words = ("--dataset", "gsp", "--groups", 2, "--shared-len", 9000, "--input-len", 5, "--out", tmp_path / "out")
    result = CliRunner().invoke(app, ["sweep", "--concurrency", "2", *map(str, words), *TOY[:-2], *dry])
    assert result.exit_code == 2
    assert "shared_len=9000: with input_len=5 and output_len=48 that is max_model_len=9053: " in result.stderr


def test_a_dry_run_loads_and_writes_nothing(run):
    result = run("sweep", "--concurrency", "1,3", "--repeats", 2, "--out", "out", "--dry-run")
    assert not Path("out").exists()
    lines = result.stdout.splitlines()
    assert sum(line.startswith("| v1 ") for line in lines) == 4
    assert "12 points, about " in result.stdout
    assert any(line.startswith("* v2: ") and "KV pages" in line for line in lines)


@pytest.mark.slow
def test_several_models_run_one_after_the_other(run):
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [1, 2]\n[ngram]\nalgorithm = "ngram"\nseed = 1\n')
    words = ("--concurrency", 2, "--input-len", 8, "--output-len", 6, "--configs", "grid.toml", "--out", "out")
    result = run("sweep", *words)
    assert result.stdout.count("## toy-") == 2
    names = sorted(str(path.parent) for path in Path("out").glob("*/*/c2/r1/record.json"))
    assert names == ["out/toy-1/baseline/c2/r1", "out/toy-1/ngram/c2/r1", "out/toy-2/baseline/c2/r1"]
    assert run("sweep", *words).exit_code == 0


@pytest.fixture
def two_models(run):
    """The process of a long sweep over two models, and those below it; the first model has measured a point."""
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [1, 2]\n')
    words = ("sweep", "--concurrency", "1", "--output-len", "50", "--input-len", "8", "--repeats", "10000")
    command = [sys.executable, "-m", "specbatch", *words, "--configs", "grid.toml", "--out", "out", *TOY]
    here = {**os.environ, "PYTHONPATH": str(Path(specbatch.__file__).parents[1])}
    with Path("said").open("w") as said:
        process = psutil.Popen(command, stdout=said, stderr=said, env=here)
    _wait_for_points(process, 1)
    children = process.children(recursive=True)
    yield process, children
    for one in (process, *children):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _wait_for_points(process, count):
    deadline = time.monotonic() + 60
    while len(list(Path("out").rglob("record.json"))) < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_the_process_of_a_model_ends_when_the_command_is_killed(two_models):
    process, children = two_models
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert gone
    assert not alive


@pytest.mark.slow
def test_the_process_of_a_model_ends_when_the_command_is_interrupted(two_models):
    process, children = two_models
    for one in children:  # a terminal tells them, too; they wait for the command's word
        one.send_signal(signal.SIGINT)
    _wait_for_points(process, 2 + len(list(Path("out").rglob("record.json"))))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1]
    said, kept = Path("said").read_text(), len(list(Path("out/toy-1").rglob("record.json")))
    assert f"kept {kept} finished points and their summary in out/toy-1; " in said
    assert "interrupted; finished points are kept in out; the same command continues" in said
    assert "Traceback" not in said
    assert "| baseline " in Path("out/toy-1/summary.md").read_text()
    assert not Path("out/toy-2").exists()
