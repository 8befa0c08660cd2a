"""Lengths of prompts and answers in tokens: one number, or a range to draw from."""

from __future__ import annotations

from specbatch.errors import at_least, refuse

Length = int | tuple[int, int]  # tokens, or least and most with a uniform distribution


def shown(length: Length) -> int | str:
    """In the form of the command line."""
    return length if isinstance(length, int) else f"{length[0]}-{length[1]}"


def check_length(name: str, length: Length) -> None:
    """Refuse a length that is not positive, or whose ends are in the wrong order, as the value of setting `name`."""
    least, most = bounds(length)
    at_least(name, least, 1)
    if most < least:
        raise refuse(name, shown(length), f"the smaller number comes first; use {most}-{least}")


def bounds(length: Length) -> tuple[int, int]:
    """Least and most tokens."""
    return (length, length) if isinstance(length, int) else length
