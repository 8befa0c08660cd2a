"""`SpecbatchError`, the exception for a user's mistake: a setting, its value, and what would work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class SpecbatchError(ValueError):
    """A request that cannot be served. Commands print the message and exit with status 2.

    The message is one line, or several if a file has several bad lines.

    setting, value, works: the setting that the error is about, its value and what would work; None if it is about no
    single setting
    """

    def __init__(
        self, message: str, *, setting: str | None = None, value: object = None, works: str | None = None
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value
        self.works = works


def refuse(setting: str, value: object, works: str) -> SpecbatchError:
    """The error for `setting` having `value`; `works` says what would be accepted, and why."""
    return SpecbatchError(f"{setting}={value!r}: {works}", setting=setting, value=value, works=works)


def at_least(setting: str, value: object, least: int) -> None:
    """Refuse a `setting` that is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(setting, value, f"use a whole number of at least {least}")


def each_once(setting: str, values: Sequence[object]) -> None:
    """Refuse a `setting` without values, and one with the same value twice."""
    if not values:
        raise refuse(setting, "", "name at least one")
    for value in values:
        if values.count(value) > 1:
            raise refuse(setting, ",".join(map(str, values)), f"{value} is given twice")


@contextmanager
def of_draft(draft: str) -> Iterator[None]:
    """Attribute errors inside to the setting `draft`: drafts are opened by the code that opens models."""
    try:
        yield
    except SpecbatchError as error:
        if error.setting in ("draft", "algorithm"):
            raise
        if error.setting == "model" and error.works is not None:
            raise refuse("draft", error.value, error.works) from error.__cause__
        raise refuse("draft", draft, str(error)) from None  # about a key of its config
