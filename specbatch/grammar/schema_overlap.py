"""Whether two JSON schemas can accept the same value, as types, literals, bounds and required properties show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.config.settings import is_number

KINDS: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
_CHOICES = ("anyOf", "oneOf")
_DEEPEST = 12  # schemas in each other


def are_disjoint(
    one: Any, other: Any, resolve: Callable[[Any], Any], spend: Callable[[int], None], depth: int = _DEEPEST
) -> bool:
    """Whether no value is accepted by both; False where that is not shown. resolve: follows references
    and merges `allOf`. spend: called with a number of values before they are compared. Both raise an error if it is too
    much."""
    if not depth:
        return False
    one, other = resolve(one), resolve(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    for first, second in ((one, other), (other, one)):
        if (options := _options(first)) is not None:
            return all(are_disjoint(option, second, resolve, spend, depth - 1) for option in options)
    for first, second in ((one, other), (other, one)):
        if (values := _values(first)) is not None:
            spend(len(values) * len(_values(second) or ()))
            return not any(_may_accept(second, value) for value in values)
    return all(_differ(kind, one, other, resolve, spend, depth) for kind in _kinds(one) & _kinds(other))


def _options(schema: dict[str, Any]) -> list[Any] | None:
    return next((schema[name] for name in _CHOICES if isinstance(schema.get(name), list)), None)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """All values that a schema may accept, None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of values that a schema may accept: an integer is a number."""
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated] if isinstance(stated, str) else [*KINDS, "number"]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _may_accept(schema: dict[str, Any], value: Any) -> bool:
    if (values := _values(schema)) is not None:
        return value in values
    if is_number(value):
        low, high = _interval(schema)
        return "number" in _kinds(schema) and low <= value <= high
    return any(isinstance(value, KINDS[kind]) for kind in _kinds(schema) & KINDS.keys())


def _interval(schema: dict[str, Any]) -> tuple[float, float]:
    """Bounds of its numbers; whether they are exclusive is left out of account."""
    given = {name: value for name, value in schema.items() if "imum" in name and is_number(value)}
    low = max((value for name, value in given.items() if "inimum" in name), default=float("-inf"))
    return low, min((value for name, value in given.items() if "aximum" in name), default=float("inf"))


def _differ(
    kind: str,
    one: dict[str, Any],
    other: dict[str, Any],
    resolve: Callable[[Any], Any],
    spend: Callable[[int], None],
    depth: int,
) -> bool:
    """Whether no value of a type is accepted by both."""
    if kind == "number":
        (low, high), (least, most) = _interval(one), _interval(other)
        return high < least or most < low
    if kind != "object":
        return False
    parts = [
        {name: properties[name] for name in required if isinstance(name, str) and name in properties}
        for properties, required in ((part.get("properties"), part.get("required")) for part in (one, other))
        if isinstance(properties, dict) and isinstance(required, list)
    ]
    if len(parts) < 2:
        return False
    first, second = parts
    return any(
        are_disjoint(first[name], second[name], resolve, spend, depth - 1) for name in first.keys() & second.keys()
    )
