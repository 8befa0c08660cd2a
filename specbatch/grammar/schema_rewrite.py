"""Rewrites JSON schemas into equal ones without keywords that no engine has.

`oneOf` becomes `anyOf` where no value is accepted by two of its schemas, or each can be limited to what the others
refuse; `not`, `if` and dependencies become alternatives. What an engine would refuse as unknown, but JSON Schema calls
an annotation, is left out, with a note.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote

from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.grammar.limits import RegexError, spend
from specbatch.grammar.regex_parser import LONGEST, NESTED
from specbatch.grammar.schema_negation import Negation, all_schemas, any_schema, negated
from specbatch.grammar.schema_overlap import are_disjoint
from specbatch.grammar.schema_words import ANNOTATIONS, ASSERTIONS, FORMATS, NARROWED

_INNER = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("dependentSchemas", "patternProperties", "properties")
_MOST_WORK = 50_000  # schemas that are followed or compared
_OTHERS = {"type": ["boolean", "null", "number", "object", "string"]}  # values that are no arrays
_MOST_UNIQUE = 4  # values of items that are unique


class SchemaError(RegexError):
    """Why a schema cannot be used; names the place in it."""


class Readings(NamedTuple):
    """A schema as engines can read it.

    plain      JSON, without what JSON Schema calls an annotation and an engine refuses as unknown
    rewritten  JSON, without keywords that no engine has either; None if they cannot be written
    reason     why not
    notes      what is ignored, and what has no answers
    """

    plain: str
    rewritten: str | None
    reason: str
    notes: list[str]


def readings(text: str) -> Readings:
    """Of a schema, given as JSON. Raises SchemaError for what is none."""
    if len(text) > LONGEST:
        raise SchemaError(f"it has {len(text)} characters; use at most {LONGEST}")
    try:
        root = parse_json(text, unique=True)
    except UnreadableError as error:
        raise SchemaError(f"{error}; write a JSON schema") from None
    if not isinstance(root, bool | dict):
        raise SchemaError("# must be an object, true or false")
    try:
        plain = _Visit(root)
        plain.run()
        found = json.dumps(root)
        rewrite = _Rewrite(root)
        try:
            rewrite.run()
            return Readings(found, _dumped(root), "", plain.notes + rewrite.notes)
        except SchemaError as error:
            return Readings(found, None, str(error), plain.notes)
    except RecursionError:
        raise SchemaError(NESTED) from None


class _Visit:
    """Goes through a schema, and leaves out what engines refuse as unknown."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.notes: list[str] = []
        self._seen: dict[int, Any] = {}  # schemas by id, which are kept so that no other one gets it
        self._ignored = set[str]()
        self._work = 0

    def run(self) -> None:
        self._visit(self.root, "#")

    def _visit(self, schema: Any, place: str) -> None:
        """Change a schema and those in it, in place."""
        self._spend(1)
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen[id(schema)] = schema
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            self._visit(self._target(reference, place), reference)
        for inner, where in _inside(schema, place):
            self._visit(inner, where)
        self._change(schema, place)

    def _change(self, schema: dict[str, Any], place: str) -> None:
        for name in sorted(schema.keys() - ASSERTIONS - ANNOTATIONS):
            self._ignore(name, place)
        form = schema.get("format")
        if isinstance(form, str) and form not in FORMATS:
            del schema["format"]
            self._ignore(f"format {form:.40}", place)

    def _ignore(self, what: str, place: str) -> None:
        if what not in self._ignored:
            self._ignored.add(what)
            self.notes.append(f"{place}: {what} is ignored")

    def _target(self, reference: Any, place: str) -> Any:
        """The place that a reference names; anything if that is not in the schema: llguidance may know it."""
        is_inside = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
        return target(self.root, reference, place) if is_inside else {}

    def _spend(self, work: int) -> None:
        spend(10 * work)
        self._work += work
        if self._work > _MOST_WORK:
            raise SchemaError("it takes too much work; use fewer alternatives and references")


