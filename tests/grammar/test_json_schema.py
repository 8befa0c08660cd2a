"""JSON schemas: every answer is a document that the schema accepts, and which engine constrains it."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import pytest
from schema_answers import accepts, compiled, walked

from specbatch import SamplingParams, SpecbatchError
from specbatch.grammar.compiler import Grammar
from specbatch.grammar.host_matcher import HostGrammar
from specbatch.grammar.json_schema import regex_of_schema
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.schema_engine import checked_schema
from specbatch.grammar.schema_rewrite import SchemaError
from specbatch.grammar.token_automaton import TokenAutomaton

DEVICE, HOST = TokenAutomaton, HostGrammar
PETS: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
    "$defs": {
        "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}},
        "dog": {
            "type": "object",
            "properties": {"age": {"type": "integer"}, "kind": {"enum": ["dog", "wolf"]}},
            "required": ["age"],
        },
    },
}
LIST: dict[str, Any] = {
    "$ref": "#/$defs/list",
    "$defs": {
        "list": {
            "type": ["object", "null"],
            "properties": {"head": {"$ref": "#/$defs/item"}, "tail": {"$ref": "#/$defs/list"}},
            "required": ["head", "tail"],
            "additionalProperties": False,
        },
        "item": {"anyOf": [{"type": "integer"}, {"type": "object", "additionalProperties": {"$ref": "#/$defs/list"}}]},
    },
}
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
SCHEMAS: tuple[tuple[type[Grammar], dict[str, Any]], ...] = (
    (HOST, {}),
    (HOST, {"type": "object", "description": "any"}),
    (HOST, {"type": "array"}),
    (DEVICE, {"type": "object", "additionalProperties": {"type": "integer"}, "x-vendor": 3, "version": 2, "id": "a"}),
    (DEVICE, {"type": "object", "additionalProperties": False}),
    (DEVICE, {"type": "number", "minimum": 0}),
    (DEVICE, {"type": "number", "minimum": -12.25, "exclusiveMaximum": 7.5}),
    (DEVICE, {"type": ["integer", "number"], "exclusiveMinimum": -1, "maximum": 1000000}),
    (
        DEVICE,
        {
            "type": "array",
            "items": {"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 4}, {"enum": ["a", 5, True]}]},
        },
    ),
    (DEVICE, PETS),
    (
        HOST,
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "children": {"type": "array", "items": {"$ref": "#"}},
            },
            "required": ["name", "children"],
        },
    ),
    (HOST, LIST),
    (DEVICE, {"type": "integer", "minimum": -75, "exclusiveMaximum": 1234.5}),
    (DEVICE, {"type": ["string", "null"], "minLength": 2, "maxLength": 4}),
    (DEVICE, {"type": "string", "pattern": r"^[a-c]+\$$"}),
    (HOST, {"type": "string", "pattern": r"^[a-c\"\\]+$"}),  # quotation marks and backslashes
    (HOST, {"type": "string", "pattern": "^a|b$", "maxLength": 9}),
    (HOST, {"type": "string", "format": "uri", "maxLength": 40}),
    (
        DEVICE,
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"enum": [None, 'x"\n', 1.5, {"k": [1]}]}],
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    (HOST, {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}}),
    (DEVICE, {"type": "object", "properties": {form: {"type": "string", "format": form} for form in FORMATS}}),
    (
        DEVICE,
        {
            "type": "object",
            "properties": {
                "a": {"type": "boolean"},
                'b"\u00e9': {"const": 3},
                "c": {"allOf": [{"$ref": "#/$defs/C~1C"}]},
                "d": {"type": "integer"},
            },
            "required": ["c", 'b"\u00e9'],
            "additionalProperties": False,
            "$defs": {
                "C/C": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 4,
                    "items": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "maxItems": 0}]},
                }
            },
        },
    ),
    (HOST, {"properties": {"a": {}}, "required": ["b"], "type": "object", "patternProperties": {"^x": {"const": 1}}}),
    (HOST, {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}),
    (HOST, {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 44, "multipleOf": 4}]}),
    (HOST, {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2}),
)


@pytest.mark.parametrize(("path", "schema"), SCHEMAS)
def test_answers_are_documents_of_the_schema(path: type[Any], schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    grammar, random = compiled(schema), Random(0)
    assert isinstance(grammar, path)
    seen = {text for _ in range(60) if (text := walked(grammar, random)) is not None}
    for text in seen:
        checker.validate(json.loads(text))
    assert len(seen) > (5 if schema.get("additionalProperties") is not False or "properties" in schema else 0)


def test_ranges_of_integers() -> None:
    for low in (-30, -9, -1, 0, 1, 7, 10, 98, 101):
        for high in (None, low, low + 1, low + 45, low + 400):
            schema = {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})
            expression = re.compile(regex_of_schema(schema))
            for value in range(-40, 1200):
                assert bool(expression.fullmatch(str(value))) == (low <= value and (high is None or value <= high))


def test_ranges_of_numbers() -> None:
    """Of numbers without an exponent and with up to 9 digits after the point."""
    bounds = [None, "0", "1", "-1", "0.5", "-0.5", "99.95", "100", "-12.25", "0.001", "7.999999999"]
    steps = ("0", "0.000000001", "-0.000000001", "0.01", "-0.01", "0.5", "-0.5", "1", "-1", "10", "-10", "100")
    texts = {f"{Decimal(bound) + Decimal(step):f}" for bound in bounds if bound for step in steps}
    texts |= {text + ("0" if "." in text else ".0") for text in texts}
    texts = {text for text in texts if re.fullmatch(r"-?\d+(\.\d{1,9})?", text) and float(text)} | {"0", "0.000"}
    for low, high, is_open in itertools.product(bounds, bounds, (False, True)):
        names = ("exclusiveMinimum", "exclusiveMaximum") if is_open else ("minimum", "maximum")
        given = {name: float(bound) for name, bound in zip(names, (low, high), strict=True) if bound is not None}
        if not given:
            continue
        wanted = {
            text
            for text in texts
            if (low is None or Decimal(text) > Decimal(low) or (not is_open and Decimal(text) == Decimal(low)))
            and (high is None or Decimal(text) < Decimal(high) or (not is_open and Decimal(text) == Decimal(high)))
        }
        try:
            expression = re.compile(regex_of_schema({"type": "number"} | given))
        except SchemaError:
            assert not wanted
        else:
            assert {text for text in texts if expression.fullmatch(text)} == wanted


def test_recursive_schemas_go_as_deep_as_the_model_wants() -> None:
    grammar = compiled({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False})
    assert all(accepts(grammar, '{"a":' * depth + "{}" + "}" * depth) for depth in (0, 1, 5, 50))
    assert not accepts(grammar, '{"a":' * 5 + "{}" + "}" * 4)


def test_members_that_are_all_optional() -> None:
    names = "abcdefg"
    expression = re.compile(regex_of_schema({"type": "object", "properties": {x: {"const": 1} for x in names}}))
    for bits in range(1 << len(names)):
        found = {x: 1 for place, x in enumerate(names) if bits >> place & 1}
        assert expression.fullmatch(json.dumps(found))
    for text in ('{"b":1,"a":1}', '{"a":1,"a":1}', '{"a":1,}', '{,"a":1}', '{"a":1"b":1}'):
        assert not expression.fullmatch(text)
    many = {"type": "object", "properties": {f"property{place}": {"type": "number"} for place in range(100)}}
    assert len(compile_regex(regex_of_schema(many)).table) < 15_000


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "# must be an object"),
        (False, "it accepts nothing"),
        ('{"type": "string", "type": "null"}', 'has the key "type" more than once'),
        ({"$ref": "#/$defs/x"}, "#/$ref refers to #/$defs/x, which is not there"),
        ({"type": "text"}, "Invalid type: text"),
        ({"contains": {}}, 'Unimplemented keys: ["contains"]'),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable schema"),
        ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]}, "#/oneOf has a schema whose opposite cannot be written"),
        ({"not": {"pattern": "a"}}, "#/not has a schema whose opposite cannot be written; let schemas differ"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems needs items with an"),
        ({"anyOf": [{}], "const": -(2**62) - 1}, "it has an integer of 63 bits; use integers from -2^62 to 2^62"),
    ],
)
def test_schemas_that_no_engine_has_are_refused_in_one_line(schema: Any, why: str) -> None:
    with pytest.raises(SpecbatchError, match=re.escape(why)) as caught:
        SamplingParams(json_schema=schema)
    assert "\n" not in str(caught.value)


def test_what_is_ignored_is_noted() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "version": 3,
        "properties": {"a": {"type": "string", "format": "color", "x-a": 1}, "b": {"x-a": 2}},
    }
    assert checked_schema(json.dumps(schema)).notes == [
        "#/properties/a: x-a is ignored",
        "#/properties/a: format color is ignored",
        "#: version is ignored",
    ]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ('{"type": "integer", "const": 1.0}', ["1"], ["1.0", "2", "10"]),
        ('{"type": "integer", "const": 1e2}', ["100"], ["1e2", "1"]),
        ('{"type": "integer", "const": -0}', ["0"], ["-0", "1"]),
        ('{"type": "integer", "const": -0.0}', ["0"], ["-0.0", "1"]),
        ('{"type": "integer", "const": 1e16}', ["10000000000000000"], ["1e16"]),
        ('{"type": "integer", "enum": [2E+1, 100.0, 3]}', ["20", "100", "3"], ["2", "20.0"]),
        ('{"type": ["integer", "string"], "enum": [1.0, "1.0"]}', ["1", '"1.0"'], ["1.0"]),
        ('{"type": ["null", "number"], "enum": [1.0, null]}', ["1.0", "null"], ["2"]),
        ('{"const": 1.0}', ["1.0"], ["2"]),
        ('{"anyOf": [{"type": "integer", "const": 3.0}, {"type": "null"}]}', ["3", "null"], ["3.0"]),
        ('{"allOf": [{"type": "integer"}, {"const": 1.0}]}', ["1"], ["1.0"]),
        ('{"allOf": [{"type": "integer"}, {"enum": [1.0, 1.5, 2]}]}', ["1", "2"], ["1.5"]),
        ('{"type": "integer", "minimum": 1.0, "maximum": 3e0}', ["1", "3"], ["0", "4"]),
        ('{"type": "integer", "exclusiveMinimum": 1.0, "exclusiveMaximum": 3.0}', ["2"], ["1", "3"]),
        ('{"type": "integer", "minimum": 1.5, "maximum": 2.5}', ["2"], ["1", "3"]),
        ('{"type": "array", "items": {"const": 1, "type": "integer"}, "minItems": 2.0}', ["[1,1]"], ["[1]", "[]"]),
        ('{"type": "array", "items": {"type": "null"}, "maxItems": 1e0}', ["[null]", "[]"], ["[null,null]"]),
        ('{"type": "string", "minLength": 1.0, "maxLength": 2.0}', ['"a"', '"ab"'], ['""', '"abc"']),
        (
            '{"type": "object", "properties": {"a": {"type": "integer", "enum": [1.0]}}, "required": ["a"]}',
            ['{"a": 1}'],
            ['{"a": 2}'],
        ),
    ],
)  # fmt: skip
def test_a_number_without_a_fraction_is_an_integer(schema: str, good: list[str], bad: list[str]) -> None:
    """JSON Schema 2020-12, core, section 4.2.3, and validation, section 6.1.1."""
    grammar = compiled(schema)
    for text in good:
        assert accepts(grammar, text)
        jsonschema.validate(json.loads(text), json.loads(schema))
    assert not [text for text in bad if accepts(grammar, text)]


@pytest.mark.parametrize("kind", ["plain", "draft 4", "merged"])
def test_exclusive_bounds_on_the_host(kind: str) -> None:
    """Where both bounds are in the same unit, llguidance 1.9.1 accepts a whole exclusive one."""
    for low, high in itertools.product((-2, -1, -0.5, 0, 0.5, 1, 10), (-1, -0.25, 0, 0.25, 0.5, 1.5, 2, 10.5)):
        if low >= high:
            continue
        exclusive = {"exclusiveMinimum": low}, {"exclusiveMaximum": high}
        if kind == "draft 4":
            exclusive = {"minimum": low, "exclusiveMinimum": True}, {"maximum": high, "exclusiveMaximum": True}
        schema = {"type": "number"} | exclusive[0] | exclusive[1]
        if kind == "merged":
            schema = {"type": "number", "allOf": list(exclusive)}
        grammar = compiled({"type": "array", "items": schema, "contentSchema": {}, "allOf": [{"minItems": 1}]})
        assert isinstance(grammar, HOST)
        for value in (low, high, (low + high) / 2, low - 1, high + 1):
            assert accepts(grammar, json.dumps([value])) == (low < value < high)
