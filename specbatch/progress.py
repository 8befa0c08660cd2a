"""Progress on standard error: a bar with the time left or, without a terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]  # (done, total)
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str) -> Iterator[Report]:
    """Yield a function to call with (done, total) as often as one likes."""
    if not sys.stderr.isatty():
        yield _lines(label)
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
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(label: str) -> Report:
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = f", about {(now - start) / done * (total - done):.0f} s left" if 0 < done < total else ""
        print(f"{label}: {done}/{total} after {now - start:.0f} s{left}", file=sys.stderr, flush=True)

    return report
