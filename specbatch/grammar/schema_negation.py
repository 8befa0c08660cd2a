"""JSON schemas that accept what another one refuses, as far as the keywords that engines have can say it.

Each keyword but `type`, `enum` and `const` limits values of one type only: what it refuses is of this type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from specbatch.config.settings import is_number, is_whole
from specbatch.grammar.limits import spend
from specbatch.grammar.schema_words import ASSERTIONS, NARROWED

Schema = dict[str, Any]
Resolve = Callable[[Any], Any]
_DEEPEST = 12  # schemas in each other
_MOST_NUMBERS = 64
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_LENGTHS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


class Negation(NamedTuple):
    """What accepts only values that a schema refuses; all of them if it is exact."""

    schema: Schema | bool
    is_exact: bool = True


UNKNOWN = Negation(False, is_exact=False)


def negated(schema: Any, names: Collection[str], resolve: Resolve, depth: int = _DEEPEST) -> Negation:
    """names: of properties that may be there beside those that a schema has; resolve: what a schema with a `$ref`
    refers to."""
    schema = resolve(schema)
    spend(10)
    if isinstance(schema, bool):
        return Negation(not schema)
    if not isinstance(schema, dict) or not depth or NARROWED in schema:
        return UNKNOWN
    parts = [
        _without(name, schema, names, lambda inner: negated(inner, names, resolve, depth - 1))
        for name in schema.keys() & ASSERTIONS
    ]
    return _any(parts)


def _any(parts: Sequence[Negation]) -> Negation:
    return Negation(any_schema([part.schema for part in parts]), all(part.is_exact for part in parts))


def any_schema(schemas: list[Any]) -> Schema | bool:
    """Of schemas at least one accepts a value."""
    if True in schemas:
        return True
    left = [schema for schema in schemas if schema is not False]
    return {"anyOf": left} if len(left) > 1 else left[0] if left else False


def all_schemas(schemas: list[Any]) -> Schema | bool:
    """All of schemas accept a value."""
    if False in schemas:
        return False
    left = [schema for schema in schemas if schema is not True]
    return {"allOf": left} if len(left) > 1 else left[0] if left else True


def lacks(name: str) -> Schema:
    """Objects without a property."""
    return {"type": "object", "properties": {name: False}}


def _without(name: str, schema: Schema, names: Collection[str], inner: Callable[[Any], Negation]) -> Negation:
    """What the value of one keyword refuses."""
    value = schema[name]
    if name in ("enum", "const"):
        return _other_values(value if name == "enum" and isinstance(value, list) else [value])
    if name == "type":
        return _other_types(value if isinstance(value, list) else [value])
    if name in _LENGTHS and is_whole(value) and value >= 0:
        kind, limit, step = _LENGTHS[name]
        return Negation(False if value + step < 0 else {"type": kind, limit: value + step})
    if name in _BOUNDS and is_number(value):
        return Negation({"type": "number", _BOUNDS[name]: value})
    if name == "required" and isinstance(value, list):
        return Negation(any_schema([lacks(each) for each in value]))
    if name in ("properties", "patternProperties", "additionalProperties"):
        return _other_properties(name, schema, names, inner)
    if name in ("anyOf", "allOf") and isinstance(value, list):
        parts = [inner(each) for each in value]
        if name == "allOf":
            return _any(parts)
        return Negation(all_schemas([part.schema for part in parts]), all(part.is_exact for part in parts))
    if name == "$ref":
        return inner({"$ref": value})
    return UNKNOWN


def _other_properties(name: str, schema: Schema, names: Collection[str], inner: Callable[[Any], Negation]) -> Negation:
    """Objects with a property that one of the keywords for them refuses."""
    own, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if not isinstance(own, dict) or not isinstance(patterns, dict):
        return UNKNOWN
    if name == "properties":
        pairs = list(own.items())
    elif name == "patternProperties":
        pairs = [(key, each) for pattern, each in patterns.items() for key in names if _matches(pattern, key, False)]
    else:
        others = [key for key in names if key not in own and not any(_matches(each, key, True) for each in patterns)]
        pairs = [(key, schema[name]) for key in others]
    parts = [(key, inner(each)) for key, each in sorted(pairs, key=lambda pair: pair[0])]
    refused = [
        part.schema if part.schema is False else {"type": "object", "required": [key], "properties": {key: part.schema}}
        for key, part in parts
    ]
    return Negation(any_schema(refused), name == "properties" and all(part.is_exact for _, part in parts))


def _matches(pattern: str, name: str, otherwise: bool) -> bool:
    """Whether a pattern matches. otherwise: for what Python cannot parse."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return otherwise


def _other_types(kinds: list[Any]) -> Negation:
    left = [kind for kind in _TYPES if kind not in kinds and (kind != "number" or "integer" not in kinds)]
    return Negation({"type": left} if left else False, "integer" not in kinds or "number" in kinds)


def _other_values(values: list[Any]) -> Negation:
    """All values but some, which are texts, numbers, booleans and null."""
    texts = {value for value in values if isinstance(value, str)}
    numbers = sorted({value for value in values if is_number(value)})
    is_exact = all(is_number(value) or isinstance(value, str | bool | type(None)) for value in values)
    if not all(text.isprintable() for text in texts) or len(numbers) > _MOST_NUMBERS:
        return UNKNOWN
    kinds = ["array", "object"] if is_exact else []
    kinds += [] if None in values else ["null"]
    options: list[Any] = [{"type": kinds}] if kinds else []
    options += [{"const": flag} for flag in (True, False) if not any(flag is value for value in values)]
    options.append({"type": "string", "pattern": f"^(?:{_other_texts(texts)})$"} if texts else {"type": "string"})
    for low, high in pairwise([None, *numbers, None]):
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        options.append({"type": "number"} | {name: value for name, value in limits.items() if value is not None})
    return Negation({"anyOf": options}, is_exact)


def _other_texts(texts: set[str]) -> str:
    """A regular expression for all texts but some."""
    spend(1 + len(texts))
    firsts = sorted({text[0] for text in texts if text})
    options = ["" if "" not in texts else None]
    options += [rf"[^{''.join(map(_in_set, firsts))}][\s\S]*" if firsts else r"[\s\S]+"]
    for first in firsts:
        rest = {text[1:] for text in texts if text.startswith(first)}
        options.append(f"{_in_set(first)}(?:{_other_texts(rest)})")
    return "|".join(option for option in options if option is not None)


def _in_set(letter: str) -> str:
    return letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}"
