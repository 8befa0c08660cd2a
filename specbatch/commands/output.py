"""Where a command's results go: a fresh folder, a table for people, one line for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specbatch.errors import refuse


def fresh_folder(asked: Path | None, command: str) -> Path:
    """Create and return `asked`, or a new `out/COMMAND-TIME`. A folder that holds something is refused."""
    folder = asked or Path("out") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
        (probe := folder / ".writable").touch()
        probe.unlink()
    except OSError as error:
        raise refuse(
            "output", str(folder), f"cannot be written ({error.strerror}); name a folder that can"
        ) from error
    if taken:
        raise refuse(
            "output", str(folder), "this folder is not empty; name a new one, results are never overwritten"
        )
    return folder


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
