"""`SpecbatchError`, the error for a user's mistake: a setting, its value, and what would work; words in messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

MOST = 2**31 - 1  # the largest count, length or number of a setting: what an int32 holds
MOST_SEED = 2**63 - 1
_LONGEST_ADVICE = 1_000  # characters


class SpecbatchError(ValueError):
    """A request that cannot be served. Commands print the message and exit with status 2.

    The message is one line, or several if a file has several bad lines.

    setting, value, works: the setting that the error is about, its value and what would work; None if it is about no
    single setting
    """

    kept: str | None = None  # what is finished and how to continue, if a command knows it
    configuration: str | None = None  # the one of several that it is about

    def __init__(
        self, message: str, *, setting: str | None = None, value: object = None, works: str | None = None
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value
        self.works = works


class FailedError(SpecbatchError):
    """Something else than the user has failed, such as a process that was killed. Commands exit with status 1."""


class ChangedError(SpecbatchError):
    """A file was changed or removed by something else while a command read or wrote it."""


class ShortOfMemoryError(SpecbatchError):
    """Memory ran out, and the engine cannot go on with a smaller batch.

    smaller: settings of an engine with which the launch that failed would be half as large, if it can be
    """

    def __init__(self, message: str, smaller: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.smaller = dict(smaller or {})


def refuse(setting: str, value: object, works: str) -> SpecbatchError:
    """The error for `setting` having `value`; `works` says what would be accepted, and why. The message is one line, in
    which long values are shortened."""
    return _refusal(setting, value, shown(value), works)


def refuse_json(setting: str, value: object, works: str) -> SpecbatchError:
    """`refuse` for a value of a JSON or TOML file: the message has it as it is written there (`true`, `null`)."""
    return _refusal(setting, value, shown_json(value), works)


def _refusal(setting: str, value: object, text: str, works: str) -> SpecbatchError:
    line = f"{_shortened(setting)}={text}: {_shortened(works, _LONGEST_ADVICE)}"
    return SpecbatchError(" ".join(line.splitlines()), setting=setting, value=value, works=works)


def one_line(error: BaseException) -> str:
    """The first line of an error, after its type unless the message is for users."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, SpecbatchError) else f"{type(error).__name__}: {line}"


class Wording(Protocol):
    """Names of settings in messages: fields in Python, flags on the command line, keys in files of configurations."""

    def message(self, error: SpecbatchError) -> str:
        """Of an error that ends a command."""

    def reason(self, error: SpecbatchError) -> str:
        """Why a configuration fails, beside its name."""


class Fields:
    """The wording of Python."""

    def message(self, error: SpecbatchError) -> str:
        return str(error)

    reason = message


WORDING: ContextVar[Wording] = ContextVar("wording", default=Fields())  # noqa: B039


@contextmanager
def about(configuration: str) -> Iterator[None]:
    """Attribute errors inside to a configuration."""
    try:
        yield
    except SpecbatchError as error:
        error.configuration = configuration
        raise


def reason_of(configuration: str, error: BaseException) -> str:
    """Why a configuration fails: `one_line` in the words of the interface through which it was given."""
    if not isinstance(error, SpecbatchError):
        return one_line(error)
    error.configuration = configuration
    return next(iter(WORDING.get().reason(error).splitlines()), "")


def shown(value: object) -> str:
    """The `repr` of a value, shortened if it is long."""
    try:
        return _shortened(repr(value))
    except (ValueError, RecursionError):  # a number with thousands of digits; lists in lists
        return f"<{type(value).__name__}>"


def shown_json(value: object, longest: int = 400) -> str:
    """The JSON of a value in printable characters, shortened if it is long; other values than JSON's as in `shown`."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        return _shortened(text if text.isprintable() else json.dumps(value), longest)
    except (TypeError, ValueError, RecursionError):
        return shown(value)


def _shortened(text: str, longest: int = 400) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]}...{text[-longest // 2 :]}"


def at_least(setting: str, value: object, least: int) -> None:
    """Refuse a `setting` that is not an integer of at least `least` and at most `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise refuse(setting, value, f"use a whole number of at least {least} and at most {MOST}")


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


@contextmanager
def reporting(kept: Callable[[], str]) -> Iterator[None]:
    """Add what is kept, and how to continue, to an interruption or failure of the block, and to an error of reading
    or writing."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*stop.args or (kept(),)) from None
    except (FailedError, ChangedError, ShortOfMemoryError) as error:
        if error.kept is None:
            error.kept = kept()
        raise
    except OSError as error:
        error.add_note(kept())
        raise


def counted(number: int, noun: str) -> str:
    """The number with the noun, whose plural is with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[object]) -> str:
    """The words with commas, and "and" before the last one."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
