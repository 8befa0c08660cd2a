"""Runs the sweep of one model in a process of its own, so that nothing of it stays in memory for the next model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from specbatch.errors import FailedError, SpecbatchError
from specbatch.progress.bars import progress

if TYPE_CHECKING:
    from specbatch.replicas.cluster import Cluster
    from specbatch.sweeps.run.loading import Configs
    from specbatch.sweeps.run.runner import SweepOptions

Log = Callable[[str], None]


def run_in_process(
    engines: Configs,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log,
    cluster: Cluster | None = None,
) -> int:
    """Run a sweep into `folder` and return the exit status of its process: 0, 2 for a user's mistake, or 1 for another
    failure. The process logs the error.

    log: a function of a module, as it is pickled. Raises KeyboardInterrupt after the process has written its summary. A
    folder in which nothing was written is removed.
    """
    folder.mkdir(exist_ok=True)
    process = get_context("spawn").Process(target=_run, args=(dict(engines), options, folder, log, cluster))
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


def _run(engines: Configs, options: SweepOptions, folder: Path, log: Log, cluster: Cluster | None) -> None:
    # Ctrl-C in a terminal signals both processes, `kill` only the parent: this process obeys the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Thread(target=_exit_with_parent, daemon=True).start()
    try:
        from specbatch.sweeps.run.runner import run_sweep

        with progress("sweep", "requests") as report:
            run_sweep(engines, options, folder, log=log, report=report, cluster=cluster)
    except SpecbatchError as error:
        log(f"error: {'; '.join(filter(None, [str(error), error.kept]))}")
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
