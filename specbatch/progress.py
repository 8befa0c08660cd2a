"""Progress on standard error: a bar with the remaining time or, without a terminal, one line per minute."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Report = Callable[[int, int], None]  # (done, total)
SECONDS_BETWEEN_LINES = 60.0
SECONDS_OF_SPEED = 10.0


class NotedReport(Protocol):
    """A `Report` with an optional note, such as a speed."""

    def __call__(self, done: int, total: int, note: str = "", /) -> None: ...


class Stages:
    """One progress of stages that follow each other, each of which is known when it begins. A call reports that of the
    current stage."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._before = self._total = 0

    def begin(self) -> None:
        """Begin another stage."""
        self._before, self._total = self._before + self._total, 0

    def __call__(self, done: int, total: int) -> None:
        self._total = total
        self._report(self._before + done, self._before + total)


@contextmanager
def progress(label: str, done: int = 0) -> Iterator[NotedReport]:
    """Yield a function to call with (done, total), as often as needed.

    done   what an earlier run had finished; it does not count for the remaining time
    """
    if not sys.stderr.isatty():
        yield _lines(label, done)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, completed=done, note="")

        def report(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield report


class Speed:
    """The speed of a token stream: tokens per second over the last 10 seconds, and the number of running requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0  # in `_recent`
        self._running: set[int] = set()

    def add(self, index: int, tokens: int, *, ended: bool) -> None:
        """Count new tokens of request `index`."""
        now = self._clock()
        if self._recent and now - self._recent[-1][0] < SECONDS_OF_SPEED / 100:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + tokens)
        else:
            self._recent.append((now, tokens))
            self._forget(now)
        self._tokens += tokens
        (self._running.discard if ended else self._running.add)(index)

    def __str__(self) -> str:
        now = self._clock()
        since = max(self._start, now - SECONDS_OF_SPEED)
        self._forget(now)
        rate = self._tokens / (now - since) if now > since else 0.0
        return f"{rate:.0f} tok/s, {len(self._running)} running"

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - SECONDS_OF_SPEED:
            self._tokens -= self._recent.popleft()[1]


def _lines(label: str, before: int) -> NotedReport:
    start = last = time.monotonic()

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        new = done - before
        left = f", about {(now - start) / new * (total - done):.0f} s left" if new > 0 else ""
        more = f", {note}" if note else ""
        print(f"{label}: {done}/{total} after {now - start:.0f} s{left}{more}", file=sys.stderr, flush=True)

    return report
