"""`allOf` of several JSON schemas: what matches is accepted by all of them, and the other way round."""

from __future__ import annotations

import itertools
import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from specbatch.grammar.json_schema import SchemaError, regex_of_schema

PARTS: tuple[Any, ...] = (
    True,
    {"description": "anything"},
    {"type": "integer", "minimum": 2},
    {"exclusiveMaximum": 7, "maxLength": 3, "maxItems": 2},
    {"type": ["string", "null", "number"], "exclusiveMinimum": 1.5, "minLength": 1},
    {"exclusiveMaximum": 5, "minLength": 2, "minItems": 1, "type": ["integer", "string", "array", "object"]},
    {"enum": [1, 2, 3, "ab", None, "abcd", {"a": 3}]},
    {"const": 3},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string", "maxLength": 2}, {"type": ["array", "null"]}]},
    {"oneOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": 2}, {"$ref": "#/$defs/o"}]},
    {"$ref": "#/$defs/o"},
    {"required": ["a"], "properties": {"a": {"type": ["integer", "null"], "minimum": 2}}},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 4}},
    {"type": ["array", "null"], "items": {"type": "integer"}},
    {"type": "array", "prefixItems": [{"maximum": 2}, {"type": "integer"}]},
    {"allOf": [{"minItems": 2, "minimum": 3}, {"type": ["object", "array", "integer"]}]},
)
DEFS = {"o": {"type": "object", "properties": {"b": {"enum": [1, 5]}, "a": {"type": "integer"}}, "required": ["b"]}}
VALUES: list[Any] = [None, *range(9), 2.5, "", "a", "ab", "abc", "abcd", "dd", True, [], [1], [1, 2], [3, 4], ["a"]]
VALUES += [dict(pairs) for pairs in (
    [], [("a", 1)], [("a", 3)], [("a", None)], [("b", 1)], [("b", 5)], [("b", 1), ("a", 2)], [("a", 2), ("b", 1)],
    [("b", 5), ("a", 2)], [("b", 1), ("a", "x")],
)]  # fmt: skip
RANDOM = Random(0)
CHOICES = [*itertools.product(PARTS, repeat=2), *(RANDOM.choices(PARTS, k=3) for _ in range(400))]


def test_all_schemas_apply() -> None:
    """Where a merge is not refused: to values that could be answers if the schemas were written as one."""
    accepted = empty = 0
    for parts in CHOICES:
        schema = {"allOf": list(parts), "$defs": DEFS}
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        try:
            expression = re.compile(regex_of_schema(json.dumps(schema)))
        except SchemaError as error:
            is_empty = any(why in str(error) for why in ("in common", "no value together", "within its"))
            if is_empty and any(map(is_valid, VALUES)):
                pytest.fail(f"{schema}: {error}")
            empty += is_empty
            continue
        text = json.dumps(parts)
        for value in VALUES:
            matches = bool(expression.fullmatch(json.dumps(value)))
            assert not matches or is_valid(value), (schema, value)
            if isinstance(value, dict):  # one of both orders
                matches = matches or bool(expression.fullmatch(json.dumps(dict(reversed(value.items())))))
                if "b" in value and "properties" in text and "$ref" not in text:
                    continue  # not in the properties
            if isinstance(value, list) and "prefixItems" in text and len(value) < 2:
                continue  # shorter than the prefix
            assert matches or not is_valid(value), (schema, value)
        accepted += 1
    assert accepted > 350
    assert empty > 200


BASE = {"type": "object", "properties": {"id": {"type": "integer"}, "kind": {"type": "string"}}, "required": ["id"]}
PETS: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        "pet": BASE,
        "cat": {
            "allOf": [{"$ref": "#/$defs/pet"}],
            "properties": {"kind": {"const": "cat"}, "friend": {"$ref": "#/$defs/cat"}},
        },
        "dog": {"allOf": [{"$ref": "#/$defs/pet"}, {"properties": {"kind": {"enum": ["dog", "wolf"]}}}]},
    },
}


def nested(depth: int) -> dict[str, Any]:
    inner = {"properties": {"in": nested(depth - 1)}, "required": ["in"]} if depth else {}
    return {"allOf": [{"$ref": "#/$defs/base"}, inner]}


