"""An OpenAI batch that is killed with SIGKILL and run again: each row once, as in an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from openai_types import ErrorLine, OutputLine

import specbatch

TOY = "--model toy --load-format dummy --device cpu --max-model-len 96 --max-running 8 --no-chat-template"
BAD: list[Any] = [
    "{",
    "5",
    {"max_tokens": 0},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "xml"}},
    {"presence_penalty": 5},
    {"logit_bias": {"5": 101}},
    {"max_tokens": 10**6},
    {"temperature": "hot"},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
]


def requests(count: int, bad: int, chance: random.Random) -> list[Any]:
    """Chat completions and completions with all supported parameters in random order; `bad` of them cannot run."""
    rows: list[Any] = []
    for n in range(count):
        chat = n < bad or chance.random() < 0.5
        body: dict[str, Any] = {"model": "gpt-4o-mini", "max_tokens": chance.randint(1, 24)}
        body |= {"messages": [{"role": "user", "content": f"question {n}"}]} if chat else {"prompt": f"text {n}"}
        body |= chance.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"seed": n}, {}))
        body |= chance.choice(({}, {}, {"n": 2}, {"stop": ["a", "b"]}, {"top_k": 5}, {"min_p": 0.1}))
        body |= chance.choice(({}, {}, {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 1}))
        if not chat and chance.random() < 0.2:
            body["prompt"] = [f"text {n}", f"more {n}"]
        url = "/v1/chat/completions" if chat else "/v1/completions"
        row = {"custom_id": f"row-{n}", "method": "POST", "url": url, "body": body}
        if n < bad:
            wrong = BAD[n % len(BAD)]
            row = wrong if isinstance(wrong, str) else row | {"body": body | wrong}
        rows.append(row)
    chance.shuffle(rows)
    return rows


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specbatch", "generate", "in.jsonl", "-o", name, *TOY.split()]
    environment = os.environ | {"PYTHONPATH": str(Path(specbatch.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)


def finished(folder: Path, name: str) -> int:
    partial = folder / f"{name}.partial"
    return max(partial.read_bytes().count(b"\n") - 1, 0) if partial.exists() else 0


def kill_after(folder: Path, name: str, rows: int) -> int:
    """Run until the partial output has so many rows, and kill. Returns how many rows it has then."""
    running = start(folder, name)
    deadline = time.monotonic() + 200
    while finished(folder, name) < rows and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait()
    return finished(folder, name)


def results(folder: Path, name: str) -> list[Any]:
    """The lines of the output and of the error file, validated and without their times. Log-probabilities are rounded:
    their last digits depend on the requests that ran beside."""
    found = []
    for path, model in ((folder / name, OutputLine), (folder / f"{name}.errors.jsonl", ErrorLine)):
        for line in path.read_text().splitlines():
            row = json.loads(line, parse_float=lambda text: round(float(text), 4))
            model.model_validate(row)
            row["response"]["body"].pop("created", None)
            found.append(row)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("count", "bad", "kills"), [(40, 4, 1), (1000, 20, 3)])
def test_killed_batch_has_each_row_once(tmp_path, count, bad, kills):
    chance = random.Random(16)
    rows = requests(count, bad, chance)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(text)
    goals = sorted(chance.sample(range(1, count * 8 // 10), kills))
    kept = [kill_after(tmp_path, "killed.jsonl", goal) for goal in goals]
    print(f"{count} rows, {bad} bad: killed with {kept} rows in the partial output")
    assert kept[0] > 0
    assert kept == sorted(kept)
    assert kept[-1] < count
    for name in ("killed.jsonl", "once.jsonl"):
        assert start(tmp_path, name).wait() == 1, (tmp_path / f"{name}.log").read_text()
    found = results(tmp_path, "killed.jsonl")
    assert len(found) == len({row["id"] for row in found}) == count
    assert sum(row["error"] is not None for row in found) == bad
    assert found == results(tmp_path, "once.jsonl")
    assert not (tmp_path / "killed.jsonl.partial").exists()
