"""Counts and lists in messages: "1 request", "2 requests"; "a", "a and b", "a, b and c"."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """The number with the noun, whose plural is with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[object]) -> str:
    """The words with commas, and "and" before the last one."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
