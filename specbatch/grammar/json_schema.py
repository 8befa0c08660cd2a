"""Translates JSON schemas into regular expressions, every match of which is a document that the schema accepts.

Keywords that a regular expression cannot express, or that are not supported, are refused: none is ignored. Properties
come in the order of the schema, without others, and one space is allowed between tokens of JSON: a model that may write
any number of them can go on forever. This is so in Outlines (Willard and Louf 2023, arXiv 2307.09702), too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.grammar.json_values import (
    KEYWORDS,
    SIMPLE,
    NoValueError,
    SchemaError,
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
from specbatch.grammar.limits import READING_S, limited, remembered, spend
from specbatch.grammar.number_ranges import any_of
from specbatch.grammar.regex_parser import LONGEST, NESTED
from specbatch.grammar.schema_merge import Place, merged
from specbatch.grammar.schema_overlap import are_disjoint

DEPTH = 2  # arrays and objects in a value without a schema
RECURSION = 2  # how often a reference is followed within itself
_MOST_WORK = 100_000  # schemas that are followed or compared
_VALUES = 512  # whose comparison takes about as long as that of two schemas
ANNOTATIONS = {  # keywords without an effect
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples",
    "readOnly", "title", "writeOnly",
}  # fmt: skip
_S = "[ ]?"


class _TooDeep(SchemaError):
    """References in each other more often than is followed. What they would be part of is left out where it may be."""


@remembered(SchemaError)
def regex_of_schema(text: str, at: str = "#") -> str:
    """The expression for a schema, given as JSON, or for the one in it to which the reference `at` leads. Raises
    RegexError."""
    if len(text) > LONGEST:
        raise SchemaError(f"it has {len(text)} characters; use at most {LONGEST}")
    try:
        root = parse_json(text, unique=True)
    except UnreadableError as error:
        raise SchemaError(f"{error}; write a JSON schema") from None
    try:
        with limited(READING_S):
            schema = _Schema(root)
            return schema.regex(*schema.refer(at, "#", () if at == "#" else ("#",)))
    except RecursionError:
        raise SchemaError(NESTED) from None


class _Schema:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._work = 0

    def regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        """refs: the references that lead to the schema."""
        found = self._regex(schema, place, refs)
        spend(10 + len(found) // 1000)
        if len(found) > LONGEST:  # arrays and references in each other repeat what is in them
            raise SchemaError(f"{place} is too large as a regular expression; nest less")
        return found

    def _regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        if schema is True:
            return _anything(DEPTH)
        if not isinstance(schema, dict):
            raise SchemaError(f"{place} must be an object")
        keys = schema.keys() - ANNOTATIONS
        if not keys:
            return _anything(DEPTH)
        if keys & {"$ref", "allOf"}:
            return self.regex(*self._follow(schema, place, refs))
        for name in ("anyOf", "oneOf"):
            if name in keys:
                only(place, keys, {name, "discriminator"})
                return self._choice(name, schema, place, refs)
        if keys & {"enum", "const"}:
            return literals(schema, keys, place)
        kinds = types(schema, place) or []
        known = {"type"}.union(*(KEYWORDS[kind] for kind in kinds))
        only(place, keys, known)
        return _those_that_end(partial(self._of_type, kind, schema, place, refs) for kind in kinds)

    def _choice(self, name: str, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        given = list_of(schema, name, place)

        def option(n: int, refs: tuple[str, ...]) -> Place:
            found = self._follow(given[n], f"{place}/{name}/{n}", refs)
            return found if "discriminator" not in schema else _discriminated(*found, schema["discriminator"], place)

        def accepted(follow: Callable[..., Place], *given: Any) -> Any:
            try:
                return follow(*given).schema
            except NoValueError:
                return {"enum": []}

        if name == "oneOf":
            schemas = [accepted(option, n, ()) for n in range(len(given))]
            for (n, one), (m, other) in itertools.combinations(enumerate(schemas), 2):
                if not are_disjoint(
                    one, other, lambda schema: accepted(self._follow, schema, place, ()), self._compare
                ):
                    raise SchemaError(
                        f"{place}/oneOf: schemas {n} and {m} may accept the same value; let them differ in type, in "
                        "bounds or in the const of a property that both require, or use anyOf"
                    )

        def translated(n: int) -> str:
            return self.regex(*option(n, refs))

        return _those_that_end(partial(translated, n) for n in range(len(given)))

    def _optional(self, schema: Any, place: str, refs: tuple[str, ...]) -> str | None:
        """The expression of what need not be there, None where references go too deep."""
        try:
            return self.regex(schema, place, refs)
        except _TooDeep:
            return None
        except NoValueError as error:  # what is around it accepts values
            raise SchemaError(str(error)) from None

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

    def _follow(self, schema: Any, place: str, refs: tuple[str, ...]) -> Place:
        """What a schema refers to, its place and the references that lead there; the schema itself if it is no
        reference. Schemas of an `allOf` are one schema then."""
        self._spend(1)
        while isinstance(schema, dict) and "$ref" in schema:
            only(place, schema.keys() - ANNOTATIONS, {"$ref"})
            schema, place, refs = self.refer(schema["$ref"], place, refs)
        if not isinstance(schema, dict) or "allOf" not in schema:
            return Place(schema, place, refs)
        given = [
            part if isinstance(part, Place) else Place(part, f"{place}/allOf/{n}", refs)
            for n, part in enumerate(list_of(schema, "allOf", place))
        ]
        if given[0] is schema["allOf"][0]:  # of a merge; the schema itself has no such place
            place = given[0].place
        if beside := {key: value for key, value in schema.items() if key != "allOf" and key not in ANNOTATIONS}:
            given.append(Place(beside, place, refs))
        parts = list[Place]()
        for part in given:
            found = self._follow(*part)
            if found.schema is not True and not isinstance(found.schema, dict):
                raise SchemaError(f"{found.place} must be an object")
            if found.schema is not True and (keys := found.schema.keys() - ANNOTATIONS):
                self._spend(len(found.schema))
                parts.append(found._replace(schema={key: found.schema[key] for key in found.schema if key in keys}))
        return parts[0] if len(parts) == 1 else Place(merged(parts) if parts else {}, place, refs)

    def refer(self, ref: Any, place: str, refs: tuple[str, ...]) -> Place:
        """The place that a reference names, as the fragment of a URI: a JSON pointer with percent-encoded characters
        (RFC 6901, section 6)."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise SchemaError(f"{place}/$ref must refer to a place in the schema, such as #/$defs/Name")
        self._spend(len(refs))  # each of which is looked at
        pointer = unquote(ref)
        if refs.count(pointer) > RECURSION:
            raise _TooDeep(
                f"{place}/$ref is recursive ({ref}) without an end; let it be left out, or be something else"
            )
        schema = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and re.fullmatch("0|[1-9][0-9]{0,5}", key) and int(key) < len(schema):
                schema = schema[int(key)]
            elif isinstance(schema, dict) and key in schema:
                schema = schema[key]
            else:
                raise SchemaError(f"{place}/$ref refers to {ref}, which is not there")
        return Place(schema, ref, (*refs, pointer))

    def _compare(self, values: int) -> None:
        self._spend(values // _VALUES)

    def _spend(self, work: int) -> None:
        spend(10 * work)
        self._work += work
        if self._work > _MOST_WORK:
            raise SchemaError("it refers and compares too much; nest less, or use anyOf in place of oneOf")

    def _array(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        least, most = bounds(schema, "minItems", "maxItems", place)
        if "prefixItems" in schema:
            items = list_of(schema, "prefixItems", place)
            if not least <= len(items) <= (len(items) if most is None else most):
                raise SchemaError(f"{place}/prefixItems has {len(items)} schemas; use as many minItems and maxItems")
            try:
                parts = [self.regex(item, f"{place}/prefixItems/{n}", refs) for n, item in enumerate(items)]
            except NoValueError as error:  # shorter arrays may be accepted
                raise SchemaError(str(error)) from None
            return rf"\[{_S}{f'{_S},{_S}'.join(parts)}{_S}\]"
        if most == 0:
            return rf"\[{_S}\]"
        if "items" not in schema:
            return _repeated(r"\[", _anything(DEPTH - 1), r"\]", least, most)
        given = schema["items"], f"{place}/items", refs
        item = self.regex(*given) if least else self._optional(*given)
        return rf"\[{_S}\]" if item is None else _repeated(r"\[", item, r"\]", least, most)

    def _object(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        required, properties = schema.get("required", []), schema.get("properties")
        more = schema.get("additionalProperties", True)
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{place}/required must be a list of names")
        if not isinstance(more, (bool, dict)):
            raise SchemaError(f"{place}/additionalProperties must be a schema, true or false")
        if "properties" not in schema:
            if required:
                raise SchemaError(f"{place}/required needs properties of these names")
            if more is False:
                return rf"\{{{_S}\}}"
            value = _anything(DEPTH - 1)
            if more is not True:
                inner = self._optional(more, f"{place}/additionalProperties", refs)
                if inner is None:
                    return rf"\{{{_S}\}}"
                value = inner
            return _repeated(r"\{", f"{SIMPLE['string']}{_S}:{_S}{value}", r"\}", 0, None)
        if not isinstance(properties, dict):
            raise SchemaError(f"{place}/properties must be an object")
        if missing := [name for name in required if name not in properties]:
            raise SchemaError(f"{place}/required has {missing[0]!r}, which is not in properties; add it there")
        members, needed = list[tuple[str, bool]](), set(required)
        for name, value in properties.items():
            given = value, f"{place}/properties/{name}", refs
            inner = self.regex(*given) if name in needed else self._optional(*given)
            if inner is not None:
                members.append((f"{literal(name, place)}{_S}:{_S}{inner}", name in needed))
        if sum(len(part) for part, _ in members) > LONGEST:
            raise SchemaError(f"{place}/properties is too large; use fewer properties")
        return _members([part for part, _ in members], [need for _, need in members])


def _discriminated(schema: Any, place: str, refs: tuple[str, ...], discriminator: Any, where: str) -> Place:
    """An alternative with the property that tells it from the others: OpenAPI requires it in each of them."""
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if not isinstance(name, str):
        raise SchemaError(f"{where}/discriminator must have a propertyName")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or name not in properties:
        raise SchemaError(f"{place} must have the property {name!r}, which a discriminator names")
    required = schema.get("required", [])
    return Place({**schema, "required": [*required, name] if isinstance(required, list) else required}, place, refs)


def _those_that_end(options: Iterable[Callable[[], str]]) -> str:
    """Any of several expressions, without those that accept no value or where references go too deep."""
    found, error = list[str](), None
    for option in options:
        try:
            found.append(option())
        except (NoValueError, _TooDeep) as reason:
            error = reason if error is None or isinstance(reason, _TooDeep) else error
    if error is not None and not found:
        raise error
    return any_of(found)


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


def _anything(depth: int) -> str:
    """Any value with up to so many arrays and objects in each other."""
    options = [SIMPLE[kind] for kind in ("string", "number", "boolean", "null")]
    if depth:
        inner = _anything(depth - 1)
        options.append(_repeated(r"\[", inner, r"\]", 0, None))
        options.append(_repeated(r"\{", f"{SIMPLE['string']}{_S}:{_S}{inner}", r"\}", 0, None))
    return any_of(options)
