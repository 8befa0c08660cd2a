"""Translates JSON schemas into regular expressions that match exactly their documents, as compact or spaced JSON.

What has no exact expression, or none of a fixed size, is refused: llguidance takes it (see `schema_engine`). There are
three liberties: properties come in the order of the schema, an object that has `properties` and says nothing of others
has no others, and one space is allowed between tokens of JSON, because a model that may write any number of them can go
on forever. This is so in Outlines (Willard and Louf 2023, arXiv 2307.09702), too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.grammar.json_values import (
    KEYWORDS,
    SIMPLE,
    bounds,
    integer,
    list_of,
    literal,
    literals,
    number,
    only,
    string,
    types,
)
from specbatch.grammar.limits import spend
from specbatch.grammar.number_ranges import any_of
from specbatch.grammar.regex_parser import LONGEST, NESTED
from specbatch.grammar.schema_rewrite import SchemaError, target
from specbatch.grammar.schema_words import ASSERTIONS

_S = "[ ]?"


def regex_of_schema(root: Any, free: int = 0) -> str:
    """The expression for a schema as `schema_rewrite` leaves it. Raises RegexError.

    free: how many arrays and objects a value without a schema may have in each other; 0: there are no such values."""
    try:
        return _Schema(root, free).regex(root, "#", ())
    except RecursionError:
        raise SchemaError(NESTED) from None


class _Schema:
    def __init__(self, root: Any, free: int) -> None:
        self._root = root
        self._free = free

    def regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        """refs: the references that lead to the schema."""
        found = self._regex(schema, place, refs)
        spend(10 + len(found) // 1000)
        if len(found) > LONGEST:  # arrays and references in each other repeat what is in them
            raise SchemaError(f"{place} is too large as a regular expression")
        return found

    def _regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        keys = schema.keys() & ASSERTIONS if isinstance(schema, dict) else set()
        if not keys:
            return self._anything(schema is True or isinstance(schema, dict), self._free, place)
        if "$ref" in keys:
            only(place, keys, {"$ref"})
            if (reference := schema["$ref"]) in refs:
                raise SchemaError(f"{place}/$ref is recursive")
            spend(10 + len(refs))
            return self.regex(target(self._root, reference, place), reference, (*refs, reference))
        for name in ("anyOf", "allOf"):
            if name in keys:
                only(place, keys, {name})
                options = list_of(schema, name, place)
                if name == "allOf" and len(options) > 1:
                    raise SchemaError(f"{place}/allOf has several schemas")
                return any_of([self.regex(each, f"{place}/{name}/{n}", refs) for n, each in enumerate(options)])
        if keys & {"enum", "const"}:
            return literals(schema, keys, place)
        kinds = types(schema, place) or []
        only(place, keys, {"type"}.union(*(KEYWORDS[kind] for kind in kinds)))
        return any_of([self._of_type(kind, schema, place, refs) for kind in kinds])

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        if kind == "string":
            return string(schema, place)
        if kind == "integer":
            return integer(schema, place)
        if kind == "number" and schema.keys() & KEYWORDS["number"]:
            return number(schema, place)
        if kind == "array":
            return self._array(schema, place, refs)
        if kind == "object":
            return self._object(schema, place, refs)
        return SIMPLE[kind]

    def _array(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        least, most = bounds(schema, "minItems", "maxItems", place)
        if "prefixItems" in schema:
            items = list_of(schema, "prefixItems", place)
            if least < len(items) or (most != len(items) and schema.get("items") is not False):
                raise SchemaError(f"{place}/prefixItems need not all be there, or others may follow")
            parts = [self.regex(item, f"{place}/prefixItems/{n}", refs) for n, item in enumerate(items)]
            return rf"\[{_S}{f'{_S},{_S}'.join(parts)}{_S}\]"
        if most == 0:
            return rf"\[{_S}\]"
        if "items" not in schema:
            return _repeated(r"\[", self._anything(True, self._free - 1, place), r"\]", least, most)
        return _repeated(r"\[", self.regex(schema["items"], f"{place}/items", refs), r"\]", least, most)

    def _object(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        required, properties = schema.get("required", []), schema.get("properties", {})
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise SchemaError(f"{place} has no list in required, or no object in properties")
        if not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{place}/required must be a list of names")
        more = schema.get("additionalProperties", not properties)
        if more is not False and not (properties and self._free):
            if properties or required:
                raise SchemaError(f"{place} may have any properties")
            if more is True:
                value = self._anything(True, self._free - 1, place)
            else:
                value = self.regex(more, f"{place}/additionalProperties", refs)
            return _repeated(r"\{", f"{SIMPLE['string']}{_S}:{_S}{value}", r"\}", 0, None)
        if missing := [name for name in required if name not in properties]:
            raise SchemaError(f"{place}/required has {missing[0]!r}, which is not in properties")
        members, needed = list[str](), set(required)
        for name, value in properties.items():
            inner = self.regex(value, f"{place}/properties/{name}", refs)
            members.append(f"{literal(name, place)}{_S}:{_S}{inner}")
        if sum(map(len, members)) > LONGEST:
            raise SchemaError(f"{place}/properties is too large as a regular expression")
        return _members(members, [name in needed for name in properties])

    def _anything(self, is_value: bool, depth: int, place: str) -> str:
        """Any value with up to so many arrays and objects in each other."""
        if not is_value or not self._free:
            raise SchemaError(f"{place} accepts anything, or nothing")
        options = [SIMPLE[kind] for kind in ("string", "number", "boolean", "null")]
        if depth > 0:
            inner = self._anything(True, depth - 1, place)
            options.append(_repeated(r"\[", inner, r"\]", 0, None))
            options.append(_repeated(r"\{", f"{SIMPLE['string']}{_S}:{_S}{inner}", r"\}", 0, None))
        return any_of(options)


def _members(parts: list[str], required: list[bool]) -> str:
    """An object of these members in this order, without some that are not required."""
    comma = f"{_S},{_S}"
    if True in required:
        first = required.index(True)
        before = "".join(f"(?:{part}{comma})?" for part in parts[:first])
        after = [f"{comma}{part}" for part in parts[first + 1 :]]
        rest = "".join(
            part if need else f"(?:{part})?" for part, need in zip(after, required[first + 1 :], strict=True)
        )
        return rf"\{{{_S}{before}{parts[first]}{rest}{_S}\}}"
    return rf"\{{{_S}(?:{_some(parts, comma) if parts else ''})?{_S}\}}"


def _some(parts: list[str], comma: str) -> str:
    """At least one of these members in this order: one of the first half, or none of them. Each member is there log n
    times, and n times if the options were the first member that is there."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    rest = "".join(f"(?:{comma}{part})?" for part in parts[half:])
    return f"(?:{_some(parts[:half], comma)}{rest}|{_some(parts[half:], comma)})"


def _repeated(opening: str, item: str, closing: str, least: int, most: int | None) -> str:
    """An array or object of `least` to `most` (at least 1) items."""
    count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    items = f"{item}(?:{_S},{_S}{item}){count}"
    return f"{opening}{_S}{items if least else f'(?:{items})?'}{_S}{closing}"
