"""The one exception for a user's mistake: a setting, its value, and what would work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpecbatchError(ValueError):
    """What was asked cannot be run. The message is one line, or one more for each of
    several bad lines of a file; commands print it and exit with status 2.

    setting: what it is about, where it is about one.
    """

    setting: str | None = None


def at_least(setting: str, value: object, least: int) -> None:
    """Refuse a `setting` that is no whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(setting, value, f"use a whole number of at least {least}")


def refuse(setting: str, value: object, works: str) -> SpecbatchError:
    """Build the error for `setting` having `value`, where `works` says what would be accepted (and why)."""
    error = SpecbatchError(f"{setting}={value!r}: {works}")
    error.setting = setting
    return error


@contextmanager
def of_draft(draft: str) -> Iterator[None]:
    """What opens models opens drafts, too: what is refused of one inside is of the setting `draft`."""
    try:
        yield
    except SpecbatchError as error:
        if error.setting in ("draft", "algorithm"):
            raise
        if error.setting != "model":  # a key of its config
            raise refuse("draft", draft, str(error)) from None
        error.args = (f"draft{str(error).removeprefix('model')}",)
        error.setting = "draft"
        raise