@pytest.mark.parametrize(
    ("schema", "document", "others"),
    [
        (PETS, '{"id":1,"kind":"wolf"}', ('{"id":1,"kind":"bird"}', '{"id":1}', '{"kind":"cat"}')),
        (PETS, '{"id":1,"kind":"cat","friend":{"id":2,"kind":"cat"}}', ('{"id":1,"kind":"dog","friend":{"id":1}}',)),
        (
            nested(6) | {"$defs": {"base": BASE}},  # a reference that is used at each depth is not recursive
            '{"id":1,"in":' * 6 + '{"id":1}' + "}" * 6,
            ('{"id":1,"in":' * 5 + '{"id":1}' + "}" * 5,),
        ),
        (
            PETS | {"allOf": [{"properties": {"id": {"maximum": 2}}}]},
            '{"id":1,"kind":"wolf"}',
            ('{"id":1}', '{"id":3,"kind":"cat"}'),
        ),
        ({"allOf": [{"enum": [1, 2.0, "a", True]}, {"enum": [2, 1.0, "b"]}]}, "2.0", ("true", '"a"', "3")),
        ({"allOf": [{"items": {"minimum": 2}, "type": "array"}, {"items": {"type": "integer"}}]}, "[2,3]", ("[1]",)),
        ({"type": "string", "pattern": "^[a-c]{2,4}$", "maxLength": 4, "minLength": 1}, '"abc"', ('"a"', '"abcab"')),
        ({"$ref": "#/$defs/a%20b%7E1%25", "$defs": {"a b/%": {"const": 1}}}, "1", ("2",)),
        ({"$ref": "#/$defs/%C3%A9/anyOf/1", "$defs": {"\u00e9": {"anyOf": [{"const": 0}, {"const": 1}]}}}, "1", ("0",)),
    ],
)
def test_documents(schema: dict[str, Any], document: str, others: tuple[str, ...]) -> None:
    checker, expression = jsonschema.Draft202012Validator(schema), re.compile(regex_of_schema(json.dumps(schema)))
    checker.validate(json.loads(document))
    assert expression.fullmatch(document)
    assert not any(map(expression.fullmatch, others))


CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([CLOSED, {"properties": {"b": {}}}], "#/allOf/0/additionalProperties is false and excludes 'b' of the schema"),
        ([{"type": "string"}, {"type": ["null", "array"]}], "#/allOf/0 and #/allOf/1 have no type in common"),
        ([{"const": 1}, {"enum": ["1", True]}], "#/allOf/0 and #/allOf/1 accept no value together"),
        ([{"type": "integer", "minimum": 5}, {"maximum": 4}], "#: no integer is within"),
        ([{"type": "string", "minLength": 5}, {"maxLength": 4}], "#/minLength is above maxLength"),
        ([{"type": "string", "pattern": "a"}, {"pattern": "b"}], "#/allOf/0 and #/allOf/1 have different patterns"),
        ([{"type": "string", "format": "date"}, {"format": "time"}], "#/allOf/0 and #/allOf/1 have different formats"),
        ([{"type": "string", "pattern": "a+"}, {"maxLength": 4}], "# has several of pattern, format and lengths"),
        ([{"enum": ["ab"]}, {"type": "string", "pattern": "a"}], "#/allOf/1 have an enum or const and pattern; leave"),
        ([{"minLength": 3}, {"maxLength": 4}], "#/maxLength is not supported; add a type"),
        ([{"type": "array"}, {"uniqueItems": True}], "#/allOf/1/uniqueItems is not supported"),
        ([{"type": "integer"}, {"maximum": "4"}], "#/allOf/1/maximum must be a number"),
        ([{"type": "integer"}, False], "#/allOf/1 must be an object"),
        ([{"type": "object", "properties": {"a": {"type": "null"}}}, {"properties": {"a": {"type": "array"}}}],
         "#/allOf/0/properties/a and #/allOf/1/properties/a have no type in common"),
        ([{"type": "array", "items": {"maximum": 3}}, {"items": {"minimum": 1}}], "#/allOf/0/items/m.* add a type"),
        ([{"anyOf": [{"type": "array", "prefixItems": [{"allOf": [{"type": "null"}, {"const": []}]}]}, {"const": 1}]}],
         "prefixItems/0/allOf/0 and .*/1 accept no value"),  # the empty array is one
        ([{"type": "null"}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}] * 9, "refers and compares too much"),
        ([{"anyOf": [{"type": "integer"}, {"type": "string"}]}] * 20, "refers and compares too much|too large"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused(parts: list[Any], why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        regex_of_schema(json.dumps({"allOf": parts}))


def test_a_schema_that_includes_itself_is_refused() -> None:
    for schema in ({"$ref": "#/$defs/a"}, {"type": "object", "allOf": [{"properties": {"b": {"$ref": "#"}}}, {}]}):
        text = json.dumps(schema | {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}})
        if "properties" in text:
            assert re.fullmatch(regex_of_schema(text), '{"b":{"b":{}}}')
        else:
            with pytest.raises(SchemaError, match="is recursive"):
                regex_of_schema(text)
