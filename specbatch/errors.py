"""The one exception for a user's mistake: a setting, its value, and what would work."""

from __future__ import annotations


class SpecbatchError(ValueError):
    """What was asked cannot be run. The message is one line; commands print it and exit with status 2."""


def refuse(setting: str, value: object, works: str) -> SpecbatchError:
    """Build the error for `setting` having `value`, where `works` says what would be accepted (and why)."""
    return SpecbatchError(f"{setting}={value!r}: {works}")
