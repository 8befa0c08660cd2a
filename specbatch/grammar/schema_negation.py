"""JSON schemas that accept exactly what another one refuses, as far as the keywords that engines have can say it.

Each keyword but `type`, `enum` and `const` limits values of one type only: what it refuses is of this type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specbatch.config.settings import is_whole
from specbatch.grammar.limits import spend
from specbatch.grammar.schema_words import ASSERTIONS

Schema = dict[str, Any]
Resolve = Callable[[Any], Any]
_DEEPEST = 12  # schemas in each other
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


def negated(schema: Any, resolve: Resolve, depth: int = _DEEPEST) -> Schema | bool | None:
    """A schema that accepts what another one refuses; None if there is none here. resolve: what a schema with a `$ref`
    refers to."""
    schema = resolve(schema)
    spend(10)
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or not depth:
        return None
    found: list[Any] = []
    for name in schema.keys() & ASSERTIONS:
        part = _without(name, schema, lambda inner: negated(inner, resolve, depth - 1))
        if part is None:
            return None
        found.append(part)
    return any_schema(found)


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


def _without(name: str, schema: Mapping[str, Any], inner: Callable[[Any], Any]) -> Schema | bool | None:
    """What the value of one keyword refuses."""
    value = schema[name]
    if name in ("enum", "const"):
        return _other_values(value if name == "enum" and isinstance(value, list) else [value])
    if name == "type":
        return _other_types(value if isinstance(value, list) else [value])
    if name in _LENGTHS and is_whole(value) and value >= 0:
        kind, limit, step = _LENGTHS[name]
        return False if value + step < 0 else {"type": kind, limit: value + step}
    if name in _BOUNDS and not isinstance(value, bool):
        return {"type": "number", _BOUNDS[name]: value}
    if name == "required" and isinstance(value, list):
        return any_schema([lacks(each) for each in value])
    if name == "properties" and isinstance(value, dict):
        parts = {key: inner(each) for key, each in value.items()}
        if None in parts.values():
            return None
        return any_schema(
            [
                part if part is False else {"type": "object", "required": [key], "properties": {key: part}}
                for key, part in parts.items()
            ]
        )
    if name in ("anyOf", "allOf") and isinstance(value, list):
        parts_of = [inner(each) for each in value]
        if None in parts_of:
            return None
        return all_schemas(parts_of) if name == "anyOf" else any_schema(parts_of)
    if name == "$ref":
        return inner({"$ref": value})
    if name == "not":
        return value if isinstance(value, bool | dict) else None
    return None


def _other_types(kinds: list[Any]) -> Schema | bool | None:
    if "integer" in kinds and "number" not in kinds:
        return None
    left = [kind for kind in _TYPES if kind not in kinds]
    return {"type": left} if left else False


def _other_values(values: list[Any]) -> Schema | None:
    """All values but some, of which none is a number, an array or an object that can be written in several ways."""
    if any(not isinstance(value, str | bool | type(None)) for value in values):
        return None
    texts = {value for value in values if isinstance(value, str)}
    if not all(text.isprintable() for text in texts):
        return None
    kinds = ["number", "array", "object"]
    kinds += [] if None in values else ["null"]
    options: list[Any] = [{"type": kinds}, {"enum": [flag for flag in (True, False) if flag not in values]}]
    options.append({"type": "string", "pattern": f"^(?:{_other_texts(texts)})$"} if texts else {"type": "string"})
    return {"anyOf": [option for option in options if option != {"enum": []}]}


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
