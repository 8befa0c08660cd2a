"""Parsers for option values that Typer has no type for: lists, ranges, and numbers with a keyword."""

from __future__ import annotations

import re

import typer

from specbatch.errors import at_least, refuse


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave option `name` on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def whole_numbers(setting: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise refuse(setting, text, "use whole numbers of at least 1, separated by commas: 1,8,32,128") from None


def length(setting: str, text: str) -> int | tuple[int, int]:
    """A number of tokens (`128`), or the smallest and the largest one (`64-256`)."""
    if found := re.fullmatch(r"(\d+)-(\d+)", text):
        return int(found[1]), int(found[2])
    return whole_number(setting, text, "a range such as 64-256")


def whole_number(setting: str, text: str, other: str) -> int:
    """A whole number of at least 1; the error message names `other` as the alternative."""
    try:
        value = int(text)
    except ValueError:
        raise refuse(setting, text, f"use a whole number of at least 1, or {other}") from None
    at_least(setting, value, 1)
    return value
