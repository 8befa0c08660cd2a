"""Atomic writes of small files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Replace the contents of a file atomically: readers see the old file or the complete new one."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")
