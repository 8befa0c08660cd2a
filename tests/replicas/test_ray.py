"""Commands with Ray itself: two workers of this machine, in a network namespace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
from ray_namespace import UP, start, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
JOB = (
    "generate in.jsonl --max-new-tokens 150 --temperature 0.7 --model toy --load-format dummy --device cpu "
    "--max-model-len 500 --max-running 4"
)
ON_RAY = f"{JOB} -o out.jsonl --distributed ray --address local"
ROWS = 40
TIMEOUT_S = 200
PIPELINE = """
import json
import ray
from specbatch import EngineConfig, SamplingParams
from specbatch.jobs.ray_data import GenerateBatch
ray.init("local", include_dashboard=False, log_to_driver=False)
config = EngineConfig("toy", load_format="dummy", device="cpu", max_model_len=64, max_running=4)
rows = ray.data.from_items([{"prompt": f"number {number}", "id": number} for number in range(20)])
how = {"fn_constructor_args": (config, SamplingParams(max_new_tokens=5, ignore_eos=True)), "concurrency": 1}
for row in rows.map_batches(GenerateBatch, batch_size=8, **how).take_all():
    print(json.dumps([row["id"], int(row["output_tokens"]), row["error"]]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "Question number {number}"}}\n' for number in range(ROWS)))
    return tmp_path


def finished(folder: Path) -> int:
    partial = folder / "out.jsonl.partial"
    return max(0, len(partial.read_text().splitlines()) - 1) if partial.exists() else 0


def workers(job: subprocess.Popen[str], count: int) -> list[int]:
    """The processes of `count` workers, when they have started."""
    found: list[int] = []
    assert job.stderr is not None
    for line in job.stderr:
        if started := re.search(r"runs on [\d.]+, process (\d+)", line):
            found.append(int(started[1]))
        if len(found) == count:
            return found
    raise AssertionError(f"only {found} started")


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while finished(folder) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check(folder: Path) -> None:
    """The output has every row once, as one engine makes it."""
    start(folder, f"{JOB} -o one.jsonl").communicate(timeout=TIMEOUT_S)
    found, wanted = (
        [(row["index"], row["token_ids"]) for row in map(json.loads, (folder / name).read_text().splitlines())]
        for name in ("out.jsonl", "one.jsonl")
    )
    assert found == wanted
    assert [index for index, _ in wanted] == list(range(ROWS))


def test_a_worker_that_is_killed_costs_no_row(folder: Path) -> None:
    job = start(folder, f"{ON_RAY} --workers 1-2")
    (first, _) = workers(job, 2)
    wait_for_rows(folder, 5)
    os.kill(first, signal.SIGKILL)
    _, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    assert "was lost); starting another" in errors
    check(folder)


def test_a_killed_command_continues_with_another_number_of_workers(folder: Path) -> None:
    job = start(folder, f"{ON_RAY} --workers 2")
    processes = [psutil.Process(pid) for pid in workers(job, 2)]
    wait_for_rows(folder, 5)
    job.kill()
    job.communicate()
    assert not psutil.wait_procs(processes, timeout=30)[1]
    kept = finished(folder)
    assert 0 < kept < ROWS
    job = start(folder, f"{ON_RAY} --workers 1")
    _, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    assert int(re.search(r"continuing: (\d+) of 40", errors)[1]) >= kept - 1  # type: ignore[index]
    check(folder)


def test_a_sweep_goes_on_after_a_worker_was_killed(folder: Path) -> None:
    words = "sweep --model toy --load-format dummy --device cpu --input-len 6 --output-len 40 --concurrency 2,4"
    job = start(folder, f"{words} --repeats 2 --out out --distributed ray --address local --workers 2")
    os.kill(workers(job, 2)[0], signal.SIGKILL)
    _, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    assert "was lost); starting another" in errors
    records = [json.loads(path.read_text()) for path in (folder / "out").rglob("record.json")]
    points = [
        tuple(record["workload"][name] for name in ("configuration", "concurrency", "repeat")) for record in records
    ]
    assert sorted(points) == sorted(product(("baseline", "v1", "v2"), (2, 4), (1, 2)))
    assert not any(record["workload"].get("error") for record in records)


def test_batches_of_ray_data(folder: Path) -> None:
    job = start(folder, "", f"{UP}{PIPELINE}", stdout=subprocess.PIPE)
    output, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert sorted(number for number, _, _ in rows) == list(range(20))
    assert all(tokens == 5 and error is None for _, tokens, error in rows)
