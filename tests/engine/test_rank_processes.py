"""Ranks as processes: tokens of one rank, and one clear error where a process ends, fails or is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from processes import end_within, is_running
from thread_ranks import thread_group
from watched_calls import Watch

from specbatch import Completion, Engine, EngineConfig, SamplingParams, SpecbatchError
from specbatch.engine.device.prefill import PrefillStep
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.ranks import ranks
from specbatch.engine.setup import builder
from specbatch.errors import FailedError, ShortOfMemoryError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SHORT, LONG = (SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (8, 2_000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Each test starts processes of its own."""
    yield
    ranks.close_groups()


def config(model: str, size: int) -> EngineConfig:
    return EngineConfig(model=model, load_format="dummy", device="cpu", tensor_parallel=size, max_model_len=3000)


@pytest.mark.slow
def test_processes_generate_the_tokens_of_one_and_errors_name_the_rank(model: str) -> None:
    prompts, params = ["one", "two and three"], SamplingParams(max_new_tokens=8, ignore_eos=True)
    with Engine(config(model, 1)) as engine:
        expected = [item.token_ids for item in engine.generate(prompts, params)]
    with Engine(config(model, 2)) as first, Engine(config(model, 2), weights_of=first) as second:
        for engine in (first, second, first):
            assert [item.token_ids for item in engine.generate(prompts, params)] == expected
        [pid] = children()

        events = first.stream(prompts, LONG)
        next(events)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(SpecbatchError, match="the process of rank 1 ended by SIGKILL"):
            list(events)
        assert time.monotonic() - start < 5
        assert none_is_left()
        with pytest.raises(SpecbatchError, match="rank 1"):
            second.generate(prompts, params)
    # Another group starts, whose ranks report what they raise.
    with Engine(config(model, 2)) as engine:
        assert [item.token_ids for item in engine.generate(prompts, params)] == expected
        [pid] = children()
        engine.parts.worker.others.send("unknown_call", ())  # type: ignore[union-attr]
        with pytest.raises(SpecbatchError, match=r"AttributeError.*unknown_call"):
            engine.generate(prompts, LONG)
    ranks.close_groups()
    assert end_within([pid], 5)


def children() -> list[int]:
    """Processes of other ranks that this process has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "specbatch.engine.ranks.follower"], capture_output=True
    )
    return [int(line) for line in found.stdout.split() if is_running(int(line))]


def none_is_left() -> bool:
    return end_within(children(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them(model: str, ending: signal.Signals) -> None:
    program = f"""
from test_rank_processes import LONG, SHORT, children, config
from specbatch import Engine
engine = Engine(config({model!r}, 2))
expected = engine.generate(["one"], SHORT)[0].token_ids
events = engine.stream(["one"], LONG)
next(events)
print(*children(), flush=True)
try:
    list(events)
except KeyboardInterrupt:
    assert engine.generate(["one"], SHORT)[0].token_ids == expected
    raise
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command, pipes = [sys.executable, "-c", program], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    leader = subprocess.Popen(command, **pipes, text=True, env=os.environ | {"PYTHONPATH": path})
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    leader.send_signal(ending)
    _, errors = leader.communicate(timeout=20)
    assert end_within([pid], 5)
    if ending == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")


CAUSES = {
    "start": "the process of rank 1 ended with status 3",
    "join": "rank 1 failed: ValueError: no peer access",
    "load": "out of memory while building the engine on rank 1: .*",
    "capture": "rank 1 failed: RuntimeError: operation not permitted when stream is capturing",
    "launch": "rank 1 failed: ValueError: index out of range",
    "memory": r"out of memory: a decode step of 1 request on rank 1 does not fit beside weights .*",
    "memory_of_prompts": r"out of memory: a prefill pass of \d+ tokens on rank 1 does not fit .*, or prefill_chunk=",
    "stop": "rank 1 has not answered for 3 s, as if its process were stopped",
}
SHORT_OF_MEMORY = ("load", "memory", "memory_of_prompts")
WHILE_RUNNING = ("launch", "memory", "memory_of_prompts", "stop")


