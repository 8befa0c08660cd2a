"""Replicas as processes: their devices, and that none is left when the process that leads them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch import DataParallelEngine, Engine, EngineConfig, SamplingParams, SpecbatchError
from specbatch.replicas import process

CONFIG = EngineConfig(model="toy", load_format="dummy", device="cpu", max_model_len=2000, max_running=4)
SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=1800, ignore_eos=True)
PROMPTS = ["one", "two and three", "four"]


def replicas_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "specbatch.replicas"], capture_output=True)
    return [int(line) for line in found.stdout.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


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


@pytest.mark.parametrize(
    ("visible", "each", "wanted"),
    [(None, 1, ["0", "1", "2"]), (None, 2, ["0,1", "2,3"]), ("4,GPU-a,6,7", 2, ["4,GPU-a", "6,7"])],
)
def test_each_replica_has_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, each: int, wanted: list[str]
) -> None:
    see_devices(monkeypatch, 4)
    monkeypatch.delenv(process.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(process.VISIBLE, visible)
    config = EngineConfig(device="cuda", tensor_parallel=each, data_parallel=len(wanted))
    assert [settings[process.VISIBLE] for settings in process.LocalProcesses(config)._settings] == wanted


@pytest.mark.parametrize(
    ("device", "count", "each", "message"),
    [
        ("cuda", 5, 1, "data_parallel=5: 5 replicas use CUDA devices 0 to 4 and this machine has 4; .* at most 4"),
        ("cuda", 3, 2, "data_parallel=3: 3 replicas of tensor_parallel=2 use CUDA devices 0 to 5 .* at most 2"),
        ("cuda:1", 2, 1, "data_parallel=2: .* use device cuda"),
    ],
)
def test_more_devices_than_there_are_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, each: int, message: str
) -> None:
    see_devices(monkeypatch, 4)
    with pytest.raises(SpecbatchError, match=message):
        process.LocalProcesses(EngineConfig(device=device, tensor_parallel=each, data_parallel=count))


def see_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(process.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process.torch.cuda, "device_count", lambda: count)
