"""Schemas without `oneOf`, `not`, `if` and dependencies: what they accept is accepted by what they stand for, and the
other way round where no note says that some answers are missing."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import jsonschema
import pytest
from crossed import first_quick
from schema_answers import accepts, compiled

from specbatch.grammar.limits import RegexError
from specbatch.grammar.schema_overlap import are_disjoint
from specbatch.grammar.schema_rewrite import readings, target

PARTS: tuple[Any, ...] = (
    True,
    False,
    {"description": "anything"},
    {"type": "integer", "minimum": 2},
    {"exclusiveMaximum": 7, "maxLength": 3, "maxItems": 2},
    {"type": ["string", "null", "number"], "exclusiveMinimum": 1.5, "minLength": 1},
    {"exclusiveMaximum": 5, "minLength": 2, "minItems": 1, "type": ["integer", "string", "array", "object"]},
    {"enum": [1, 2, 3, "ab", None, "abcd", {"a": 3}]},
    {"enum": ["ab", "", "abd", "b)", True]},
    {"const": 3},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string", "maxLength": 2}, {"type": ["array", "null"]}]},
    {"oneOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": 2}, {"$ref": "#/$defs/o"}]},
    {"$ref": "#/$defs/o"},
    {"required": ["a"]},
    {"required": ["a"], "properties": {"a": {"type": ["integer", "null"], "minimum": 2}}},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 4}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": ["array", "null"], "items": {"type": "integer"}},
    {"not": {"type": ["string", "array"]}},
    {"not": {"required": ["b"]}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
    {"dependentRequired": {"b": ["a"]}},
    {"dependentSchemas": {"a": {"properties": {"a": {"minimum": 2}}}}},
    {"allOf": [{"minItems": 2, "minimum": 3}, {"type": ["object", "array", "integer"]}]},
)
DEFS = {"o": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 5]}}, "required": ["b"]}}
VALUES: list[Any] = [
    None,
    *range(9),
    2.5,
    "",
    "a",
    "ab",
    "abc",
    "abcd",
    "dd",
    "b)",
    True,
    False,
    [],
    [1],
    [1, 2],
    [3, 4],
]
VALUES += [["a"], {}, {"a": 1}, {"a": 3}, {"a": None}, {"b": 1}, {"b": 5}, {"a": 2, "b": 1}, {"a": 1, "b": 5}]
VALUES += [{"a": "x", "b": 1}, {"c": 1}, {"a": 3, "c": "x"}]


def draw(kind: str, random: Random) -> dict[str, Any]:
    """A schema that has some of the parts."""
    parts = random.choices(PARTS, k=3)
    if kind == "if":
        return {"if": parts[0], "then": parts[1], "else": parts[2]}
    if kind == "not":
        return {"not": {"anyOf": parts[:2]} if random.random() < 0.5 else {"allOf": parts[:2]}}
    return {kind: parts[: random.randint(2, 3)]}


@pytest.mark.parametrize("kind", first_quick(2, ["oneOf", "if", "not", "allOf", "anyOf"]))
def test_the_same_values_are_accepted(kind: str) -> None:
    exact, narrowed, random = 0, 0, Random(kind)
    for _ in range(40):
        schema = draw(kind, random) | {"$defs": DEFS}
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        try:
            grammar = compiled(schema)
        except RegexError as error:
            is_empty = "Unsatisfiable" in str(error) and not readings(json.dumps(schema)).notes
            if is_empty and any(map(is_valid, VALUES)):
                pytest.fail(f"{schema}: {error}")
            continue
        is_narrow = any("no answers" in note for note in readings(json.dumps(schema)).notes)
        for value in VALUES:
            texts = [json.dumps(value)]
            if isinstance(value, dict):  # properties have one order
                texts = [json.dumps(dict(pairs)) for pairs in itertools.permutations(value.items())]
            found = any(accepts(grammar, text) for text in texts)
            assert not found or is_valid(value), (schema, value)
            is_left_out = is_narrow or (isinstance(value, dict) and "properties" in json.dumps(schema))
            assert found or is_left_out or not is_valid(value), (schema, value)
        narrowed += is_narrow
        exact += not is_narrow
    assert exact > 8
    assert narrowed > 1 or kind in ("allOf", "anyOf")


def test_schemas_without_common_values() -> None:
    """No pair that is called disjoint accepts the same value."""
    found = 0
    for one, other in itertools.product(PARTS, repeat=2):
        validators = [jsonschema.Draft202012Validator({"allOf": [part], "$defs": DEFS}) for part in (one, other)]
        if are_disjoint([one, other], lambda ref: target({"$defs": DEFS}, ref, "#"), lambda work: None):
            found += 1
            assert not [value for value in VALUES if all(each.is_valid(value) for each in validators)]
    assert found > 60


def nested(depth: int) -> dict[str, Any]:
    inner = nested(depth - 1) if depth else {"type": "string"}
    return {"oneOf": [{"type": "object", "properties": {"a": inner}, "required": ["a"]}, {"type": "object"}]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}", "3"]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "not": {"enum": ["up"]}}, ['"u"', '"upp"'], ['"up"']),
        (
            {
                "type": "object",
                "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
                "required": ["kind"],
                "if": {"properties": {"kind": {"const": "a"}}},
                "then": {"required": ["n"]},
            },
            ['{"kind": "a", "n": 1}', '{"kind": "b"}'],
            ['{"kind": "a"}'],
        ),
        (
            {"properties": {"x": {"$ref": "#/components/y"}}, "components": {"y": {"not": {"type": "null"}}}},
            ['{"x": 1}'],
            ['{"x": null}'],
        ),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[3,1,2]"], ["[1,1]", "[4]"]),
        ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[3,1]", '"a"', "{}"], ["[1,1]", "[4]"]),
        (
            {
                "anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "b"}}}],
                "discriminator": {"propertyName": "a"},
            },
            ['{"a":1}', '{"a":"b"}'],
            ['{"a":"c"}'],
        ),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, ['["a"]'], ['["a","b"]']),
        (nested(1), ['{"a":{"a":"x"}}', '{"b":1}'], ["3", '{"a":{}}', '{"a":{"a":3}}']),
    ],
)
def test_documents(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    grammar = compiled(schema)
    for text in good:
        assert is_valid(json.loads(text))
        assert accepts(grammar, text), text
    for text in bad:
        assert not is_valid(json.loads(text))
        assert not accepts(grammar, text), text


def test_what_would_be_too_large_is_refused() -> None:
    """Each of these schemas is limited by what eleven others refuse, again and again."""
    levels = {"p0": {"type": "string"}} | {
        f"p{level}": {
            "oneOf": [{"required": [f"{n}"], "properties": {"p": {"$ref": f"#/$defs/p{level - 1}"}}} for n in range(12)]
        }
        for level in range(1, 9)
    }
    with pytest.raises(RegexError, match=r"too large|too much work"):
        compiled({"$ref": "#/$defs/p8", "$defs": levels})
