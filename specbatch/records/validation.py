"""Validates values of files against their schemas: whatever is wrong is refused with the field and its value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specbatch.config.field_errors import first_problem
from specbatch.errors import refuse
from specbatch.files.text_files import UnreadableError, open_regular, parse_json

T = TypeVar("T", bound=BaseModel)


def checked(setting: str, where: str, model: type[T], value: Any, works: str) -> T:
    """The value as a `model`. Raises SpecbatchError for `setting` with the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise refuse(setting, where, f"{first_problem(error)}; {works}") from None


def read_rows(setting: str, path: Path, model: type[T], works: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, each checked. Raises SpecbatchError with the line that is wrong."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(setting, f"{path}:{number}", model, line, works)
    except (UnreadableError, OSError) as error:
        reason = error if isinstance(error, UnreadableError) else f"cannot be read ({error.strerror})"
        raise refuse(setting, str(path), f"{reason}; {works}") from None


def _row(setting: str, where: str, model: type[T], line: bytes, works: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = parse_json(line)
    except UnreadableError as error:
        raise refuse(setting, where, f"{error}; {works}") from None
    checked(setting, where, model, row, works)
    return row
