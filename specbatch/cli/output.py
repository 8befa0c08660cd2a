"""What commands share: an engine that says what it does, a fresh folder, a table for people, a line for machines."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from specbatch.config import EngineConfig
from specbatch.errors import SpecbatchError, refuse
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine


RUN_HELP = "A folder of sweep, bench, eval or check, a part of one, or OUT.jsonl of generate."


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """An engine whose plan, and progress in recording graphs, go to standard error."""
    from specbatch.engine.engine import Engine

    with progress("graphs") if config.graphs.any else nullcontext() as report:
        engine = Engine(config, log=say, report=report)
    with engine:
        yield engine


@contextmanager
def fresh_folder(asked: Path | None, command: str, *, resumes: str | None = None) -> Iterator[Path]:
    """Create and yield `asked`, or a new `out/COMMAND-TIME`; a folder that holds something is refused, but for files
    like `resumes` (a pattern of the shell), which an interrupted run has left.

    What was created and is still empty when the command ends (it was refused later) is removed again.
    """
    folder = asked or _unused(Path("out") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}")
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two runs must not mix their results
        taken = any(not fnmatch(path.name, resumes or "") for path in folder.iterdir())
        TemporaryFile(dir=folder).close()  # an unwritable place is found now, not after the run
    except BlockingIOError:
        os.close(claim)
        raise refuse("output", str(folder), "another run is writing to it; name a new one") from None
    except OSError as error:
        os.close(claim)
        raise _unwritable(folder, error) from error
    if taken:
        os.close(claim)
        raise refuse("output", str(folder), "this folder is not empty; name a new one, nothing is ever overwritten")
    try:
        yield folder
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()
        os.close(claim)


def _unwritable(folder: Path, error: OSError) -> SpecbatchError:
    return refuse("output", str(folder), f"cannot be written ({error.strerror}); name a folder that can")


def _unused(folder: Path) -> Path:
    """`folder`, or with -2, -3 ... behind it: two runs may start within one second."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 100)))
    return next((name for name in names if not name.exists()), folder)


def say(line: str) -> None:
    """A line for people while work goes on: standard error, so that standard output stays clean."""
    print(line, file=sys.stderr, flush=True)


def show(text: str, result: dict[str, Any], *, as_json: bool) -> None:
    """Print the table, or with --json nothing but one JSON line."""
    print(json.dumps(result) if as_json else text, flush=True)


def rows_table(rows: Sequence[Mapping[str, Any]], *, without: str) -> str:
    """Rows with the same keys as a table titled by them, one key (too wide for people) left out."""
    from tabulate import tabulate

    shown = [{key: value for key, value in row.items() if key != without} for row in rows]
    return tabulate(shown, headers="keys", tablefmt="github")
