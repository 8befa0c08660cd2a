"""JSON schemas as regular expressions: every match is a document that the schema accepts."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import pytest

from specbatch.grammar.json_schema import SchemaError, regex_of_schema
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.token_automaton import TokenAutomaton, compile_tokens

END = 256
BYTES: list[bytes | None] = [bytes([byte]) for byte in range(END)]
SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object", "description": "any"},
    {"type": "array"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": False},
    {"type": "number", "minimum": 0},
    {"type": "number", "minimum": -12.25, "exclusiveMaximum": 7.5},
    {"type": ["integer", "number"], "exclusiveMinimum": -1, "maximum": 1000000},
    {
        "type": "array",
        "items": {"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 4}, {"enum": ["a", 5, True]}]},
    },
    {
        "oneOf": [
            {"type": "number", "minimum": 3},
            {"type": "integer", "maximum": 2},
            {"type": "object", "properties": {"x": {"oneOf": [{"const": 1}, {"const": "1"}]}}, "required": ["x"]},
            {"type": "object", "properties": {"y": {}, "x": {"type": ["null", "array"]}}, "required": ["x"]},
        ]
    },
    {
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
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["name", "children"],
    },
    {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "type": ["object", "null"],
                "properties": {"head": {"$ref": "#/$defs/item"}, "tail": {"$ref": "#/$defs/list"}},
                "required": ["head", "tail"],
            },
            "item": {
                "anyOf": [{"type": "integer"}, {"type": "object", "additionalProperties": {"$ref": "#/$defs/list"}}]
            },
        },
    },
    {"type": "integer", "minimum": -75, "exclusiveMaximum": 1234.5},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": r"^[a-c]+\$$"},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": [None, 'x"\n', 1.5, {"k": [1]}]}], "minItems": 2},
    {
        "type": "object",
        "properties": {
            form: {"type": "string", "format": form} for form in ("date", "time", "date-time", "uuid", "ipv4", "email")
        },
    },
    {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            'b"\u00e9': {"const": 3},
            "c": {"allOf": [{"$ref": "#/$defs/C~1C"}, {"maxItems": 3}]},
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
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_matches_are_documents_of_the_schema(schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    expression = regex_of_schema(json.dumps(schema))
    automaton, random = compile_tokens(compile_regex(expression), BYTES, {END}, END + 1), Random(0)
    seen = {text for _ in range(60) if (text := walked(automaton, random)) is not None}
    for text in seen:
        assert re.fullmatch(expression, text)
        checker.validate(json.loads(text))
    assert len(seen) > (20 if "additionalProperties" not in schema or "properties" in schema else 0)


def walked(automaton: TokenAutomaton, random: Random) -> str | None:
    """A random match; None for one that is too long. Closing characters are likely, so that most end."""
    found = b""
    for _ in range(1500):
        allowed = automaton.allowed(automaton.after(found))
        if END in allowed and (allowed == [END] or random.random() < 0.3):
            return found.decode()
        closing = [byte for byte in allowed if byte != END and byte in b'"}]']
        among = closing if closing and random.random() < 0.4 else [byte for byte in allowed if byte != END]
        found += bytes([random.choice(among)])
    return None


def test_ranges_of_integers() -> None:
    for low in (-30, -9, -1, 0, 1, 7, 10, 98, 101):
        for high in (None, low, low + 1, low + 45, low + 400):
            schema = {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})
            expression = re.compile(regex_of_schema(json.dumps(schema)))
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
            expression = re.compile(regex_of_schema(json.dumps({"type": "number"} | given)))
        except SchemaError:
            assert not wanted
        else:
            assert {text for text in texts if expression.fullmatch(text)} == wanted


def test_recursive_schemas_end() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    expression = re.compile(regex_of_schema(json.dumps(schema)))
    depths = [bool(expression.fullmatch('{"a":' * depth + "{}" + "}" * depth)) for depth in range(5)]
    assert depths == [True, True, True, False, False]


def test_members_that_are_all_optional() -> None:
    names = "abcdefg"
    expression = re.compile(
        regex_of_schema(json.dumps({"type": "object", "properties": {x: {"const": 1} for x in names}}))
    )
    for bits in range(1 << len(names)):
        found = {x: 1 for place, x in enumerate(names) if bits >> place & 1}
        assert expression.fullmatch(json.dumps(found))
    for text in ('{"b":1,"a":1}', '{"a":1,"a":1}', '{"a":1,}', '{,"a":1}', '{"a":1"b":1}'):
        assert not expression.fullmatch(text)
    many = {"type": "object", "properties": {f"property{place}": {"type": "number"} for place in range(100)}}
    assert len(compile_regex(regex_of_schema(json.dumps(many))).table) < 15_000


def deep(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(depth - 1)} if depth else {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "is not JSON"),
        ([], "# must be an object"),
        ({"not": {}}, "#/not is not supported"),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}, {"type": "number"}]}, "#/oneOf: schemas 1 and 2 may accept"),
        ({"oneOf": [{"const": "a"}, {"type": "string"}]}, "schemas 0 and 1 may accept the same value; let them differ"),
        ({"oneOf": [{"type": "integer", "minimum": 3}, {"enum": [2, 3]}]}, "schemas 0 and 1 may accept"),
        (
            {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 3}]},
            "schemas 0 and 1 may accept",
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {"const": n}, "b": {}}, "required": ["b"]} for n in (1, 2)
                ]
            },
            "schemas 0 and 1 may accept",
        ),
        ({"oneOf": [{"type": "object", "properties": {"a": {"const": n}}} for n in (1, 2)]}, "schemas 0 and 1 may"),
        ({"oneOf": [{"type": "null"}, {"anyOf": [{"type": "array"}, {"enum": [1, None]}]}]}, "schemas 0 and 1 may"),
        ({"oneOf": [{"enum": list(range(9))}] * 500}, "schemas 0 and 1 may"),
        ({"oneOf": [{"const": n} for n in range(1000)]}, "it refers and compares too much"),
        (
            {"oneOf": [{"enum": list(range(first, first + 1000))} for first in range(0, 60_000, 1000)]},
            "too much; nest less, or use anyOf in place of oneOf",
        ),
        (
            {"$ref": "#/$defs/0", "$defs": {"900": True, **{f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(900)}}},
            "it refers and compares too much",
        ),
        ({"discriminator": {"propertyName": "a"}, "oneOf": [{}]}, "#/oneOf/0 must have the property 'a', which"),
        ({"discriminator": "a", "anyOf": [{}]}, "#/discriminator must have a propertyName"),
        ({"allOf": []}, "#/allOf must be a list that is not empty"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/.ref is recursive .#. without an end"),
        ({"anyOf": [{"$ref": "#"}]}, "#/anyOf/0/.ref is recursive"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "is recursive"),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    str(n): {"type": "object", "properties": {str(m): {"$ref": f"#/$defs/{m}"} for m in range(9)}}
                    for n in range(9)
                },
            },
            "it refers and compares too much|is too large",
        ),
        ({"$ref": "#/$defs/x"}, "which is not there"),
        ({"$ref": "http://x"}, "must refer to a place in the schema"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems is not supported"),
        ({"type": "array", "prefixItems": [{}], "minItems": 2}, "prefixItems has 1 schemas"),
        ({"type": "string", "format": "uri"}, "use one of date, "),
        ({"type": "string", "pattern": "a.*"}, "matches quotation marks"),
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern: lookahead"),
        ({"type": "string", "pattern": None}, "#/pattern must be a text"),
        ({"type": "string", "format": None}, "#/format is not supported"),
        ({"type": "object", "properties": None}, "#/properties must be an object"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "several of pattern, format and lengths"),
        ({"type": "string", "minLength": 4, "maxLength": 3}, "#/minLength is above maxLength"),
        ({"minLength": 3}, "#/minLength is not supported; add a type"),
        ({"type": "text"}, "#/type must be one of string, integer"),
        ({"type": "string", "enum": [1]}, "# has 1, which is not of its type"),
        ({"type": "number", "maximum": 1e-10}, "#/maximum of a number is too exact; use at most 9 digits"),
        ({"type": "number", "exclusiveMinimum": 1e6}, "too exact; .* and an exclusive bound below 1,000,000"),
        ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "#: no number is within"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no integer is within"),
        ({"type": "object", "required": ["a"]}, "#/required needs properties"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a', which is not in properties"),
        (deep(40), "is too large as a regular expression"),
        ({"type": "object", "properties": {f"p{n}": {} for n in range(300)}}, "#/properties is too large"),
        ({"type": "number", "minimum": False}, "#/minimum must be a number"),
        (
            {"type": "object", "properties": {}, "additionalProperties": 5},
            "#/additionalProperties must be a schema, true",
        ),
        ({"$ref": "#name"}, "must refer to a place in the schema"),
        ({"enum": [1, {"a": float("inf")}]}, "# has a number that is not finite"),
        ('{"type": "string", "type": "null"}', 'has the key "type" more than once'),
        ({"const": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_expressed_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        regex_of_schema(schema if isinstance(schema, str) else json.dumps(schema))


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
    rule = re.compile(regex_of_schema(schema), re.ASCII)
    for text in good:
        assert rule.fullmatch(text)
        jsonschema.validate(json.loads(text), json.loads(schema))
    assert not [text for text in bad if rule.fullmatch(text)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "integer", "const": 1.5}', "# has 1.5, which is not of its type"),
        ('{"type": "integer", "enum": [1, 2.5]}', "# has 2.5, which is not of its type"),
        ('{"type": "integer", "const": true}', "# has true, which is not of its type"),
        ('{"type": "integer", "const": "1"}', "which is not of its type"),
        ('{"type": "integer", "const": 1e400}', "# has Infinity, which is not of its type"),
        ('{"type": "string", "minLength": 1.5}', "#/minLength must be a whole number"),
        ('{"type": "integer", "minimum": 1.1, "maximum": 1.9}', "no integer is within its minimum and maximum"),
    ],
)
def test_other_numbers_are_no_integers(schema: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(reason)):
        regex_of_schema(schema)
