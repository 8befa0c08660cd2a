"""The commands with the real engine, on random weights of a toy model."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
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
def run(run_toy: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    """`run(command, exit_code=0)` in an empty working folder."""
    return run_toy(TOY)


def write_prompts(*prompts: Any) -> None:
    lines = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


@pytest.mark.slow
def test_sweep_reports_where_speculation_is_slower_and_why(run):
    # Eight passes of half a model that agrees with the whole one by chance cannot pay.
    words = "--draft self:skip=0 --draft-tokens 8 --input-len 8 --output-len 12"
    result = run(f"sweep --concurrency 1,3 --repeats 1 {words} --output out")
    assert "low acceptance: below break-even: v1 at concurrency 1 (accept length " in result.stderr
    assert "; v1 at concurrency 3 (accept length " in result.stderr
    assert result.stderr.count("below break-even") == 1
    assert "likely causes: the weights are random" in result.stderr
    table = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    assert [row["configuration"] for row in table] == ["baseline", "v1", "v2"] * 2
    for row in table:
        assert float(row["output_throughput"]) > 0
        drafts = row["configuration"] != "baseline"
        assert bool(row["break_even"]) == drafts
        assert row["step_ratio_verdict"] == ("one repeat" if drafts else "")
        assert not drafts or float(row["step_ratio"]) < 1
        assert not drafts or (float(row["break_even"]) > 2 and float(row["accept_length"]) >= 1)
    summary = Path("out/summary.md").read_text()
    assert "| reached draft 1, 2, ... (%)" in summary
    assert "same output tokens at every point" in summary
    assert "INCOMPLETE" not in summary
    record = json.loads(Path("out/v2/c3/r1/record.json").read_text())
    assert record["metrics"]["output_tokens"] == 4 * 12  # the window holds this point and nothing else
    assert record["metrics"]["cached_tokens"] == 0


def test_eval_of_likelihoods(run):
    """A byte is a token, so that the texts are longer than the context."""
    result = run("eval one_digit_choices --limit 12 --output a")
    assert "48 texts lost the beginning, because of max_model_len=64." in result.stdout
    assert "multiple_choice" not in result.stdout
    assert (len(rows("a/questions.jsonl")), len(rows("a/requests.jsonl"))) == (12, 48)
    report = json.loads(run("eval one_digit_choices --limit 3 --output b --num-fewshot 0 --json").stdout)
    assert {score["metric"] for score in report["scores"]} == {"acc", "acc_norm"}
    assert (report["kind"], report["num_fewshot"]) == ("multiple_choice", 0)
    assert (report["cut"], report["metrics"]["requests"]) == (12, 12)


def test_send_one_reports_acceptance_and_streams(run):
    streamed = run("send-one --prompt abab --max-new-tokens 12 --draft self:skip=0 --stream").stdout
    assert "reached draft 1, 2, ... (%)" in streamed
    result = run("send-one --prompt abab --max-new-tokens 12 --json")
    assert "reached draft" not in result.stdout
    found = json.loads(result.stdout)
    assert found["tokens"] == 12
    assert streamed.startswith(found["text"])


def test_generate_is_lossless_and_records_acceptance(run):
    write_prompts("ababab", "xyzxyzxyz", "qqq")
    for name, words in (("off", ""), ("v1", "--spec v1"), ("v2", "--draft self:skip=0")):
        run(f"generate in.jsonl -o {name}.jsonl --max-new-tokens 10 --concurrency 2 {words}")
    tokens = [[row["token_ids"] for row in rows(f"{name}.jsonl")] for name in ("off", "v1", "v2")]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 3
    record = json.loads(Path("v2.jsonl.record.json").read_text())
    counts = record["counters"]["acceptance"]
    assert record["metrics"]["first_draft_accept_rate"] == counts["accepted"][0] / counts["drafted"][0]
    assert sum(verifies for _, verifies, _ in counts["context"]) == record["metrics"]["verify_steps"]


JOB = "generate in.jsonl --max-new-tokens 20 --temperature 1 --concurrency 2"


def wait_for(condition: Callable[[], bool], process: psutil.Popen | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_finished_rows() -> bool:
    partial = Path("out.jsonl.partial")
    return partial.exists() and partial.read_text().count("\n") >= 4


def expect_continuation(run: Callable[..., Result]) -> None:
    """The same command continues, and its output is that of an uninterrupted run."""
    assert not Path("out.jsonl").exists()
    kept = Path("out.jsonl.partial").read_text().count("\n") - 1
    assert 3 <= kept < 16
    assert f"continuing: {kept} of 16 are finished" in run(f"{JOB} -o out.jsonl").stderr
    run(f"{JOB} -o once.jsonl")
    resumed, once = (
        [(row["index"], row["token_ids"], row["text"]) for row in rows(f"{name}.jsonl")] for name in ("out", "once")
    )
    assert resumed == once
    assert not Path("out.jsonl.partial").exists()


@pytest.mark.slow
def test_interrupted_generate_continues(run):
    def interrupt() -> None:
        wait_for(has_finished_rows)
        os.kill(os.getpid(), signal.SIGINT)

    write_prompts(*(f"{n}" * 3 for n in range(16)))
    sender = threading.Thread(target=interrupt)
    sender.start()
    assert "the same command continues" in run(f"{JOB} -o out.jsonl", exit_code=130).stderr
    sender.join()
    expect_continuation(run)


def start(command: str) -> psutil.Popen:
    here = {**os.environ, "PYTHONPATH": str(Path(specbatch.__file__).parents[1])}
    with Path("log").open("w") as log:
        return psutil.Popen(
            [sys.executable, "-m", "specbatch", *command.split(), *TOY], stdout=log, stderr=subprocess.STDOUT, env=here
        )


@pytest.mark.slow
def test_killed_generate_continues(run):
    write_prompts(*(f"{n}" * 3 for n in range(16)))
    process = start(f"{JOB} -o out.jsonl")
    wait_for(has_finished_rows, process)
    process.kill()
    process.wait()
    expect_continuation(run)


def test_prompts_that_the_model_cannot_take_are_malformed_lines(run):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    write_prompts("ab", {"prompt_token_ids": [999999]}, chat, "x" * 90, {"prompt_token_ids": [3]})
    log = run("generate in.jsonl -o out.jsonl --max-new-tokens 4 --skip-bad").stderr
    assert "skipped in.jsonl:2: prompt=[999999]: token ids go from 0 to 256\n" in log
    assert "skipped in.jsonl:3: chat_template=None: bytes has none" in log
    assert "skipped in.jsonl:4: max_new_tokens=4: the prompt has 90 tokens and max_model_len=64" in log
    assert [row["index"] for row in rows("out.jsonl")] == [0, 4]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_too_long_prompts_are_refused(tmp_path, dry):
    words = f"sweep --concurrency 2 --dataset gsp --groups 2 --shared-len 9000 --input-len 5 --out {tmp_path}/out"
    result = CliRunner().invoke(app, [*words.split(), *TOY[:-2], *dry])
    assert result.exit_code == 2
    assert "--shared-len=9000: with --input-len=5 and --output-len=32 that is --max-model-len=9037: " in result.stderr


def test_dry_run_loads_and_writes_nothing(run):
    result = run("sweep --concurrency 1,3 --repeats 2 --input-len 9 --output-len 4 --out out --dry-run")
    assert not Path("out").exists()
    lines = result.stdout.splitlines()
    assert [line.split("|")[3].strip() for line in lines if line.startswith("| v1 ")] == ["2", "2"]  # repeats
    assert "12 points, about " in result.stdout
    assert any(line.startswith("* v2: ") and "KV pages" in line for line in lines)


def test_each_of_several_models_has_its_finished_points(run, known_speeds):
    words = "sweep --concurrency 1 --repeats 1 --input-len 8 --least-prompts 1 --configs grid.toml"
    Path("grid.toml").write_text('[baseline]\nspec = "off"\n')
    run(f"{words} --output-len 3 --seed 7 --out out/toy-1")
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [7, 8]\n')
    shown = run(f"{words} --output-len 3 --seed 7 --out out --dry-run").stdout
    assert re.findall(r"model (.*):$", shown, re.MULTILINE) == ["toy-1", "toy-2"]
    assert re.findall(r"(in all: )?(\d) points?, about", shown) == [("", "0"), ("", "1"), ("in all: ", "1")]
    for more in ("", "--dry-run"):
        result = run(f"{words} --output-len 4 --seed 7 --out out {more}", exit_code=2)
        assert "--output='out/toy-1': is of a sweep with another --output-len (3 there, 4 now)" in result.stderr
    assert not Path("out/toy-2").exists()


def test_dry_run_lists_points_of_servers_without_times(run, known_speeds):
    server = 'engine = "http"\nbase-url = "http://127.0.0.1:9"\n'
    Path("grid.toml").write_text(f'[ours]\nspec = "off"\n\n[sglang]\n{server}\n[vllm]\n{server}')
    words = "--concurrency 1,2 --repeats 1 --input-len 9 --output-len 4 --configs grid.toml --out out --dry-run"
    shown = run(f"sweep {words}").stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if "|" in line][2:]
    assert [(row[0], row[-1] == "-") for row in rows] == [("ours", False), ("sglang", True), ("vllm", True)] * 2
    assert "4 points of servers not included" in shown


@pytest.mark.parametrize("sampling", [{"reasoning": ["<think>"]}, {"json_schema": True}])
def test_a_dry_run_refuses_rows_that_are_not_sent_to_a_server(run, sampling):
    Path("grid.toml").write_text('[ours]\nspec = "off"\n[vllm]\nengine = "http"\nbase-url = "http://127.0.0.1:9"\n')
    write_prompts("x", {"prompt": "y", "sampling": sampling})
    for more in ("--dry-run", "", "--request-rate 5,6"):
        words = f"--dataset in.jsonl --configs grid.toml --concurrency 1 --repeats 1 --output-len 4 --out out {more}"
        assert (
            f":2': sampling: {next(iter(sampling))} is not sent to a server"
            in run(f"sweep {words}", exit_code=2).stderr
        )
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_token_ids": [99_999]}, "prompt 1=[99999]: token ids go from 0 to "),
        ({"prompt": "y", "sampling": {"logit_bias": {"99999": 1}}}, "logit_bias=99999: token ids go from 0 to "),
        ({"prompt": "y", "sampling": {"regex": "(a|b)*a(a|b){16}"}}, "more than 16000 states"),
    ],
)
def test_a_dry_run_refuses_rows_that_cannot_run(run, row, message):
    write_prompts("x", row)
    words = "--dataset in.jsonl --configs baseline --concurrency 1 --repeats 1 --output-len 4 --out out --dry-run"
    assert message in run(f"sweep {words}", exit_code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "sweep --repeats 1 --input-len 8 --output-len 6",
        "eval one_digit_sums --limit 2 --num-fewshot 0 --max-new-tokens 3 --truncate-prompts",
    ],
)
def test_several_models_run_one_after_the_other(run, command):
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [1, 2]\n[ngram]\nalgorithm = "ngram"\nseed = 1\n')
    command += " --concurrency 2 --configs grid.toml --out out"
    assert run(command).stdout.count("## toy-") == 2
    names = sorted(str(path.parent) for path in Path("out").glob("*/*/c2/r1/record.json"))
    assert names == ["out/toy-1/baseline/c2/r1", "out/toy-1/ngram/c2/r1", "out/toy-2/baseline/c2/r1"]
    run(command)


def points(folder: str = "out") -> int:
    return len(list(Path(folder).rglob("record.json")))


@pytest.fixture
def two_models(run):
    """The process of a long sweep over two models and its children; the first model has measured a point."""
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [1, 2]\n')
    process = start("sweep --concurrency 1 --output-len 50 --input-len 8 --repeats 10000 --configs grid.toml --out out")
    wait_for(lambda: points() >= 1, process)
    children = process.children(recursive=True)
    yield process, children
    for one in (process, *children):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


@pytest.mark.slow
def test_process_of_a_model_ends_when_the_command_is_killed(two_models):
    process, children = two_models
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert gone
    assert not alive


@pytest.mark.slow
def test_process_of_a_model_ends_when_the_command_is_interrupted(two_models):
    process, children = two_models
    for one in children:  # a terminal interrupts them, too; they wait for the command
        one.send_signal(signal.SIGINT)
    before = points()
    wait_for(lambda: points() >= 2 + before, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1]
    log = Path("log").read_text()
    assert f"kept {points('out/toy-1')} finished points and the summary in out/toy-1; " in log
    assert "interrupted; finished points are kept in out; the same command with this --out continues" in log
    assert "Traceback" not in log
    assert "| baseline " in Path("out/toy-1/summary.md").read_text()
    assert not Path("out/toy-2").exists()


@pytest.mark.slow
def test_models_that_are_interrupted_before_a_point_leave_no_folder(run):
    Path("grid.toml").write_text('[baseline]\nspec = "off"\nseed = [1, 2]\n')
    process = start("sweep --concurrency 1 --prompts-per-concurrency 9999 --input-len 8 --configs grid.toml --out out")
    wait_for(lambda: "start-up:" in Path("log").read_text(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    log = Path("log").read_text().splitlines()
    assert log[-2:] == ["toy-1: no point was finished", "interrupted"]
    assert not Path("out").exists()


def test_grammars_of_rows_and_of_the_job(run):
    """A row's own replaces the job's, and rows that cannot run are named with their line."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    write_prompts(
        "x", {"prompt": "y", "sampling": {"regex": "yes|no"}}, {"prompt": "z", "sampling": {"json_schema": schema}}
    )
    run("generate in.jsonl -o out.jsonl --regex [ab]{3} --max-new-tokens 12 --algorithm ngram --spec v2")
    first, second, third = (row["text"] for row in rows("out.jsonl"))
    assert set(first) <= {*"ab"}
    assert len(first) == 3
    assert second in ("yes", "no")
    assert json.loads(third)["a"] in range(10)
    result = run("generate in.jsonl -o again.jsonl --ignore-eos", exit_code=2)
    assert ":2: sampling: ignore_eos=True: an end token ends what matches" in result.stderr.replace("\n", "")
    write_prompts("x", {"prompt": "y", "sampling": {"regex": "(a|b)*a(a|b){16}"}})
    result = run("generate in.jsonl -o again.jsonl --skip-bad --max-new-tokens 9")
    assert "more than 16000 states" in result.output
    result = run("generate in.jsonl -o again.jsonl --overwrite --regex a(?=b)", exit_code=2)
    assert result.stderr.endswith("regex='a(?=b)': lookahead and lookbehind are not regular\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the prompt has 300 tokens and --max-model-len=64; shorten it"),  # a question of GSM8K
        ("--input-len 9 --output-len 4 --kv-pages 2", "--max-model-len=64: the KV pool of 2 pages holds"),
        (
            "--input-len 9 --output-len 4 --decode-graph whole",
            "needs a CUDA device and this engine runs on a CPU; use off",
        ),
        ("--input-len 9 --output-len 4 --draft self:skip=7-9", "draft="),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(run, words, message):
    command = f"sweep --concurrency 1,3 --repeats 1 {words} --out out"
    for more in ("--dry-run", ""):
        assert message in run(f"{command} {more}", exit_code=2).stderr
    assert not Path("out").exists()