class _Rewrite(_Visit):
    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._has_written = False

    def run(self) -> None:
        super().run()
        if self._has_written:
            self.root.pop("$schema", None)  # in an old dialect, keywords that were written would be ignored

    def _change(self, schema: dict[str, Any], place: str) -> None:
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            if isinstance(schema.get(name), dict):
                for key, value in schema.pop(name).items():
                    then = {"required": value} if isinstance(value, list) else value
                    self._add(schema, {"anyOf": [{"properties": {key: False}}, then]})
        if "if" in schema:
            condition, then, other = schema.pop("if"), schema.pop("then", True), schema.pop("else", True)
            if then is not True or other is not True:
                refused = negated(condition, _property_names(schema, then, other), self._resolved)
                found = any_schema([all_schemas([condition, then]), all_schemas([refused.schema, other])])
                self._limit(schema, Negation(found, refused.is_exact), f"{place}/if")
        for name in ("then", "else"):
            schema.pop(name, None)  # without an `if` they have no effect
        if "not" in schema:
            given = schema.pop("not")
            self._limit(schema, negated(given, _property_names(schema), self._resolved), f"{place}/not")
        discriminator = schema.get("discriminator")
        if isinstance(discriminator, dict) and isinstance(tag := discriminator.get("propertyName"), str):
            for key in {"anyOf", "oneOf"} & schema.keys():  # OpenAPI requires it in each of their schemas
                if isinstance(schema[key], list):
                    schema[key] = [_requiring(tag, self._resolved(each)) for each in schema[key]]
        if isinstance(schema.get("oneOf"), list):
            given = schema.pop("oneOf")
            self._limit(schema, self._one_of(given, schema, place), f"{place}/oneOf")
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        if schema.get("uniqueItems") is True:
            self._unique(schema, place)

    def _add(self, schema: dict[str, Any], other: Any) -> None:
        """Let a schema accept only what another one accepts, too."""
        self._has_written = True
        if not isinstance(schema.get("allOf", []), list):
            raise SchemaError("allOf must be a list")
        if isinstance(other, dict) and other.keys() <= {"anyOf", "type"} - schema.keys():
            schema.update(other)
        elif other is not True:
            schema["allOf"] = [*schema.get("allOf", []), other]

    def _limit(self, schema: dict[str, Any], found: Negation, place: str) -> None:
        """Let a schema accept only what a rewritten part accepts, too."""
        if found.is_exact:
            self._add(schema, found.schema)
            return
        if found.schema is False:
            raise SchemaError(
                f"{place} has a schema whose opposite cannot be written; let schemas differ in type, bounds, what "
                "is required or in the const of a property that both require, or use anyOf"
            )
        self.notes.append(f"{place}: some documents that it accepts are no answers")
        self._add(schema, {"allOf": [found.schema], NARROWED: True})

    def _one_of(self, given: list[Any], beside: dict[str, Any], place: str) -> Negation:
        """What is accepted by one of the given schemas alone. beside: the schema that has them, without them."""
        overlaps: dict[int, list[int]] = {n: [] for n in range(len(given))}
        for (n, one), (m, other) in itertools.combinations(enumerate(given), 2):
            if not are_disjoint([one, other, beside], lambda ref: self._target(ref, place), self._spend):
                overlaps[n].append(m)
                overlaps[m].append(n)
        names = _property_names(beside, *map(self._resolved, given))
        options, is_exact = list[Any](), True
        for n, schema in enumerate(given):
            others = [negated(given[m], names, self._resolved) for m in overlaps[n]]
            options.append(all_schemas([schema, *(other.schema for other in others)]))
            is_exact = is_exact and all(other.is_exact for other in others)
        return Negation(any_schema(options), is_exact)

    def _unique(self, schema: dict[str, Any], place: str) -> None:
        """All orders of few values; others cannot be written."""
        items, most = self._resolved(schema.get("items", True)), schema.get("maxItems")
        is_enum = isinstance(items, dict) and items.keys() & ASSERTIONS <= {"enum", "type"}
        values = items.get("enum") if is_enum else None
        if most in (0, 1):
            del schema["uniqueItems"]
        elif isinstance(values, list) and len(values) <= _MOST_UNIQUE and "prefixItems" not in schema:
            del schema["uniqueItems"]
            orders = itertools.chain.from_iterable(
                itertools.permutations(values, count) for count in range(len(values) + 1)
            )
            kinds = {"type": items["type"]} if "type" in items else {}
            self._add(schema, {"anyOf": [_OTHERS, *(_exactly(order, kinds) for order in orders)]})
        else:
            raise SchemaError(
                f"{place}/uniqueItems needs items with an enum of at most {_MOST_UNIQUE} values; leave it out"
            )

    def _resolved(self, schema: Any) -> Any:
        """What a schema with a reference and nothing else refers to."""
        self._spend(1)
        for _ in range(_MOST_WORK):
            if not isinstance(schema, dict) or schema.keys() & ASSERTIONS != {"$ref"}:
                return schema
            self._spend(1)
            schema = self._target(schema["$ref"], "#")
        return schema


def target(root: Any, reference: Any, place: str) -> Any:
    """The place that a reference names, as the fragment of a URI: a JSON pointer with percent-encoded characters (RFC
    6901, section 6)."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{place}/$ref must refer to a place in the schema, such as #/$defs/Name")
    found = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and re.fullmatch("0|[1-9][0-9]{0,5}", key) and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise SchemaError(f"{place}/$ref refers to {reference}, which is not there")
    return found


def _inside(schema: dict[str, Any], place: str) -> Iterable[tuple[Any, str]]:
    """The schemas in a schema, and their places."""
    for name in _INNER:
        if name in schema:
            yield schema[name], f"{place}/{name}"
    for name in (*_LISTS, "items"):
        if isinstance(schema.get(name), list):
            yield from ((inner, f"{place}/{name}/{n}") for n, inner in enumerate(schema[name]))
    for name in (*_MAPS, "dependencies"):
        if isinstance(schema.get(name), dict):
            yield from ((inner, f"{place}/{name}/{key}") for key, inner in schema[name].items())


def _property_names(*schemas: Any) -> set[str]:
    return {
        name
        for schema in schemas
        if isinstance(schema, dict) and isinstance(schema.get("properties"), dict)
        for name in schema["properties"]
    }


def _requiring(name: str, schema: Any) -> Any:
    required = schema.get("required", []) if isinstance(schema, dict) else []
    if not isinstance(schema, dict) or not isinstance(required, list):
        return {"allOf": [schema, {"required": [name]}]}
    return {**schema, "required": [*required, name]}


def _dumped(root: Any) -> str:
    """As JSON. What was written may have the same parts again and again."""
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = 1 + sum(map(size, value.values() if isinstance(value, dict) else value))
        return sizes[id(value)]

    if size(root) > _MOST_WORK:
        raise SchemaError("it is too large without oneOf, not, if and dependencies; use anyOf in place of oneOf")
    return json.dumps(root)


def _exactly(values: tuple[Any, ...], kinds: dict[str, Any]) -> dict[str, Any]:
    """Arrays of these values."""
    items = [{"const": value, **kinds} for value in values]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(values)}
