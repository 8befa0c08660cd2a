"""Merges the schemas of an `allOf` in JSON schemas into one that accepts what all of them accept, or refuses them.

The result is exact. Schemas inside them (of properties, items and alternatives) are not merged here: where several
apply to one value, the result has an `allOf` of them, which is merged when it is translated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specbatch.config.settings import is_number
from specbatch.grammar.json_values import (
    KEYWORDS,
    TYPES,
    NoValueError,
    SchemaError,
    as_integer,
    is_of,
    list_of,
    only,
    types,
)
from specbatch.grammar.limits import spend

_LIMITS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min,
}  # fmt: skip
_KNOWN = {"type", "enum", "const"}.union(*KEYWORDS.values())


class Place(NamedTuple):
    """A schema, where it is, and the references that lead there."""

    schema: Any
    place: str
    refs: tuple[str, ...]


def merged(parts: Sequence[Place]) -> dict[str, Any]:
    """One schema for several, at least two, that have neither references nor `allOf` at the top. Lists of `allOf` in it
    hold a `Place` for each schema."""
    for n, (schema, place, refs) in enumerate(parts):
        for name in ("anyOf", "oneOf"):
            if name in schema:  # exactly one of several and something else: exactly one of several that include it
                only(place, schema, {name, "discriminator"})
                options = [
                    Place(one, f"{place}/{name}/{m}", refs) for m, one in enumerate(list_of(schema, name, place))
                ]
                return {**schema, name: [{"allOf": [*parts[:n], one, *parts[n + 1 :]]} for one in options]}
        only(place, schema, _KNOWN)
    where = " and ".join(part.place for part in parts)
    kinds = _common_types(parts, where)
    found: dict[str, Any] = {} if kinds is None else {"type": kinds}
    for name in ("pattern", "format", *_LIMITS):
        if values := [(part.schema[name], part.place) for part in parts if name in part.schema]:
            found[name] = _limit(name, values) if name in _LIMITS else _only_one(name, values)
    found |= _array(parts) | _object(parts)
    if any(name in part.schema for part in parts for name in ("enum", "const")):
        return {name: found[name] for name in ("type",) if kinds} | {"enum": _literals(parts, found, where)}
    if kinds is not None:  # what says nothing about these types has no effect
        known = {"type"}.union(*(KEYWORDS[kind] for kind in kinds))
        found = {name: value for name, value in found.items() if name in known}
    return found


def _common_types(parts: Iterable[Place], where: str) -> list[str] | None:
    common: list[str] | None = None
    for schema, place, _ in parts:
        if (kinds := types(schema, place)) is None:
            continue
        if common is not None:
            both = [one for one in common if one in kinds or (one == "integer" and "number" in kinds)]
            kinds = both + [one for one in kinds if one == "integer" and "number" in common and one not in both]
        common = kinds
    if common == []:
        raise NoValueError(f"{where} have no type in common; let them accept the same type")
    return common


def _limit(name: str, values: Sequence[tuple[Any, str]]) -> Any:
    for value, place in values:
        if not is_number(value):
            raise SchemaError(f"{place}/{name} must be a number")
    return _LIMITS[name]([value for value, _ in values])


def _only_one(name: str, values: Sequence[tuple[Any, str]]) -> Any:
    (first, one), *others = values
    for value, other in others:
        if value != first:
            raise SchemaError(f"{one} and {other} have different {name}s; write a pattern for both, in one of them")
    return first


def _array(parts: Sequence[Place]) -> dict[str, Any]:
    """`items` and `prefixItems`: an item has to match the schema that each part has for its place."""
    if not any("items" in part.schema or "prefixItems" in part.schema for part in parts):
        return {}
    prefixes = [list_of(*part[:1], "prefixItems", part.place) if "prefixItems" in part.schema else [] for part in parts]

    def at(n: int) -> dict[str, Any]:
        spend(4 * len(parts))
        found = []
        for (schema, place, refs), prefix in zip(parts, prefixes, strict=True):
            if n < len(prefix):
                found.append(Place(prefix[n], f"{place}/prefixItems/{n}", refs))
            elif "items" in schema:
                found.append(Place(schema["items"], f"{place}/items", refs))
        return {"allOf": found}

    longest = max(map(len, prefixes))
    return {"prefixItems": [at(n) for n in range(longest)]} if longest else {"items": at(0)}


def _object(parts: Sequence[Place]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    required = list[str]()
    for schema, place, _ in parts:
        names = schema.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SchemaError(f"{place}/required must be a list of names")
        if not isinstance(schema.get("properties", {}), dict):
            raise SchemaError(f"{place}/properties must be an object")
        if not isinstance(schema.get("additionalProperties", True), (bool, dict)):
            raise SchemaError(f"{place}/additionalProperties must be a schema, true or false")
        required += names
    if required:
        found["required"] = list(dict.fromkeys(required))
    if any("properties" in part.schema for part in parts):
        found["properties"] = {name: {"allOf": places} for name, places in _properties(parts).items()}
    more = [part for part in parts if part.schema.get("additionalProperties", True) is not True]
    if any(part.schema["additionalProperties"] is False for part in more):
        found["additionalProperties"] = False
    elif more:
        found["additionalProperties"] = {"allOf": [_additional(part) for part in more]}
    return found


def _properties(parts: Sequence[Place]) -> dict[str, list[Place]]:
    """The schemas that each property has to match."""
    found: dict[str, list[Place]] = {}
    limiting = [part for part in parts if part.schema.get("additionalProperties", True) is not True]
    for part in parts:
        for name, schema in part.schema.get("properties", {}).items():
            found.setdefault(name, []).append(Place(schema, f"{part.place}/properties/{name}", part.refs))
    for name, places in found.items():
        spend(4 * len(limiting))
        for part in limiting:
            if name in part.schema.get("properties", {}):
                continue
            if part.schema["additionalProperties"] is False:
                raise SchemaError(
                    f"{part.place}/additionalProperties is false and excludes {name!r} of the schema beside it; leave "
                    f"it out, or add {name!r} to the properties there"
                )
            places.append(_additional(part))
    return found


def _additional(part: Place) -> Place:
    return Place(part.schema["additionalProperties"], f"{part.place}/additionalProperties", part.refs)


def _literals(parts: Iterable[Place], others: dict[str, Any], where: str) -> list[Any]:
    """The values of `enum` and `const` that all parts accept, the other keywords of which are `others`."""
    common: dict[str, Any] | None = None
    for schema, place, _ in parts:
        for name in ("enum", "const"):
            if name in schema:
                spend(10 * (len(schema[name]) if isinstance(schema[name], list) else 1))
                values = {
                    _key(value): value for value in (list_of(schema, name, place) if name == "enum" else [schema[name]])
                }
                common = values if common is None else {key: common[key] for key in common if key in values}
    assert common is not None
    if not (found := [value for value in common.values() if _accepts(value, others, where)]):
        raise NoValueError(f"{where} accept no value together; let enum and const have one that all accept")
    return found


def _key(value: Any) -> str:
    """Equal for equal values, such as 1 and 1.0, which are one number in JSON Schema."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return as_integer(value)

    return json.dumps(plain(value), sort_keys=True)


def _accepts(value: Any, schema: dict[str, Any], where: str) -> bool:
    """Whether a value has a type of the schema and is within its limits."""
    kinds = [kind for kind in TYPES if is_of(value, kind)]
    if not set(kinds) & set(schema.get("type", TYPES)):
        return False
    size = value if is_number(value) else len(value) if isinstance(value, (str, list)) else 0
    for name in set().union(*(KEYWORDS[kind] for kind in kinds)) & schema.keys():
        if name not in _LIMITS:
            raise SchemaError(
                f"{where} have an enum or const and {name}; leave {name} out, or the values that do not match"
            )
        limit = schema[name]
        if name.startswith("exclusive") and size == limit:
            return False
        if size < limit if "min" in name.lower() else size > limit:
            return False
    return True
