"""Limits of time and memory for code under test: exceeding one is an error, not a hang."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def limited(seconds: float = 30, memory: int = 2 << 30) -> Iterator[None]:
    """Raise TimeoutError after `seconds`, and MemoryError for allocations of more than `memory` bytes beyond those that
    the process has."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
