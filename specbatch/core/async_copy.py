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
    """Device time of a decode step or a prefill pass, and of the gap between it and what was launched before it."""

    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self._begun = torch.cuda.Event(enable_timing=True)
        self._done = torch.cuda.Event(enable_timing=True)
        self._previous: StepTimer | None = None
        self._begun.record()

    @classmethod
    def begin(cls, device: torch.device, *, is_prefill: bool = False) -> StepTimer | None:
        """Start a timer; only CUDA devices have one."""
        return cls(is_prefill) if device.type == "cuda" else None

    def end(self, previous: StepTimer | None) -> None:
        """Stop it. `previous`: the timer of the step or pass before, if nothing was launched between them."""
        self._done.record()
        self._previous = previous

    @property
    def follows(self) -> bool:
        """Was nothing launched between the previous decode step and this one?"""
        return self._previous is not None and not self._previous.is_prefill

    def seconds(self) -> tuple[float, float | None]:
        """(step or pass, gap before it or None), once. It must be over."""
        previous, self._previous = self._previous, None  # each keeps the one before it
        gap = None if previous is None else previous._done.elapsed_time(self._begun) / 1000
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
