"""The one exception for a user's mistake: a setting, its value, and what would work."""

from __future__ import annotations


class SpecbatchError(ValueError):
    """What was asked cannot be run. The message is one line; commands print it and exit with status 2."""


def at_least(setting: str, value: object, least: int) -> None:
    """Refuse a `setting` that is no whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(setting, value, f"use a whole number of at least {least}")


def refuse(setting: str, value: object, works: str) -> SpecbatchError:
    """Build the error for `setting` having `value`, where `works` says what would be accepted (and why)."""
    return SpecbatchError(f"{setting}={value!r}: {works}")
