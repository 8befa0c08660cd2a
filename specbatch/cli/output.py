"""Helpers of commands: open an engine, create the output folder, print tables and JSON."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from specbatch.cli.terminal import print_markdown
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse
from specbatch.files.atomic_file import is_leftover, remove_all_leftovers, writing
from specbatch.progress.bars import progress

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine
    from specbatch.engine.interface import InferenceEngine
    from specbatch.replicas.cluster import Cluster


RUN_HELP = (
    "A folder of sweep, bench, eval or check, a part of one, OUT.jsonl of generate, or a folder of another engine that "
    "lm-eval has written."
)


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """An engine that logs its memory plan and its progress in loading and recording graphs to standard error."""
    from specbatch.engine.engine import Engine

    with progress("starting", "steps") as report:
        engine = Engine(config, log=say, report=report)
    with engine:
        yield engine


@contextmanager
def open_replicas(config: EngineConfig, cluster: Cluster | None = None) -> Iterator[InferenceEngine]:
    """As `open_engine`, with as many replicas as the configuration has, on this machine or on a cluster."""
    from specbatch.replicas.engine import engine_of
    from specbatch.replicas.ray_actors import connected_actors

    with nullcontext() if cluster is None else connected_actors(config, cluster) as starter:
        with progress("starting", "steps") as report:
            engine = engine_of(config, log=say, report=report, starter=starter)
        with engine:
            yield engine


@contextmanager
def fresh_folder(output: Path | None, command: str, *, resumes: str | None = None) -> Iterator[Path]:
    """Create and yield the folder `output`, or a new `out/COMMAND-TIME`.

    A folder that is not empty is an error, except for files that match the shell pattern `resumes`, left by an
    interrupted run. A folder that was created here and is empty at the end, after an error, is removed.
    """
    folder = output or _unused(Path("out") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}")
    with writing(folder):
        existed = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        claim = os.open(folder, os.O_RDONLY)
    try:
        _check_claim(folder, claim, resumes)
    except BaseException:
        os.close(claim)
        raise
    try:
        yield folder
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()
        os.close(claim)


@contextmanager
def derived_folder(output: Path, command: str) -> Iterator[Path]:
    """`fresh_folder` for files that are made from others in a moment: if that fails they are removed, so that the same
    command can be run again."""
    with fresh_folder(output, command) as folder:
        try:
            yield folder
        except BaseException:
            for path in folder.iterdir():
                path.unlink()
            raise


def _check_claim(folder: Path, claim: int, resumes: str | None) -> None:
    """Lock the folder, opened as `claim`. Refused: one that another run is writing to, that holds other files than
    `resumes`, or that is not writable."""
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two runs must not mix their results
    except BlockingIOError:
        raise refuse("output", str(folder), "another run is writing to it; name a new one") from None
    with writing(folder):
        taken = any(not (fnmatch(path.name, resumes or "") or is_leftover(path)) for path in folder.iterdir())
        TemporaryFile(dir=folder).close()  # fail now if the folder is not writable
    if taken:
        raise refuse("output", str(folder), "this folder is not empty; name a new one (results are never overwritten)")
    remove_all_leftovers(folder)  # of a run that was killed while it wrote


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that is free: two runs may start in the same second."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 100)))
    return next((name for name in names if not name.exists()), folder)


def say(line: str) -> None:
    """Log a line to standard error; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


def show(text: str, result: dict[str, Any], *, as_json: bool, kept: str | None = None) -> None:
    """Print Markdown, or with --json one JSON line instead.

    kept: the file or folder that has all results. If standard output is full, or a pipe whose reader has gone, this is
    reported, and the command does not fail. Without one, a full disk is an error, and a reader that has gone is not: it
    has read what it wanted.
    """
    try:
        if as_json:
            print(json.dumps(result), flush=True)
        else:
            print_markdown(text)
    except OSError as error:
        if kept is None and not isinstance(error, BrokenPipeError):
            raise
        with suppress(OSError):  # what is buffered would fail again at exit
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        if kept is not None:
            say(f"note: standard output cannot be written ({error.strerror}); {kept} is complete")


def results(folder: Path, *, wide: bool) -> str:
    """The last line of a command with a decision table: where the rest of its columns are."""
    return (
        f"results: {folder}" if wide else f"results: {folder} (summary.md and summary.csv have all columns, as --wide)"
    )


def rows_table(rows: Sequence[Mapping[str, Any]], *, without: str) -> str:
    """Rows as a table with their keys as headings, except the key `without`."""
    from tabulate import tabulate

    shown = [{key: value for key, value in row.items() if key != without} for row in rows]
    return tabulate(shown, headers="keys", tablefmt="github")
