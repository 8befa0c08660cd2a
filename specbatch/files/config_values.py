"""Typed reads of single values of a model's config.json. A value of another type or range is refused by its key.

The default replaces a missing or null value; without a default the value is required. `where` names the enclosing
table, for the error message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from specbatch.errors import refuse

_COUNTS = 2**31 - 1  # what int32 holds
_TINY, _HUGE = 1e-30, 1e30  # beyond these, sums and products overflow or underflow float32
_WRITTEN = {"Infinity": math.inf, "-Infinity": -math.inf}  # transformers 5 writes {"__float__": "Infinity"}


def spelled(config: dict[str, Any], *keys: str) -> str:
    """The first of several synonymous keys that has a value; the first key if none has."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def table_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The table under `key`; empty where it is missing or null."""
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise refuse(key, found, "the config must give a table")
    return found


def token_ids(config: dict[str, Any], key: str) -> tuple[int, ...]:
    """Token ids under `key`, which may be missing, null, one number or a list; duplicates are dropped."""
    found = config.get(key)
    listed = [] if found is None else found if isinstance(found, list) else [found]
    if not all(_is_count(token, 0) for token in listed):
        raise refuse(key, found, "token ids are whole numbers from 0")
    return tuple(dict.fromkeys(listed))


def count_of(
    config: dict[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = _COUNTS
) -> int:
    """The whole number under `key`, from `least` to `most`."""
    value: Any = config.get(key)
    if value is None and default is not None:
        return default
    if not _is_count(value, least, most):
        numbers = "a positive whole number" if least == 1 else f"a whole number from {least}"
        raise refuse(key, value, f"the config must give {numbers}{'' if most == _COUNTS else f' up to {most}'}")
    return int(value)


def positive_of(
    config: dict[str, Any], key: str, default: float | None = None, *, most: float = _HUGE, where: str = ""
) -> float:
    """The positive number under `key`, up to `most`."""
    value: Any = config.get(key)
    if value is None and default is not None:
        return default
    if not _is_number(value, _TINY, most):
        limit = "" if most == _HUGE else f" up to {most:g}"
        raise refuse(f"{where}.{key}".lstrip("."), value, f"the config must give a positive number{limit}")
    return float(value)


def flag_of(config: dict[str, Any], key: str, default: bool = False) -> bool:
    """The boolean under `key`."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(key, value, "use true or false")
    return value


def names_of(config: dict[str, Any], key: str) -> list[str] | None:
    """The list of strings under `key`; None if it is missing or null."""
    return _listed(config, key, "names", lambda item: isinstance(item, str))


def places_of(config: dict[str, Any], key: str) -> list[int] | None:
    """The list of whole numbers from 0 under `key`; None if it is missing or null."""
    return _listed(config, key, "whole numbers from 0", lambda item: _is_count(item, 0))


def positives_of(config: dict[str, Any], key: str) -> list[float] | None:
    """The list of positive numbers under `key`; None if it is missing or null."""
    return _listed(config, key, "positive numbers", lambda item: _is_number(item, _TINY, _HUGE))


def limits_of(config: dict[str, Any], key: str) -> tuple[float, float] | None:
    """The lower and upper limit under `key`, of which the upper may be infinite; None if missing or null."""
    found = config.get(key)
    if found is None:
        return None
    listed = [_written(item) for item in found] if isinstance(found, list) else []
    if len(listed) != 2 or not all(_is_number(item, -math.inf, math.inf) for item in listed):
        raise refuse(key, found, "the config must list two numbers")
    return listed[0], listed[1]


def _listed(config: dict[str, Any], key: str, works: str, fits: Callable[[Any], bool]) -> list[Any] | None:
    found = config.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(map(fits, found)):
        raise refuse(key, found, f"the config must list {works}")
    return found


def _is_count(value: Any, least: int, most: int = _COUNTS) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    """NaN and booleans are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _written(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    text = item.get("__float__")
    return _WRITTEN.get(text) if isinstance(text, str) else None
