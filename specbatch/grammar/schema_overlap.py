"""Whether JSON schemas have no value in common, as types, values, bounds and required properties show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specbatch.config.settings import is_number
from specbatch.grammar.schema_words import NARROWED

KINDS: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
_CHOICES = ("anyOf", "oneOf")
_DEEPEST = 12  # schemas in each other
_MOST_WORK = 3_000  # schemas and values that are looked at
_LIMITS = {"number": ("inimum", "aximum"), "string": ("inLength", "axLength"), "array": ("inItems", "axItems")}
_Schema = dict[str, Any]


class _TooMuchWork(Exception):
    pass


def are_disjoint(schemas: Sequence[Any], target: Callable[[str], Any], spend: Callable[[int], None]) -> bool:
    """Whether no value is accepted by all of the schemas; False where that is not shown. target: what a `$ref` names.
    spend: called with the amount of work."""
    left = _MOST_WORK

    def count(work: int) -> None:
        nonlocal left
        spend(work)
        left -= work
        if left < 0:
            raise _TooMuchWork

    try:
        return _is_empty(schemas, target, count, _DEEPEST)
    except _TooMuchWork:
        return False


def _is_empty(schemas: Iterable[Any], target: Callable[[str], Any], spend: Callable[[int], None], depth: int) -> bool:
    parts = list[_Schema]()
    waiting, followed = list(schemas), set[str]()
    while waiting:
        spend(1)
        schema = waiting.pop()
        if schema is False:
            return True
        if not isinstance(schema, dict) or NARROWED in schema:
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(target(reference))
        if isinstance(schema.get("allOf"), list):
            waiting += schema["allOf"]
        parts.append(schema)
    for part in parts:
        if (values := _values(part)) is not None:
            spend(len(values))
            return all(any(not _may_accept(other, value) for other in parts) for value in values)
    kinds = set.intersection(*(_kinds(part) for part in parts)) if parts else {""}
    if all(_has_no(kind, parts, target, spend, depth) for kind in kinds):
        return True
    for place, part in enumerate(parts):
        for name in _CHOICES:
            if depth and isinstance(part.get(name), list):
                rest = [*parts[:place], {key: part[key] for key in part if key != name}, *parts[place + 1 :]]
                plain = [{key: one[key] for key in one if key not in ("$ref", "allOf")} for one in rest]
                if all(_is_empty([option, *plain], target, spend, depth - 1) for option in part[name]):
                    return True
    return False


def _values(schema: _Schema) -> list[Any] | None:
    """All values that a schema may accept, None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: _Schema) -> set[str]:
    """The types of values that a schema may accept: an integer is a number."""
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated] if isinstance(stated, str) else [*KINDS, "number"]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _may_accept(schema: _Schema, value: Any) -> bool:
    if (values := _values(schema)) is not None:
        return value in values
    if is_number(value):
        low, high = _interval(schema, "number")
        return "number" in _kinds(schema) and low <= value <= high
    return any(isinstance(value, KINDS[kind]) for kind in _kinds(schema) & KINDS.keys())


def _interval(schema: _Schema, kind: str) -> tuple[float, float]:
    """Bounds of numbers or lengths; whether they are exclusive is left out of account."""
    low, high = _LIMITS[kind]
    given = {name: value for name, value in schema.items() if is_number(value)}
    least = max((value for name, value in given.items() if name.endswith(low)), default=float("-inf"))
    return least, min((value for name, value in given.items() if name.endswith(high)), default=float("inf"))


def _has_no(
    kind: str, parts: list[_Schema], target: Callable[[str], Any], spend: Callable[[int], None], depth: int
) -> bool:
    """Whether no value of a type is accepted by all parts."""
    if kind in _LIMITS:
        bounds = [_interval(part, kind) for part in parts]
        return max(low for low, _ in bounds) > min(high for _, high in bounds)
    if kind != "object" or not depth:
        return False
    required = {name for part in parts for name in _names(part.get("required"))}
    for name in required:
        inner = []
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                inner.append(properties[name])
            elif part.get("additionalProperties") is False and not part.get("patternProperties"):
                return True
        if _is_empty(inner, target, spend, depth - 1):
            return True
    return False


def _names(required: Any) -> list[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
