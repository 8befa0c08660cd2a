"""Commands with --data-parallel: the results of one engine, in the same files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from thread_replicas import ThreadReplicas
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.config.engine_config import EngineConfig
from specbatch.evals.report import EvalReport
from specbatch.records.store import load_record
from specbatch.replicas import engine as replicas_engine
from specbatch.replicas.messages import Completed, Message

PROMPTS = [{"prompt": f"prompt {number}" * (number % 3 + 1), "id": number} for number in range(9)]


class Run:
    """Runs a command with the toy model and so many replicas, which are threads. `spoil` is called with each message of
    a replica, which ends if it raises an exception."""

    spoil: Callable[[int, Message], None] | None = None

    def __call__(self, replicas: int, *words: object) -> Result:
        toy = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--memory-fraction", "0.2")
        return CliRunner().invoke(app, [*map(str, words), *toy, "--data-parallel", str(replicas)])

    def starter(self, config: EngineConfig) -> ThreadReplicas:
        return ThreadReplicas(config.data_parallel, spoil=self.spoil)


@pytest.fixture
def run(no_report: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    found = Run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replicas_engine, "LocalProcesses", found.starter)
    return found


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def files(folder: str) -> set[str]:
    paths = (str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    return {re.sub(r"_\d{4}-\d\d-\d\dT[\d.-]+\d", "_DATE", path) for path in paths}


def tokens(path: str) -> list[Any]:
    return [(row["id"], row["text"]) for row in rows(path)]


def test_generate_continues_with_another_number_of_replicas(run: Run) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    words = ("generate", "in.jsonl", "--spec", "v2", "--temperature", 0.8, "--max-new-tokens", 9)
    assert run(1, *words, "-o", "one.jsonl").exit_code == 0
    limited = run(2, *words, "-o", "two.jsonl", "--max-tokens-total", 20, "--concurrency", 2)
    assert limited.exit_code == 3, limited.output
    kept = len(rows("two.jsonl.partial")) - 1
    assert 0 < kept < len(PROMPTS)
    result = run(3, *words, "-o", "two.jsonl")
    assert (result.exit_code, f"continuing: {kept} of 9" in result.stderr) == (0, True), result.output
    assert tokens("two.jsonl") == tokens("one.jsonl")


def test_prompts_that_end_replicas_are_failed_rows_and_retried(run: Run) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    words = ("generate", "in.jsonl", "--max-new-tokens", 4)
    assert run(1, *words, "-o", "one.jsonl").exit_code == 0
    fatal = {2, 8}

    def fail(number: int, message: Message) -> None:
        if isinstance(message, Completed) and message.completion.index in fatal:
            raise RuntimeError("device-side assert")

    run.spoil = fail
    assert run(2, *words, "-o", "two.jsonl").exit_code == 1
    reason = "3 replicas ended while they ran it; the last: RuntimeError: device-side assert"
    assert {row["index"]: row["error"] for row in rows("two.jsonl") if "error" in row} == dict.fromkeys(fatal, reason)
    fatal.clear()
    assert run(2, *words, "-o", "two.jsonl", "--retry-failed").exit_code == 0
    assert tokens("two.jsonl") == tokens("one.jsonl")


@pytest.mark.parametrize("count", [1, 2])
def test_eval_has_the_answers_of_one_engine_and_continues_those_of_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    words = ("eval", "one_digit_sums", "--limit", 6, "--max-new-tokens", 6, "--spec", "v2", "--max-model-len", 700)
    assert run(1, *words, "--out", "one").exit_code == 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EvalReport, "save", stop)
        assert run(3 - count, *words, "--out", "several").exit_code == 130
    partial = Path("several/answers.partial.jsonl")
    partial.write_text("".join(f"{line}\n" for line in partial.read_text().splitlines()[:4]))
    result = run(count, *words, "--out", "several")
    assert (result.exit_code, "continuing: 3 answers" in result.stderr) == (0, True), result.output
    assert files("several") == files("one")
    found, wanted = (EvalReport.load(Path(folder), "output") for folder in ("several", "one"))
    assert [row["token_ids"] for row in found.questions] == [row["token_ids"] for row in wanted.questions]
    assert found.scores == wanted.scores
    assert ("in 2 replicas" in result.stdout) == (count == 2)


def test_an_ablation_shares_the_replicas(run: Run) -> None:
    words = ("eval", "one_digit_sums", "--limit", 4, "--max-new-tokens", 6, "--ablation", "--max-model-len", 700)
    result = run(2, *words, "--out", "out", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["configuration"], row.get("same_answers")) for row in rows] == [
        ("baseline", None),
        ("v1", 4),
        ("v2", 4),
    ]
    assert load_record("output", next(Path("out/v2").glob("c*/r1"))).replicas == 2


def test_check_compares_replicas_with_replicas(run: Run) -> None:
    result = run(2, "check", "--random", "--prompts", 6, "--max-new-tokens", 12, "--input-len", 9, "--output", "out")
    assert result.exit_code == 0, result.output
    assert "* replicas: 2\n" in result.stdout
    assert "6 of 6 prompts have the baseline's tokens." in result.stdout


@pytest.mark.slow
def test_sweep_shares_the_concurrency_out(run: Run) -> None:
    words = (
        "sweep",
        "--repeats",
        1,
        "--concurrency",
        "1,5",
        "--input-len",
        9,
        "--output-len",
        30,
        "--configs",
        "baseline,v2",
    )
    assert run(1, *words, "--out", "one").exit_code == 0
    result = run(2, *words, "--out", "two")
    assert result.exit_code == 0, result.output
    assert files("two") == files("one")
    assert "* replicas: 2\n" in result.stdout
    assert "Concurrency counts the requests on all 2 replicas" in result.stdout
    for place in ("baseline/c1/r1", "v2/c5/r1"):
        one, two = (load_record("output", Path(folder, place)) for folder in ("one", "two"))
        assert one.workload["output_sha256"] == two.workload["output_sha256"]
    assert two.caps["max_running"] == 3  # of each replica
    steps = two.counters["steps_by_rows"]
    assert max(map(int, steps)) == 3
    assert two.metrics["full_batch_steps"] == steps["3"][0]
    again = run(2, *words, "--out", "two")
    assert (again.exit_code, "4 of 4 points are finished" in again.stderr) == (0, True)
    assert "--data-parallel (2 there, 1 now)" in run(1, *words, "--out", "two").stderr


def test_a_point_that_lost_a_replica_runs_again(run: Run) -> None:
    words = ["sweep", "--repeats", 1, "--configs", "v2", "--concurrency", "2,4", "--prompts-per-concurrency", 3]
    words += ["--input-len", 5, "--output-len", 6, "--out", "out"]
    killed: list[int] = []

    def kill(number: int, message: Message) -> None:
        if isinstance(message, Completed) and message.completion.index == 6 and not killed:
            killed.append(number)
            raise RuntimeError("no memory")

    run.spoil = kill
    result = run(2, *words)
    assert result.exit_code == 1
    assert "1 replica ended and had to be replaced" in result.stdout
    [failed] = [path for path in Path("out").glob("v2/*/r1/record.json") if "replaced" in path.read_text()]
    assert json.loads(failed.read_text())["metrics"] == {}
    assert run(2, *words).exit_code == 0
    assert "replaced" not in failed.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-running", 2), "--max-running=2: concurrency 5 on 2 replicas needs at least 3"),
        (
            ("--kv-pages", 7),
            "--concurrency=5: baseline can hold 4 of these requests at once (--max-running=3, --kv-pages=7)",
        ),
    ],
)
def test_a_concurrency_that_a_replica_cannot_hold_its_share_of_is_refused(run: Run, words: Any, message: str) -> None:
    result = run(2, "sweep", "--repeats", 1, "--concurrency", "5", "--input-len", 9, "--output-len", 30, *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_grid_with_several_numbers_of_replicas(run: Run) -> None:
    Path("grid.toml").write_text('[a]\nspec = "off"\n[b]\nspec = "off"\ndata-parallel = 1\n')
    words = ("--repeats", 1, "--configs", "grid.toml", "--concurrency", "2", "--input-len", 9, "--output-len", 4)
    result = run(2, "sweep", *words, "--out", "out")
    assert result.exit_code == 0, result.output
    assert "* replicas: a: 2; b: 1" in result.stdout


def test_a_dry_run_plans_the_memory_of_a_replica(run: Run, known_speeds: None) -> None:
    result = run(2, "sweep", "--dry-run", "--concurrency", "4", "--input-len", 9, "--output-len", 30)
    assert result.exit_code == 0, result.output
    assert "of each replica of" in result.stdout


@pytest.mark.parametrize("words", [("bench",), ("trace",), ("send-one", "hello"), ("train-draft",)])
def test_other_commands_have_no_replicas(run: Run, words: tuple[str, ...]) -> None:
    result = run(2, *words)
    assert result.exit_code == 2
    assert "No such option: --data-parallel" in " ".join(result.stderr.split())
