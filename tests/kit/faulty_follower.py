"""A process of another rank with a fault, in place of `engine.ranks.follower`. FAULT names it: see `FAULTS`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.prefill import PrefillStep
from specbatch.engine.ranks import follower
from specbatch.engine.setup import builder


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise error

    return call


def _later(function: Callable[..., Any], calls: int, fault: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with a fault after so many calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            fault()
        return function(*args, **kwargs)

    return call


def start() -> None:
    sys.exit(3)


def join() -> None:
    follower.join_group = _raising(ValueError("no peer access"))


def load() -> None:
    builder._load = _raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def capture() -> None:
    builder.record_graphs = _raising(RuntimeError("operation not permitted when stream is capturing"))


def launch() -> None:
    DeviceWorker.decode = _later(DeviceWorker.decode, 20, _raising(ValueError("index out of range")))  # type: ignore[method-assign]


def memory() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    DeviceWorker.decode = _later(DeviceWorker.decode, 20, _raising(error))  # type: ignore[method-assign]


def memory_of_prompts() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    PrefillStep.__call__ = _raising(error)  # type: ignore[method-assign]


def stop() -> None:
    def stopped() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    DeviceWorker.decode = _later(DeviceWorker.decode, 20, stopped)  # type: ignore[method-assign]


def kill() -> None:
    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    PrefillStep.__call__ = _later(PrefillStep.__call__, 3, killed)  # type: ignore[method-assign]


FAULTS = {
    function.__name__: function
    for function in (start, join, load, capture, launch, memory, memory_of_prompts, stop, kill)
}

if __name__ == "__main__":
    FAULTS[os.environ["FAULT"]]()
    follower.main()
