"""Mutated schemas and expressions: each compiles, or is refused in one line."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzzing import Fuzz
from mutate import dump_json, mutate_value

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.grammar.limits import RegexError
from specbatch.grammar.regex import compile_regex

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -7, "exclusiveMaximum": 120},
        "b": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}, {"enum": [1, "x", None]}]}, "maxItems": 3},
        "c": {"type": ["string", "null"], "pattern": "^[a-z]{2}$"},
        "d": {"type": "array", "prefixItems": [{"type": "number", "minimum": 0}, {"const": [True]}]},
        "e": {"type": "object", "additionalProperties": {"type": "string", "format": "date"}},
        "f": {
            "oneOf": [{"$ref": "#/$defs/y"}, {"enum": [1.5, "z"]}, {"type": "number", "minimum": 2, "maximum": 9.25}]
        },
    },
    "required": ["b", "a"],
    "$defs": {
        "x": {"type": "string", "minLength": 1, "maxLength": 4},
        "y": {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}, "y": {"$ref": "#/$defs/y"}}},
                {"type": "object", "properties": {"k": {"enum": [2, 3]}}},
            ],
            "discriminator": {"propertyName": "k"},
        },
    },
}
EXPRESSIONS = (r"(?:ab|[^c]*){2,3}d?", r"^[a-z]{2}\d+(x|y)*$", r"(?P<n>\w+)@[\s.]+?é")
CHARACTERS = "()[]{}|*+?\\^$.-,0129PLdwsbBZ<>=!:\ud800é\x00\n"


def test_schemas(fuzz: Fuzz) -> None:
    for random in fuzz.rounds(quick=100):
        value = mutate_value(random, json.loads(json.dumps(SCHEMA)))
        try:
            SamplingParams(json_schema=random.choice((value, dump_json(value))))
            fuzz.outcome("accepted")
        except SpecbatchError as error:
            fuzz.refused(error)


def test_expressions(fuzz: Fuzz) -> None:
    for random in fuzz.rounds(quick=300):
        expression = mutated(random, random.choice(EXPRESSIONS))
        try:
            SamplingParams(regex=expression)
            compile_regex(expression)
            fuzz.outcome("accepted")
        except SpecbatchError as error:
            fuzz.refused(error)
        except RegexError:
            fuzz.outcome("too large")


def mutated(random: Random, text: str) -> str:
    """With one to four other characters in it."""
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(text) + 1)
        text = text[:place] + random.choice(CHARACTERS) + text[place + random.randrange(2) :]
    return text
