"""Values written as text: lists, ranges, durations, and numbers with a keyword. Parsers raise SpecbatchError."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specbatch.errors import at_least, refuse
from specbatch.files.text_files import UnreadableError, parse_json, read_text


def names(setting: str, text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def whole_numbers(setting: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise refuse(setting, text, "use whole numbers of at least 1, separated by commas: 1,8,32,128") from None


def rates(setting: str, text: str) -> float | list[float]:
    """A rate above 0, of which inf is one, or a list of several (`1,5,inf`)."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(rate > 0 for rate in found):
        raise refuse(setting, text, "use requests per second above 0, or inf, separated by commas: 1,5,inf")
    return found if len(found) > 1 else found[0]


def layers(setting: str, text: str) -> tuple[int, ...]:
    """Comma-separated layers."""
    try:
        return tuple(int(layer) for layer in text.split(","))
    except ValueError:
        raise refuse(setting, text, "write layers with commas, such as 2,18,33") from None


def length(setting: str, text: str) -> int | tuple[int, int]:
    """A number of tokens (`128`), or the smallest and the largest one (`64-256`)."""
    if found := re.fullmatch(r"(\d{1,19})-(\d{1,19})", text):
        return int(found[1]), int(found[2])
    return whole_number(setting, text, "a range such as 64-256")


def lengths(setting: str, text: str) -> int | tuple[int, int] | list[int]:
    """As `length`, or a list of several numbers (`512,1024`)."""
    return [*whole_numbers(setting, text)] if "," in text else length(setting, text)


def one_or_several(setting: str, text: str) -> str | list[str]:
    """A name, or a list of several, separated by commas."""
    return [*names(setting, text)] if "," in text else text


def whole_number(setting: str, text: str, other: str) -> int:
    """A whole number of at least 1; the error message names `other` as the alternative."""
    try:
        value = int(text)
    except ValueError:
        raise refuse(setting, text, f"use a whole number of at least 1, or {other}") from None
    at_least(setting, value, 1)
    return value


def burst_of(setting: str, text: str) -> int:
    """Requests that arrive together; 0 for `all`."""
    return 0 if text == "all" else whole_number(setting, text, "all")


def share(setting: str, text: str) -> float:
    """A share of a percentage such as 2% or 0.5%."""
    found = re.fullmatch(r"(\d{1,2}(?:\.\d{1,9})?)%", text)
    if not found or not float(found[1]):
        raise refuse(setting, text, "use a percentage above 0 and below 100, such as 2%")
    return float(found[1]) / 100


def duration(setting: str, text: str) -> float:
    """Seconds of a time such as 90s, 30m, 1h30m or 2d."""
    parts = re.fullmatch(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", text)
    seconds = [int(part or 0) for part in parts.groups()] if parts else []
    total = sum(count * unit for count, unit in zip(seconds, (86_400, 3_600, 60, 1), strict=False))
    if not total:
        raise refuse(setting, text, "use a time such as 90s, 30m or 1h30m")
    return float(total)


def read_samples(setting: str, text: str) -> dict[str, Any]:
    """The question numbers by task of --samples: JSON, or the path of a JSON file."""
    works = """use JSON or the path of a JSON file, such as '{"gsm8k": [0, 5, 7]}'"""
    written = text if text.lstrip().startswith(("{", "[")) else read_text(setting, Path(text), works)
    try:
        found = parse_json(written, unique=True)
    except UnreadableError as error:
        raise refuse(setting, text, f"{error}; {works}") from None
    if not isinstance(found, dict) or not found:
        raise refuse(setting, text, works)
    return found