@pytest.mark.parametrize(
    "fault", ["launch", *(pytest.param(name, marks=pytest.mark.slow) for name in CAUSES if name != "launch")]
)
def test_a_fault_of_another_rank_is_one_error(
    model: str,
    stopped_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    stopped_after(3)
    finished: list[Completion] = []
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "FOLLOWER", "faulty_follower")
        patch.setenv("FAULT", fault)
        start, message = time.monotonic(), f"^tensor parallel: {CAUSES[fault]}; a new engine starts new processes"
        kind: type[SpecbatchError] = FailedError
        if fault in SHORT_OF_MEMORY:
            kind, message = ShortOfMemoryError, f"^{CAUSES[fault]}"
        if fault in WHILE_RUNNING:
            engine = Engine(config(model, 2))
            start = time.monotonic()
            with engine, pytest.raises(kind, match=message):
                engine.generate(["one", "two"], [SHORT, LONG], on_completion=finished.append)
        else:
            with pytest.raises(kind, match=message):
                Engine(config(model, 2))
        assert time.monotonic() - start < (8 if fault in WHILE_RUNNING else 40)  # with the imports of another process
    assert none_is_left()
    assert len(finished) == (fault in WHILE_RUNNING and fault != "memory_of_prompts")
    assert capfd.readouterr().err == ""
    if fault == "memory":
        with Engine(config(model, 2)) as engine:
            assert engine.generate(["one"], SHORT)[0].token_ids == finished[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("step", [PrefillStep, DecodeStep])
def test_rank_0_that_runs_out_of_memory(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], step: type
) -> None:
    """While the other one waits for it."""
    with Engine(config(model, 2)) as engine, monkeypatch.context() as patch:

        def fail(*_: object) -> NoReturn:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

        patch.setattr(step, "__call__", fail)
        start = time.monotonic()
        with pytest.raises(ShortOfMemoryError, match=r"^out of memory: a .* on rank 0 does not fit beside weights .*"):
            engine.generate(["one", "two"], SHORT)
        assert time.monotonic() - start < 5
    assert none_is_left()
    assert capfd.readouterr().err == ""
    with Engine(config(model, 2)) as engine:
        assert len(engine.generate(["one"], SHORT)[0].token_ids) == 8


def test_sizes_that_do_not_divide_are_refused_before_a_process_starts(model: str) -> None:
    with pytest.raises(SpecbatchError, match=r"num_key_value_heads=2, or be a multiple of it; use 2 or 4$"):
        Engine(config(model, 3))
    assert not children()


@pytest.fixture
def threads_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads of this process, the last of which counts, on six cores."""
    used = [6]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    return used


@pytest.mark.parametrize(("omp", "threads"), [(None, 2), ("4", 6)])
def test_ranks_on_a_cpu_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, threads_used: list[int], omp: str | None, threads: int
) -> None:
    """Also a second group; not where the user has chosen a number."""
    monkeypatch.delenv("OMP_NUM_THREADS") if omp is None else monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert [ranks.divide_cores(3), ranks.divide_cores(3)] == [threads, threads]
    assert threads_used[-1] == threads


def test_threads_come_back_with_the_last_engine(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, threads_used: list[int]
) -> None:
    """An engine on one device that follows would else compute with the threads of a rank."""
    monkeypatch.setattr(ranks, "_divided", [])  # engines of other tests may be open
    monkeypatch.setattr(ranks, "_undivided", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    thread_group(monkeypatch)
    divided = EngineConfig("toy", load_format="dummy", device="cpu", tensor_parallel=2, memory_fraction=0.2)
    with Engine(divided) as first:
        with Engine(divided, weights_of=first):
            assert threads_used[-1] == 3
        assert threads_used[-1] == 3
    assert threads_used[-1] == 6
    watch(builder, "_load", before=lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, FailedError), match="division by zero"):  # its own, or that of rank 1
        Engine(divided)
    assert threads_used[-1] == 6
