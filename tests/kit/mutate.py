"""Seeded mutators of bytes, text and JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

DEEP = "<deeply nested lists>"
# Values that break code which believes a file: extremes, other types, special floats, control characters, deep nesting.
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**20, 10**400, 0.0, -0.0, 1e-300, 1e308, math.nan, math.inf,
    -math.inf, "", " ", "\x00", "\ud800", "\u202e", "a" * 10_000, "../../etc/passwd", "nan", "1e999", [], {}, [[]],
    [None], {"": None}, [1] * 1_000, DEEP,
]  # fmt: skip


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """One to four changes: flipped bits, inserted, removed, repeated or swapped ranges, a cut end."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(out) + 1)
        size = random.choice((1, 1, 2, 4, 8, 64))
        match random.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << random.randrange(8)
            case 1:
                out[at : at + size] = random.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * size
            case 2:
                out[at:at] = random.randbytes(size)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size]
            case _:
                del out[at:]
    return bytes(out)


def mutate_json_text(random: Random, data: bytes) -> bytes:
    """Broken bytes, or a valid document with a hostile value somewhere."""
    if random.random() < 0.3:
        return mutate_bytes(random, data)
    return dump_json(mutate_value(random, json.loads(data))).encode("utf-8", "surrogatepass")


def dump_json(value: Any) -> str:
    """JSON with NaN and Infinity, integers of any length and, for `DEEP`, 100,000 nested lists."""
    return json.dumps(value, ensure_ascii=False).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)


def mutate_value(random: Random, value: Any) -> Any:
    """A copy of a JSON value with one to three places replaced, removed, renamed or nested deeply."""
    for _ in range(random.randint(1, 3)):
        value = _change(random, value, _places(value))
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON value, itself included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def _change(random: Random, value: Any, places: list[tuple[Any, ...]]) -> Any:
    path = random.choice(places)
    change = random.choice((_replaced, _replaced, _replaced, _removed, _nested, _doubled))
    return _at(value, path, lambda item: change(random, item))


_GONE = object()


def _at(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which the item at `path` is changed, or removed."""
    if not path:
        changed = change(value)
        return None if changed is _GONE else changed
    copied = dict(value) if isinstance(value, dict) else list(value)
    item = _at_child(copied[path[0]], path[1:], change)
    if item is _GONE:
        del copied[path[0]]
    else:
        copied[path[0]] = item
    return copied


def _at_child(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    return change(value) if not path else _at(value, path, change)


def _replaced(random: Random, item: Any) -> Any:
    if isinstance(item, int) and not isinstance(item, bool) and random.random() < 0.3:
        return item + random.choice((-1, 1, 10**6))
    return random.choice(HOSTILE)


def _removed(random: Random, item: Any) -> Any:
    return _GONE


def _nested(random: Random, item: Any) -> Any:
    for _ in range(random.choice((1, 3, 30))):
        item = [item] if random.random() < 0.5 else {"a": item}
    return item


def _doubled(random: Random, item: Any) -> Any:
    return [item, item]
