"""Kernels are compiled in parallel, for Hopper: launches within `compiling_only` only start to compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import JITFunction
from triton.backends.compiler import GPUTarget

from specbatch.runtime.parallel_compilation import compile_ahead, compiling_only

KIT = Path(__file__).parents[1] / "kit"
HOPPER = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda src, metadata: None,
)


def add(x, y, N: tl.constexpr):
    return


def broken(x, N: tl.constexpr):
    return


class Cache:
    """A compiler with a cache. The real one does not work beside the interpreter, in which kernels run here."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()

    def compile(self, src: Any, target: Any, options: Any, _env_vars: Any) -> SimpleNamespace:
        if src.name == "broken":
            raise ValueError("N is no good")
        key = src.name, *src.constants.values()
        triton.knobs.compilation.listener(src=src, cache_hit=key in self._known)
        self._known.add(key)
        return SimpleNamespace(is_compiled=True, src=src, metadata=None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fails if anything is launched, and an empty cache."""
    monkeypatch.setattr(triton.runtime.driver, "_active", HOPPER)
    monkeypatch.setattr("triton.compiler.compile", Cache().compile)


def launches(kernel: Any, *sizes: int) -> Iterator[int]:
    x = torch.zeros(64)
    for size in sizes:
        kernel[(1,)](*[x] * (len(kernel.arg_names) - 1), N=size)
        yield size


def silent(done: int, total: int) -> None:
    pass


def test_launches_only_compile(hopper: None) -> None:
    kernel, x, y = JITFunction(add), torch.zeros(64), torch.zeros(64)
    run, heard = JITFunction.run, triton.knobs.compilation.listener
    with compiling_only() as mode:
        for size in (16, 32, 16, 64):
            kernel[(1,)](x, y, N=size)
        assert len(mode) == 3
        seen: list[tuple[int, int]] = []
        mode.finish(lambda done, total: seen.append((done, total)))
    assert mode.compiled == ["add"] * 3
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert not y.any()
    assert (JITFunction.run, triton.knobs.compilation.listener) == (run, heard)
    kernels, *_ = kernel.device_caches[0]
    assert all(one.is_compiled for one in kernels.values()), "a launch finds them compiled"


def test_a_kernel_that_does_not_compile_is_named(hopper: None) -> None:
    parts = [launches(JITFunction(broken), 16), launches(JITFunction(add), 16)]
    with pytest.raises(RuntimeError, match=r"the kernel broken does not compile: (?s:.*)N is no good"):
        compile_ahead(parts, [], silent)
    assert JITFunction.run.__name__ == "run"


def test_with_a_warm_cache_only_the_beginning_is_rehearsed(hopper: None) -> None:
    passes: list[str] = []
    for expected, compiled in (([16, 32], ["add"] * 2), ([16], [])):
        done: list[int] = []
        part = (done.append(size) for size in launches(JITFunction(add), 16, 32))
        assert compile_ahead([part], [lambda: passes.append("pass")], silent).kernels == compiled
        assert done == expected
    assert passes == ["pass"], "of the first time"


def test_a_part_that_is_not_in_the_cache_is_found(hopper: None) -> None:
    """Whatever else is in it."""
    assert compile_ahead([launches(JITFunction(add), 16)], [], silent).kernels == ["add"]
    parts = [launches(JITFunction(add), 16, 32), launches(JITFunction(add), 64, 16)]
    assert compile_ahead(parts, [], silent).kernels == ["add", "add"]


def test_other_threads_launch(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, grid, warmup, **__: calls.append(warmup))
    kernel = JITFunction(add)
    with compiling_only():
        list(launches(kernel, 16))
        thread = threading.Thread(target=lambda: list(launches(kernel, 16)))
        thread.start()
        thread.join()
    list(launches(kernel, 16))
    assert calls == [True, False, False]


def test_an_error_ends_a_rehearsal_and_leaves_kernels_to_later_launches(hopper: None) -> None:
    """As when there is no memory for one configuration of several."""
    kernel, failing, sizes = JITFunction(add), JITFunction(broken), range(16, 116)

    def part() -> Iterator[float]:
        yield from launches(failing, 16)
        for _ in launches(kernel, *sizes):
            pass
        yield 1 / 0

    with pytest.raises(ZeroDivisionError):
        compile_ahead([islice(part(), 1, None)], [], silent)
    assert JITFunction.run.__name__ == "run"
    assert len(compile_ahead([launches(kernel, *sizes)], [], silent).kernels) <= len(sizes)
    for one in (kernel, failing):
        kernels, *_ = one.device_caches[0]
        assert all(item is None or item.is_compiled is True for item in kernels.values())


def test_a_part_that_needs_a_value_leaves_the_others(hopper: None) -> None:
    """At its beginning, or later."""

    def part(first: int) -> Iterator[int]:
        yield from launches(JITFunction(add), *[16] * first)
        torch.ones(1).item()

    found = compile_ahead([part(0), part(2), launches(JITFunction(add), 16, 32)], [], silent)
    assert len(found.missed) == 2
    assert found.kernels == ["add"] * 2


def test_threads_take_turns(hopper: None) -> None:
    """Else the first to end would end the redirection of launches for both."""
    inside: list[int] = []

    def part(number: int) -> Iterator[int]:
        for _ in range(20):
            inside.append(number)
            time.sleep(0.001)
            yield from launches(JITFunction(add), 16)

    threads = [threading.Thread(target=compile_ahead, args=([part(number)], [], silent)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside in ([0] * 20 + [1], [1] * 20 + [0])  # the second finds the kernel of its first item in the cache


@pytest.mark.slow
def test_engine_is_rehearsed_for_hopper(tmp_path: Path) -> None:
    """A cold start compiles the kernels of all buckets, and a warm one none. Neither changes the engine's state."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found = []
    for _ in range(2):
        command = [sys.executable, KIT / "rehearsed.py"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    cold, warm = found
    assert cold["compiled"] == cold["kernels"] > 30
    names = {"skinny_kernel", "verify_attention_kernel", "prefill_attention_kernel", "argmax_kernel", "_commit_kernel"}
    assert names < set(cold["names"])
    assert warm["compiled"] == 0 < warm["kernels"] < cold["kernels"]
    assert cold["missed"] == warm["missed"] == []
    assert not cold["changed"]
    assert not warm["changed"]
