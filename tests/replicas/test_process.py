"""Replicas as processes: their devices, and that none is left when the process that leads them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from processes import end_within

from specbatch import DataParallelEngine, Engine, EngineConfig, SamplingParams, SpecbatchError
from specbatch.replicas import process
from specbatch.replicas.messages import Ended, Message, Output

CONFIG = EngineConfig(model="toy", load_format="dummy", device="cpu", max_model_len=2000, max_running=4)
SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=1800, ignore_eos=True)
PROMPTS = ["one", "two and three", "four"]


def replicas_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "specbatch.replicas"], capture_output=True)
    return [int(line) for line in found.stdout.split()]


def test_processes_have_the_tokens_of_one_and_are_replaced() -> None:
    with Engine(CONFIG) as engine:
        wanted = [item.token_ids for item in engine.generate(PROMPTS, SHORT)]
    with DataParallelEngine(replace(CONFIG, data_parallel=2)) as engine:
        assert [item.token_ids for item in engine.generate(PROMPTS, SHORT)] == wanted
        pids = replicas_of(os.getpid())
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        assert [item.token_ids for item in engine.generate(PROMPTS, SHORT)] == wanted
        assert engine.record().counters["replaced_replicas"] == 1
        pids += replicas_of(os.getpid())
    assert end_within(pids, 5)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_replicas_end_with_the_process_that_started_them(ending: signal.Signals) -> None:
    program = """
from dataclasses import replace
from test_process import CONFIG, LONG, PROMPTS
from specbatch import DataParallelEngine
engine = DataParallelEngine(replace(CONFIG, data_parallel=2))
print("ready", flush=True)
engine.generate(PROMPTS * 20, LONG)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    leader = subprocess.Popen(
        [sys.executable, "-c", program], **pipes, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert leader.stdout is not None
    leader.stdout.readline()
    pids = replicas_of(leader.pid)
    assert len(pids) == 2
    time.sleep(0.5)
    leader.send_signal(ending)
    _, errors = leader.communicate(timeout=20)
    assert end_within(pids, 5)
    if ending == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `generate` with two replicas over many prompts; ends with none of their processes."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "number {index}"}}\n' for index in range(400)))

    def call(*words: str) -> subprocess.Popen[str]:
        command = ["generate", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--data-parallel", "2"]
        toy = ["--model", "toy", "--load-format", "dummy", "--device", "cpu", "--memory-fraction", "0.2"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "specbatch", *command, *toy, *words],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield call
    for leader in started:
        leader.kill()


def replicas_that_run(leader: subprocess.Popen[str], partial: Path) -> list[int]:
    """Waits for the first finished rows."""
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return replicas_of(leader.pid)


@pytest.mark.slow
def test_ctrl_c_ends_a_replica_that_is_stuck_and_keeps_finished_rows(start: Any, tmp_path: Path) -> None:
    leader = start("--max-new-tokens", "30")
    pids = replicas_that_run(leader, tmp_path / "out.jsonl.partial")
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    leader.send_signal(signal.SIGINT)
    _, errors = leader.communicate(timeout=30)
    assert end_within(pids, 5)
    assert leader.returncode == 130
    assert "kept" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
def test_ctrl_c_at_start_leaves_no_process(start: Any, seconds: float) -> None:
    leader = start("--max-new-tokens", "400", "--ignore-eos")
    time.sleep(seconds)
    pids = replicas_of(leader.pid)
    leader.send_signal(signal.SIGINT)
    _, errors = leader.communicate(timeout=30)
    assert leader.returncode in (130, -signal.SIGINT, 1)  # by Python itself, before the command begins
    assert end_within(pids, 5)
    assert "replica" not in errors.partition("Traceback")[2]


@pytest.mark.slow
def test_killed_replicas_are_replaced_while_they_start_and_while_they_run(start: Any, tmp_path: Path) -> None:
    leader = start("--max-new-tokens", "30", "--temperature", "1")
    while len(pids := replicas_of(leader.pid)) < 2:
        time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    later = replicas_that_run(leader, tmp_path / "out.jsonl.partial")
    assert pids[1] in later
    for pid in later:
        os.kill(pid, signal.SIGKILL)
    _, errors = leader.communicate(timeout=300)
    assert leader.returncode == 0, errors
    assert errors.count("ended (its process was killed by SIGKILL); starting another") == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 400


@pytest.mark.slow
def test_a_leader_that_is_killed_leaves_no_process_even_while_they_start(start: Any) -> None:
    leader = start()
    while len(pids := replicas_of(leader.pid)) < 2:
        time.sleep(0.05)
    leader.kill()
    assert end_within(pids, 10)


def test_what_a_process_prints_comes_line_by_line_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specbatch" / "replicas").mkdir(parents=True)
    for name, text in (("__init__", ""), ("replicas/__init__", ""), ("replicas/__main__", "print('a\\nb'); exit(3)")):
        (tmp_path / "specbatch" / f"{name}.py").write_text(text)
    messages: SimpleQueue[Message] = SimpleQueue()
    link = process.ReplicaProcess({"PYTHONPATH": str(tmp_path)}, messages.put)
    assert [messages.get(timeout=20) for _ in range(3)] == [Output("a"), Output("b"), Ended("exit status 3")]
    link.close()


@pytest.mark.parametrize(
    ("visible", "each", "wanted"),
    [(None, 1, ["0", "1", "2"]), (None, 2, ["0,1", "2,3"]), ("4,GPU-a,6,7", 2, ["4,GPU-a", "6,7"])],
)
def test_each_replica_has_devices_of_its_own(
    use_gpus: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, each: int, wanted: list[str]
) -> None:
    use_gpus(4)
    monkeypatch.delenv(process.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(process.VISIBLE, visible)
    config = EngineConfig(device="cuda", tensor_parallel=each, data_parallel=len(wanted))
    assert [settings[process.VISIBLE] for settings in process.LocalProcesses(config).settings] == wanted


@pytest.mark.parametrize(
    ("device", "count", "each", "message"),
    [
        ("cuda", 5, 1, "data_parallel=5: 5 replicas use CUDA devices 0 to 4 and this machine has 4; .* at most 4"),
        ("cuda", 3, 2, "data_parallel=3: 3 replicas of tensor_parallel=2 use CUDA devices 0 to 5 .* at most 2"),
        ("cuda:1", 2, 1, "data_parallel=2: .* use device cuda"),
    ],
)
def test_more_devices_than_there_are_are_refused(
    use_gpus: Any, device: str, count: int, each: int, message: str
) -> None:
    use_gpus(4)
    with pytest.raises(SpecbatchError, match=message):
        process.LocalProcesses(EngineConfig(device=device, tensor_parallel=each, data_parallel=count))


@pytest.fixture
def use_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`use_cores(count)`: this process may run on so many cores."""
    return lambda count: monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: set(range(count)))


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (2, 2), (5, 5)])
def test_replicas_on_a_cpu_have_a_core_each(use_cores: Callable[[int], None], cores: int, most: int) -> None:
    use_cores(cores)
    process.LocalProcesses(EngineConfig(device="cpu", data_parallel=most))
    with pytest.raises(SpecbatchError, match=rf"data_parallel={most + 1}: .*has {cores}; use at most {most}$"):
        process.LocalProcesses(EngineConfig(device="cpu", data_parallel=most + 1))


def test_ranks_of_replicas_on_a_cpu_share_its_cores(
    use_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cores(8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = process.LocalProcesses(EngineConfig(device="cpu", data_parallel=2, tensor_parallel=2))
    assert made.settings == [{"OMP_NUM_THREADS": "2"}] * 2
