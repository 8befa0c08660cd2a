"""Single values of a config.json: of the kind that is expected, or refused by their key."""

from __future__ import annotations

import math
from typing import Any

from specbatch.errors import refuse


def table_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The table under `key`, which may be missing or null."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise refuse(key, found, "the config must give a table")
    return found


def token_ids(config: dict[str, Any], key: str) -> tuple[int, ...]:
    """Token ids under `key`, which may be missing, null, one number or a list; duplicates are dropped."""
    found = config.get(key)
    listed = [] if found is None else found if isinstance(found, list) else [found]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise refuse(key, found, "token ids are whole numbers from 0")
    return tuple(dict.fromkeys(listed))


def count_of(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive whole number under `key`; default: where it is missing or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(key, value, "the config must give a positive whole number")
    return value


def positive_of(config: dict[str, Any], key: str, where: str = "", default: float | None = None) -> float:
    """The positive number under `key`; where: the table that it stands in, for a refusal."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise refuse(f"{where}.{key}".lstrip("."), value, "the config must give a positive number")
    return float(value)


def flag_of(config: dict[str, Any], key: str) -> bool:
    """What is under `key`, which may be missing or null: false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refuse(key, value, "the config must say true or false")
    return bool(value)
