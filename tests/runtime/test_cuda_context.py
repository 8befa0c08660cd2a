"""The context of a CUDA device is made beside the import of torch, where the engine will run in this process."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from specbatch.cli.options import EngineOptions
from specbatch.runtime import cuda_context
from specbatch.runtime.cuda_context import is_built_for_cuda, make_context_ahead


class FakeDriver:
    """A driver with two devices."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_installed = self.is_built_for = True

    def load(self, name: str) -> FakeDriver:
        if not self.is_installed:
            raise OSError(f"{name}: cannot open shared object file")
        return self

    def cuInit(self, flags: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append("init")
        return 0

    def cuDeviceGet(self, device: Any, index: ctypes.c_int) -> int:
        device._obj.value = index.value
        return 0 if index.value in (0, 1) else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.calls.append(f"context of {device.value}")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr("ctypes.CDLL", driver.load)
    monkeypatch.setattr(cuda_context, "is_built_for_cuda", lambda: driver.is_built_for)
    make_context_ahead.cache_clear()
    return driver


def calls_after(driver: FakeDriver) -> list[str]:
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and "make_context" in thread.name:
            thread.join()
    return driver.calls


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("auto", ["init", "context of 0"]),
        ("cuda", ["init", "context of 0"]),
        ("cuda:1", ["init", "context of 1"]),
        ("cuda:2", ["init"]),
        (f"cuda:{10**30 + 2}", ["init"]),
        ("cpu", []),
    ],
)
def test_context_is_made_once_where_there_is_such_a_device(driver: FakeDriver, device: str, calls: list[str]) -> None:
    make_context_ahead(device)
    make_context_ahead(device)
    assert calls_after(driver) == calls


def test_nothing_happens_where_torch_is_built_for_cpus(driver: FakeDriver) -> None:
    assert is_built_for_cuda() == (torch.version.cuda is not None)
    driver.is_built_for = False
    make_context_ahead("auto")
    assert calls_after(driver) == []


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_happens_without_a_driver(driver: FakeDriver) -> None:
    driver.is_installed = False
    make_context_ahead("cuda")
    assert calls_after(driver) == []


@pytest.mark.parametrize(
    ("options", "how", "begins"),
    [
        ({}, {}, True),
        ({"decode_graph": "off", "prefill_graph": "off"}, {}, True),
        ({"data_parallel": 2}, {}, False),
        ({}, {"elsewhere": True}, False),
        ({}, {"compares": True}, False),
    ],
)
def test_commands_begin_where_their_engine_is_in_this_process(
    use_gpus: Any, driver: FakeDriver, options: dict[str, Any], how: dict[str, Any], begins: bool
) -> None:
    use_gpus(2)
    EngineOptions(device="cuda:1", **options).config(**how)
    assert calls_after(driver) == ["init", "context of 1"] * begins
