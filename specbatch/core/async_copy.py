"""Copies between host and device that do not block the host, and a timer of device work."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make it the current device, which streams, events and Triton launches use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, with everything that it launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class StepTimer:
    """Device time of a decode step, and of the gap between it and the previous one."""

    def __init__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._done = torch.cuda.Event(enable_timing=True)
        self._previous: torch.cuda.Event | None = None
        self._begun.record()

    @classmethod
    def begin(cls, device: torch.device) -> StepTimer | None:
        """Start a timer; only CUDA devices have one."""
        return cls() if device.type == "cuda" else None

    def end(self, previous: StepTimer | None) -> None:
        """Stop it. `previous`: the timer of the step before, if nothing was launched between them."""
        self._done.record()
        if previous is not None:
            self._previous = previous._done

    @property
    def follows(self) -> bool:
        """Was nothing launched between the previous step and this one?"""
        return self._previous is not None

    def seconds(self) -> tuple[float, float | None]:
        """(step, gap before it or None). The step must be over."""
        gap = None if self._previous is None else self._previous.elapsed_time(self._begun) / 1000
        return self._begun.elapsed_time(self._done) / 1000, gap


class AsyncCopy:
    """Tensors on their way to the host, copied on a stream of their own after the work that makes them."""

    def __init__(self, *tensors: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._host = tensors
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host = tuple(
                torch.empty(item.shape, dtype=item.dtype, pin_memory=True).copy_(item, non_blocking=True)
                for item in tensors
            )
            self._event = torch.cuda.Event()
            self._event.record(stream)
        for item in tensors:
            item.record_stream(stream)

    def ready(self) -> bool:
        """Has the copy arrived, so that `wait` returns at once?"""
        return self._event is None or self._event.query()

    def wait(self) -> list[Any]:
        """The values as nested lists, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [item.tolist() for item in self._host]
