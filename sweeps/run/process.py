"""Runs the configurations of one model in a process of its own, so that nothing of it stays in memory for the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from specbatch.errors import WORDING, FailedError, SpecbatchError, Wording
from specbatch.progress.bars import progress

Log = Callable[[str], None]


@contextmanager
def naming(model: str, *, log: Log) -> Iterator[None]:
    """Say which of several models is refused before any of them runs."""
    try:
        yield
    except SpecbatchError:
        if model:
            log(f"{model} cannot run; nothing has begun")
        raise


def run_in_process(run: Callable[..., Any], folder: Path, *, log: Log, label: str) -> int:
    """Call `run(folder=, log=, report=)` and return the exit status of its process: 0, 2 for a user's mistake, or 1 for
    another failure. The process logs the error.

    run, log: pickled, so functions of a module, or `partial` of one. label: of the progress. Raises KeyboardInterrupt
    after the process has written its summary. A folder in which nothing was written is removed.
    """
    folder.mkdir(exist_ok=True)
    process = get_context("spawn").Process(target=_run, args=(run, folder, log, label, WORDING.get()))
    process.start()
    stopped = False
    while process.exitcode is None:
        try:
            process.join()
        except KeyboardInterrupt:
            stopped = True
            process.terminate()  # the process writes its summary first; a second signal ends it at once
    with suppress(OSError):  # it is not empty
        folder.rmdir()
    if stopped:
        kept = f"finished points are kept in {folder.parent}; the same command with this --out continues"
        raise KeyboardInterrupt(*[kept] if any(folder.parent.iterdir()) else [])
    return process.exitcode


def _run(run: Callable[..., Any], folder: Path, log: Log, label: str, words: Wording) -> None:
    # Ctrl-C in a terminal signals both processes, `kill` only the parent: this process obeys the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Thread(target=_exit_with_parent, daemon=True).start()
    WORDING.set(words)
    try:
        with progress(label, "requests") as report:
            run(folder=folder, log=log, report=report)
    except SpecbatchError as error:
        log(f"error: {'; '.join(filter(None, [words.message(error), error.kept]))}")
        raise SystemExit(1 if isinstance(error, FailedError) else 2) from None
    except KeyboardInterrupt as stop:
        for line in stop.args:
            log(f"{folder.name}: {line}")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a KeyboardInterrupt from here on would print a traceback


def _exit_with_parent() -> None:
    """If the parent is killed and started again, this process must not measure at the same time as the new one."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
