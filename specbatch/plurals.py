"""Counts in messages: "1 request", "2 requests"."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with the noun, whose plural is with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
