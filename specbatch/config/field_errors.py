"""Pydantic's validation errors as one line: the field, its value as JSON, and what works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from specbatch.errors import counted, shown_json

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_LONGEST = 60  # characters of a value
_NEAREST = 5  # names that may have been meant
_KINDS = {
    "str": ("a string", "strings"),
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "bool": ("true or false", "booleans"),
    "list": ("a list", "lists"),
    "dict": ("an object", "objects"),
}  # singular and plural by pydantic's name
_TYPES = {
    "string_type": "str",
    "int_type": "int",
    "int_from_float": "int",
    "int_parsing": "int",
    "float_type": "float",
    "float_parsing": "float",
    "bool_type": "bool",
    "list_type": "list",
    "dict_type": "dict",
    "model_type": "dict",
    "model_attributes_type": "dict",
}  # pydantic's names by type of error
_LIMITS = {
    "greater_than_equal": "use at least {ge}",
    "greater_than": "use a number above {gt}",
    "less_than_equal": "use at most {le}",
    "less_than": "use a number below {lt}",
    "string_too_short": "it must not be empty",
    "too_short": "use at least {min_length}, not {actual_length}",
    "too_long": "use at most {max_length} items",
    "finite_number": "use a finite number",
}
_BOUNDS = ("ge", "gt", "le", "lt")


def first_problem(
    error: ValidationError, *, prefix: str = "", names: Callable[[Sequence[int | str]], Iterable[str]] | None = None
) -> str:
    """The first problem, and how many others there are: "n=0: use at least 1", "model is missing".

    prefix   goes before the name of the field
    names    the names that are allowed in place of an unknown one, by its location; None: it should be left out
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "missing":  # an unknown name beside it may be the missing one, misspelled
        beside = (
            item for item in problems if item["type"] == "extra_forbidden" and item["loc"][:-1] == first["loc"][:-1]
        )
        first = next(beside, first)
    loc = _fields(first)
    others = len({place for item in problems if (place := _fields(item))[: len(loc)] != loc})
    field = prefix + ".".join(_name(part) for part in loc)
    more = f" ({counted(others, 'more mistake')})" if others else ""
    if first["type"] == "missing":
        return f"{field} is missing{more}"
    if first["type"] == "extra_forbidden":
        return f"{field} {_instead(str(loc[-1]), names(loc) if names else ())}{more}"
    value, works = first["input"], what_works(first, problems)
    if names and first["type"] == "model_type":
        works = f"write a table of {', '.join(names([*loc, '']))}"
    has_own_words = first["type"] == "value_error" and isinstance(value, (dict, list))
    shown = "" if has_own_words else f"={shown_json(value, _LONGEST)}"
    return f"{field}{shown}: {works}{more}" if field else f"{works}{more}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The names that are nearest to an unknown one, or else all: "did you mean n?", "use one of n, stop"."""
    listed = list(names)
    near = get_close_matches(name, listed, n=_NEAREST)
    return f"did you mean {_either(near)}?" if near else f"use one of {', '.join(listed)}"


def _either(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _instead(name: str, names: Iterable[str]) -> str:
    listed = list(names)
    return f"is unknown; {did_you_mean(name, listed)}" if listed else "is not supported; leave it out"


def what_works(first: ErrorDetails, problems: Sequence[ErrorDetails]) -> str:
    """What a field takes, by the first of its `problems`."""
    tags = [part for part in first["loc"] if _kind(part)]
    if tags:  # a union: what each of its branches takes
        place = first["loc"].index(tags[0])
        branches = [item["loc"][place] for item in problems if item["loc"][:place] == first["loc"][:place]]
        kinds = [kind for part in dict.fromkeys(branches) if (kind := _kind(part))]
        return f"use {_either(kinds)}"
    kind, context = first["type"], first.get("ctx", {})
    if kind in _TYPES:
        return f"use {_KINDS[_TYPES[kind]][0]}"
    if kind == "literal_error":
        return f"use {context['expected']}".replace("'", '"')
    if kind == "too_short" and context["min_length"] == 1:
        return _LIMITS["string_too_short"]
    if kind in _LIMITS:
        numbers = {
            name: int(value) if value == int(value) else value for name, value in context.items() if name in _BOUNDS
        }
        return _LIMITS[kind].format(**(context | numbers))
    return first["msg"].removeprefix("Value error, ").replace("Input should be", "use", 1)


def _fields(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Where a problem is, without branches of unions."""
    return tuple(part for part in problem["loc"] if not _kind(part))


def _kind(part: Any, plural: bool = False) -> str | None:
    """What a branch of a union takes ("list[int]": a list of whole numbers); None for the name of a field."""
    if not isinstance(part, str):
        return None
    if part.startswith("list[") and part.endswith("]"):
        items = _kind(part[5:-1], plural=True)
        return items and f"{_KINDS['list'][plural]} of {items}"
    return _KINDS[part][plural] if part in _KINDS else None


def _name(part: int | str) -> str:
    """A part of a field's name in printable characters."""
    return shown_json(part).strip('"') if isinstance(part, str) else str(part)
