"""Regular expressions for the strings, numbers and literals of JSON schemas, and checks of their keywords."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

from specbatch.config.settings import is_number, is_whole
from specbatch.errors import MOST
from specbatch.grammar.limits import RegexError, spend
from specbatch.grammar.number_ranges import DIGITS, INTEGER, LARGEST_EXCLUSIVE, Bound, any_of, decimals, integers
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.regex_parser import match_lengths, matches_whole_text, without_anchors
from specbatch.grammar.schema_overlap import KINDS
from specbatch.grammar.schema_rewrite import SchemaError

KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_FRACTION = r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
SIMPLE = {
    "string": f'"{_CHARACTER}*"',
    "integer": f"-?{INTEGER}",
    "number": f"-?{INTEGER}{_FRACTION}",
    "boolean": "(?:true|false)",
    "null": "null",
}
_DATE = (
    "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z0-9]+(?:-[a-z0-9]+)*)+",
}
_UNSAFE = [*range(0x20), ord('"'), ord("\\")]  # bytes that a string of JSON does not have as they are
TYPES: dict[str, Any] = KINDS | {"integer": int, "number": (int, float)}


def only(place: str, keys: Collection[str], known: set[str]) -> None:
    """Refuse keywords that are not known here."""
    if unknown := sorted(set(keys) - known):
        raise SchemaError(f"{place}/{unknown[0]} has no expression here")


def list_of(schema: Mapping[str, Any], name: str, place: str) -> list[Any]:
    found = schema[name]
    if not isinstance(found, list) or not found:
        raise SchemaError(f"{place}/{name} must be a list that is not empty")
    return found


def types(schema: Mapping[str, Any], place: str) -> list[str] | None:
    """The types that a schema states, None if it states none."""
    if "type" not in schema:
        return None
    kinds = schema["type"]
    kinds = kinds if isinstance(kinds, list) and kinds else [kinds]
    if not all(isinstance(kind, str) and kind in KEYWORDS for kind in kinds):
        raise SchemaError(f"{place}/type must be one of {', '.join(KEYWORDS)}, or a list of them")
    return list(dict.fromkeys(kinds))


def bounds(schema: Mapping[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
    least, most = as_integer(schema.get(low, 0)), as_integer(schema.get(high))
    for name, value in ((low, least), (high, most)):
        if name in schema and (value is None or not (is_whole(value) and 0 <= value <= MOST)):
            raise SchemaError(f"{place}/{name} must be a whole number from 0 to {MOST}")
    if most is not None and least > most:
        raise SchemaError(f"{place}/{low} is above {high}")
    return least, most


def literals(schema: Mapping[str, Any], keys: Collection[str], place: str) -> str:
    only(place, keys, {"type", "enum"} if "enum" in keys else {"type", "const"})
    values = list_of(schema, "enum", place) if "enum" in keys else [schema["const"]]
    kinds = schema.get("type", list(TYPES))
    kinds = set(map(str, kinds if isinstance(kinds, list) else [kinds]))
    spend(10 * len(values))
    for value in values:
        if not any(is_of(value, kind) for kind in kinds):
            raise SchemaError(f"{place} has {json.dumps(value)}, which is not of its type")
    return any_of([literal(value if "number" in kinds else as_integer(value), place) for value in values])


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value has a type. 1.0 is an integer (JSON Schema 2020-12, core, section 4.2.3)."""
    found = as_integer(value) if kind == "integer" else value
    return isinstance(found, TYPES.get(str(kind), ())) and (kind == "boolean" or not isinstance(found, bool))


def as_integer(value: Any) -> Any:
    """A value, in which a number without a fraction, such as 1.0 or 2E+1, is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def literal(value: Any, place: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError(f"{place} has half of a surrogate pair, which is not text") from None
    except ValueError:
        raise SchemaError(f"{place} has a number that is not finite, which JSON cannot hold") from None
    return re.escape(text)


def string(schema: Mapping[str, Any], place: str) -> str:
    if not schema.keys() & KEYWORDS["string"]:
        return SIMPLE["string"]
    least, most = bounds(schema, "minLength", "maxLength", place)
    pattern, form = schema.get("pattern"), schema.get("format")
    if "pattern" in schema and not isinstance(pattern, str):
        raise SchemaError(f"{place}/pattern must be a text")
    has_lengths = bool(least or most is not None)
    if pattern is not None and has_lengths:
        shortest, longest = match_lengths(_inside_string(pattern, place))
        has_lengths = shortest < least or (most is not None and longest > most)
    if sum((pattern is not None, form is not None, has_lengths)) > 1:
        raise SchemaError(
            f"{place} has several of pattern, format and lengths; use one, such as pattern ^[a-z]{{2,9}}$"
        )
    if "format" in schema:
        if not isinstance(form, str) or form not in _FORMATS:
            raise SchemaError(f"{place}/format is not supported; use one of {', '.join(_FORMATS)}, or a pattern")
        return f'"{_FORMATS[form]}"'
    if pattern is None:
        return f'"{_CHARACTER}{{{least},{"" if most is None else most}}}"'
    return f'"(?:{_inside_string(pattern, place)})"'


def _inside_string(pattern: str, place: str) -> str:
    """A pattern without the marks of its beginning and end, whose matches a string of JSON holds as they are."""
    if not matches_whole_text(pattern):
        raise SchemaError(f"{place}/pattern matches parts of texts")
    try:
        automaton = compile_regex(pattern)
    except RegexError as error:
        raise SchemaError(f"{place}/pattern: {error}") from None
    if (automaton.table[:, _UNSAFE] >= 0).any():
        raise SchemaError(f"{place}/pattern matches what a string of JSON cannot hold as it is")
    return without_anchors(pattern)


def integer(schema: Mapping[str, Any], place: str) -> str:
    least, most = -math.inf, math.inf
    for name in KEYWORDS["integer"] & schema.keys():
        value = as_integer(schema[name])
        if not is_number(value):
            raise SchemaError(f"{place}/{name} must be a number")
        if "inimum" in name:
            least = max(least, math.floor(value) + 1 if name == "exclusiveMinimum" else math.ceil(value))
        else:
            most = min(most, math.ceil(value) - 1 if name == "exclusiveMaximum" else math.floor(value))
    if least > most:
        raise SchemaError(f"{place}: no integer is within its minimum and maximum")
    return integers(least, most)


def number(schema: Mapping[str, Any], place: str) -> str:
    lower, upper = list[Bound](), list[Bound]()
    for name in sorted(KEYWORDS["number"] & schema.keys()):
        value, is_open = schema[name], name.startswith("exclusive")
        if not is_number(value):
            raise SchemaError(f"{place}/{name} must be a number")
        exact = Decimal(repr(value))
        if int(exact.as_tuple().exponent) < -DIGITS or (is_open and abs(exact) >= LARGEST_EXCLUSIVE):
            works = f"use at most {DIGITS} digits after the point" + (
                f", and an exclusive bound below {LARGEST_EXCLUSIVE:,}" if is_open else ""
            )
            raise SchemaError(f"{place}/{name} of a number is too exact; {works}")
        (lower if "inimum" in name else upper).append(Bound(exact, is_open))
    found = decimals(max(lower, default=None), min(upper, key=lambda one: (one.value, not one.is_open), default=None))
    if found is None:
        raise SchemaError(f"{place}: no number is within its minimum and maximum")
    return found
