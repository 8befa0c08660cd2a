"""Memory that runs out during a command: one line, exit status 2, and what has finished is kept and continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.ranks import ranks

TOY = ("--model", "toy", "--load-format", "dummy", "--device", "cpu", "--max-model-len", "128", "--prefill-chunk", "64")
Run = Callable[..., Result]


@pytest.fixture
def run(run_toy: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    """`run(command, exit_code=0)` in an empty working folder."""
    return run_toy(TOY)


def fail_after(patch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """All calls of a method of a worker run out of memory after the first ones, whatever their size."""
    launch, made = getattr(DeviceWorker, name), 0

    def call(*args: Any) -> Any:
        nonlocal made
        made += 1
        if made > calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return launch(*args)

    patch.setattr(DeviceWorker, name, call)


def said(what: str, kept: str) -> str:
    """What the last line on standard error says."""
    return (
        rf"^error: out of memory: a {what} does not fit beside weights .*, workspace .*; use a lower --memory-fraction "
        rf"\(0.8 now\) or --kv-pages \(\d+\); {kept}$"
    )


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def plain_lines() -> list[dict[str, Any]]:
    return [{"prompt": f"{number}" * 3} for number in range(12)]


def batch_lines() -> list[dict[str, Any]]:
    body = {"model": "toy", "max_tokens": 12}
    return [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"{number}" * 3},
        }
        for number in range(12)
    ]


@pytest.mark.parametrize("lines", [plain_lines, batch_lines])
def test_generate_keeps_finished_rows_and_continues_with_lower_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    job = "generate in.jsonl --max-new-tokens 12 --temperature 1 --concurrency 2"
    with monkeypatch.context() as patch:
        fail_after(patch, "decode", 30)
        result = run(f"{job} -o out.jsonl", 2)
    last = result.stderr.splitlines()[-1]
    kept = r"kept (\d) finished of 12 in out.jsonl.partial; the same command continues"
    found = re.match(said("decode step of 1 request", kept), last)
    assert found, last
    assert int(found[1]) >= 3
    assert "max_running: 1 (lowered from 2: " in result.stderr
    assert not Path("out.jsonl").exists()
    again = run(f"{job} -o out.jsonl --memory-fraction 0.3 --kv-pages 30 --max-running 1")
    assert f"continuing: {found[1]} of 12 are finished" in again.stderr
    run(f"{job} -o once.jsonl")
    answers = [[row.get("text", row.get("custom_id")) for row in rows(name)] for name in ("out.jsonl", "once.jsonl")]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


@pytest.mark.parametrize(
    ("task", "launch", "calls", "what"),
    [
        ("one_digit_sums", "decode", 45, "decode step of 1 request"),
        ("one_digit_choices", "score", 6, "prefill pass of 1 token"),
    ],
)
def test_eval_keeps_finished_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch, task: str, launch: str, calls: int, what: str
) -> None:
    command = f"eval {task} --limit 12 --num-fewshot 0 --max-running 4"
    with monkeypatch.context() as patch:
        fail_after(patch, launch, calls)
        last = run(f"{command} --out a", 2).stderr.splitlines()[-1]
    kept = r"kept the finished answers \((\d+)\) in a/answers.partial.jsonl; the same command with this --out continues"
    found = re.match(said(what, kept), last)
    assert found, last
    assert int(found[1]) >= 3
    run(f"{command} --out a --kv-pages 60")
    run(f"{command} --out b")
    assert len(rows("a/requests.jsonl")) == len(rows("b/requests.jsonl"))
    answers = [
        [(row["doc_id"], row["scores"], row.get("token_ids")) for row in rows(f"{name}/questions.jsonl")]
        for name in "ab"
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


def test_sweep_goes_on_with_the_other_points(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "sweep --concurrency 2 --input-len 6 --output-len 6 --prompts-per-concurrency 2 --out out"
    step, short = DecodeStep.__call__, True

    def call(self: Any, step_input: Any) -> Any:
        if short and step_input.num_drafts and type(self.drafter).__name__ != "NoDrafter":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return step(self, step_input)

    monkeypatch.setattr(DecodeStep, "__call__", call)
    result = run(command, 1)
    errors = {path.parent.parent.parent.name: json.loads(path.read_text())["workload"].get("error")
              for path in Path().glob("out/*/c2/r1/record.json")}  # fmt: skip
    assert errors["baseline"] is None
    for name in ("v1", "v2"):
        assert errors[name].startswith("out of memory: a decode step of 1 request does not fit beside weights ")
    assert result.stderr.count("out of memory: ") >= 2
    assert "Traceback" not in result.output
    short = False
    run(command)
    assert all(
        json.loads(path.read_text())["workload"].get("error") is None for path in Path().glob("out/*/c*/r1/record.json")
    )


@pytest.mark.slow
def test_ranks_keep_finished_rows_and_continue_with_the_settings_of_the_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes: rank 1 runs out of memory in its 21st decode step."""
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain_lines()))
    job = "generate in.jsonl -o out.jsonl --max-new-tokens 8 --concurrency 4 --tensor-parallel 2"
    ranks.close_groups()
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "FOLLOWER", "faulty_follower")
        patch.setenv("FAULT", "memory")
        last = run(job, 2).stderr.splitlines()[-1]
    found = re.match(
        r"error: out of memory: a decode step of 4 requests on rank 1 does not fit beside weights .*; use a lower "
        r"--memory-fraction \(0.8 now\), or (--max-running=2 with --kv-pages=\d+); kept (\d+) finished of 12 in "
        r"out.jsonl.partial; the same command continues$",
        last,
    )
    assert found, last
    assert int(found[2]) >= 4
    assert f"continuing: {found[2]} of 12 are finished" in run(f"{job} {found[1].replace(' with', '')}").stderr
    assert [row["index"] for row in rows("out.jsonl")] == list(range(12))
    ranks.close_groups()
