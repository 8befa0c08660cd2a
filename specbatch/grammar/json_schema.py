"""Translates JSON schemas into regular expressions, every match of which is a document that the schema accepts.

Keywords that a regular expression cannot express, or that are not supported, are refused: none is ignored. Properties
come in the order of the schema, without others, and one space is allowed between tokens of JSON: a model that may write
any number of them can go on forever. This is so in Outlines (Willard and Louf 2023, arXiv 2307.09702), too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from specbatch.errors import MOST
from specbatch.grammar.regex import RegexError, compile_regex, without_anchors
from specbatch.settings import is_number, is_whole
from specbatch.text_files import UnreadableError, parse_json

_LONGEST = 1 << 20  # characters of an expression
DEPTH = 2  # arrays and objects in a value without a schema
_ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples",
    "readOnly", "title", "writeOnly",
}  # fmt: skip
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_INSTEAD = {
    "oneOf": "use anyOf",
    "allOf": "use it with one schema, or write the schemas as one",
    "uniqueItems": "leave it out, or use prefixItems",
    "multipleOf": "leave it out, or use enum",
    "minimum": "of a number only 0 is supported; use an integer, or leave it out",
}
_S = "[ ]?"
_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_INTEGER = "(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_SIMPLE = {
    "string": f'"{_CHARACTER}*"',
    "integer": f"-?{_INTEGER}",
    "number": f"-?{_INTEGER}{_FRACTION}",
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
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


class SchemaError(RegexError):
    """Why a schema cannot be translated; names the place in it."""


@lru_cache(1024)
def regex_of_schema(text: str) -> str:
    """The expression for a schema, given as JSON. Raises SchemaError."""
    try:
        root = parse_json(text, unique=True)
    except UnreadableError as error:
        raise SchemaError(f"{error}; write a JSON schema") from None
    try:
        return _Schema(root).regex(root, "#", ())
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None


class _Schema:
    def __init__(self, root: Any) -> None:
        self._root = root

    def regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        """refs: the references that lead to the schema."""
        found = self._regex(schema, place, refs)
        if len(found) > _LONGEST:  # arrays and references in each other repeat what is in them
            raise SchemaError(f"{place} is too large as a regular expression; nest less")
        return found

    def _regex(self, schema: Any, place: str, refs: tuple[str, ...]) -> str:
        if schema is True:
            return _anything(DEPTH)
        if not isinstance(schema, dict):
            raise SchemaError(f"{place} must be an object")
        keys = schema.keys() - _ANNOTATIONS
        if not keys:
            return _anything(DEPTH)
        if "$ref" in keys:
            _only(place, keys, {"$ref"})
            return self._referenced(schema["$ref"], place, refs)
        for name in ("anyOf", "allOf"):
            if name in keys:
                _only(place, keys, {name})
                options = _list_of(schema, name, place)
                if name == "allOf" and len(options) > 1:
                    raise SchemaError(f"{place}/allOf is not supported; {_INSTEAD['allOf']}")
                return _any_of(self.regex(item, f"{place}/{name}/{n}", refs) for n, item in enumerate(options))
        if keys & {"enum", "const"}:
            return _literals(schema, keys, place)
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) and kinds else [kinds]
        if not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
            if "type" in keys:
                raise SchemaError(f"{place}/type must be one of {', '.join(_KEYWORDS)}, or a list of them")
            _only(place, keys, {"type"})
        known = {"type"}.union(*(_KEYWORDS[kind] for kind in kinds))
        if "number" in kinds:  # the bounds of an integer would not hold for it
            known -= _KEYWORDS["integer"] - _KEYWORDS["number"]
        _only(place, keys, known)
        return _any_of(self._of_type(kind, schema, place, refs) for kind in kinds)

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        if kind == "string":
            return _string(schema, place)
        if kind == "integer":
            return _integer(schema, place)
        if kind == "number" and "minimum" in schema:
            if not is_number(schema["minimum"]) or schema["minimum"] != 0:
                raise SchemaError(f"{place}/minimum: {_INSTEAD['minimum']}")
            return _INTEGER + _FRACTION
        if kind == "array":
            return self._array(schema, place, refs)
        if kind == "object":
            return self._object(schema, place, refs)
        return _SIMPLE[kind]

    def _referenced(self, ref: Any, place: str, refs: tuple[str, ...]) -> str:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise SchemaError(f"{place}/$ref must refer to a place in the schema, such as #/$defs/Name")
        if ref in refs:
            raise SchemaError(
                f"{place}/$ref is recursive ({ref}), which no regular expression can be; nest a fixed depth"
            )
        found = self._root
        for part in ref[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise SchemaError(f"{place}/$ref refers to {ref}, which is not there")
            found = found[key]
        return self.regex(found, ref, (*refs, ref))

    def _array(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", place)
        if "prefixItems" in schema:
            items = _list_of(schema, "prefixItems", place)
            if not least <= len(items) <= (len(items) if most is None else most):
                raise SchemaError(f"{place}/prefixItems has {len(items)} schemas; use as many minItems and maxItems")
            parts = [self.regex(item, f"{place}/prefixItems/{n}", refs) for n, item in enumerate(items)]
            return rf"\[{_S}{f'{_S},{_S}'.join(parts)}{_S}\]"
        if most == 0:
            return rf"\[{_S}\]"
        item = self.regex(schema["items"], f"{place}/items", refs) if "items" in schema else _anything(DEPTH - 1)
        return _repeated(r"\[", item, r"\]", least, most)

    def _object(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...]) -> str:
        required, properties = schema.get("required", []), schema.get("properties")
        more = schema.get("additionalProperties", True)
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{place}/required must be a list of names")
        if not isinstance(more, (bool, dict)):
            raise SchemaError(f"{place}/additionalProperties must be a schema, true or false")
        if properties is None:
            if required:
                raise SchemaError(f"{place}/required needs properties of these names")
            if more is False:
                return rf"\{{{_S}\}}"
            value = _anything(DEPTH - 1) if more is True else self.regex(more, f"{place}/additionalProperties", refs)
            return _repeated(r"\{", f"{_SIMPLE['string']}{_S}:{_S}{value}", r"\}", 0, None)
        if not isinstance(properties, dict):
            raise SchemaError(f"{place}/properties must be an object")
        if missing := [name for name in required if name not in properties]:
            raise SchemaError(f"{place}/required has {missing[0]!r}, which is not in properties; add it there")
        parts = [
            f"{_literal(name, place)}{_S}:{_S}{self.regex(value, f'{place}/properties/{name}', refs)}"
            for name, value in properties.items()
        ]
        if sum(map(len, parts)) > _LONGEST:
            raise SchemaError(f"{place}/properties is too large; use fewer properties")
        return _members(parts, [name in required for name in properties])


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
    options = [_SIMPLE[kind] for kind in ("string", "number", "boolean", "null")]
    if depth:
        inner = _anything(depth - 1)
        options.append(_repeated(r"\[", inner, r"\]", 0, None))
        options.append(_repeated(r"\{", f"{_SIMPLE['string']}{_S}:{_S}{inner}", r"\}", 0, None))
    return _any_of(options)


def _any_of(options: Any) -> str:
    found = list(options)
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _only(place: str, keys: Collection[str], known: set[str]) -> None:
    """Refuse keywords that are not known here."""
    if unknown := sorted(set(keys) - known, key=lambda name: (name not in _INSTEAD, name)):
        advice = _INSTEAD.get(unknown[0]) or (
            f"here are supported: {', '.join(sorted(known))}" if known != {"type"} else "add a type"
        )
        raise SchemaError(f"{place}/{unknown[0]} is not supported; {advice}")


def _list_of(schema: Mapping[str, Any], name: str, place: str) -> list[Any]:
    found = schema[name]
    if not isinstance(found, list) or not found:
        raise SchemaError(f"{place}/{name} must be a list that is not empty")
    return found


def _bounds(schema: Mapping[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, most)):
        if name in schema and (value is None or not (is_whole(value) and 0 <= value <= MOST)):
            raise SchemaError(f"{place}/{name} must be a whole number from 0 to {MOST}")
    if most is not None and least > most:
        raise SchemaError(f"{place}/{low} is above {high}")
    return least, most


def _literals(schema: Mapping[str, Any], keys: Collection[str], place: str) -> str:
    _only(place, keys, {"type", "enum"} if "enum" in keys else {"type", "const"})
    values = _list_of(schema, "enum", place) if "enum" in keys else [schema["const"]]
    kinds = schema.get("type", list(_TYPES))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for value in values:
        if not any(_is(value, kind) for kind in kinds):
            raise SchemaError(f"{place} has {json.dumps(value)}, which is not of its type")
    return _any_of(_literal(value, place) for value in values)


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, _TYPES.get(str(kind), ())) and (kind == "boolean" or not isinstance(value, bool))


def _literal(value: Any, place: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError(f"{place} has half of a surrogate pair, which is not text") from None
    except ValueError:
        raise SchemaError(f"{place} has a number that is not finite, which JSON cannot hold") from None
    return re.escape(text)


def _string(schema: Mapping[str, Any], place: str) -> str:
    if not schema.keys() & _KEYWORDS["string"]:
        return _SIMPLE["string"]
    least, most = _bounds(schema, "minLength", "maxLength", place)
    pattern, form = schema.get("pattern"), schema.get("format")
    if sum((pattern is not None, form is not None, bool(least or most is not None))) > 1:
        raise SchemaError(
            f"{place} has several of pattern, format and lengths; use one, such as pattern ^[a-z]{{2,9}}$"
        )
    if form is not None:
        if not isinstance(form, str) or form not in _FORMATS:
            raise SchemaError(f"{place}/format is not supported; use one of {', '.join(_FORMATS)}, or a pattern")
        return f'"{_FORMATS[form]}"'
    if pattern is None:
        return f'"{_CHARACTER}{{{least},{"" if most is None else most}}}"'
    if not isinstance(pattern, str):
        raise SchemaError(f"{place}/pattern must be a text")
    return f'"(?:{_inside_string(pattern, place)})"'


def _inside_string(pattern: str, place: str) -> str:
    """A pattern without the marks of its beginning and end, whose matches a string of JSON holds as they are."""
    try:
        automaton = compile_regex(pattern)
    except RegexError as error:
        raise SchemaError(f"{place}/pattern: {error}") from None
    if (automaton.table[:, _UNSAFE] >= 0).any():
        raise SchemaError(
            f"{place}/pattern matches quotation marks, backslashes or control characters, which a string of JSON "
            'cannot hold as they are; exclude them, such as [^"\\\\\\x00-\\x1f] in place of a dot'
        )
    return without_anchors(pattern)


def _integer(schema: Mapping[str, Any], place: str) -> str:
    least, most = -math.inf, math.inf
    for name in _KEYWORDS["integer"] & schema.keys():
        value = schema[name]
        if not is_number(value):
            raise SchemaError(f"{place}/{name} must be a number")
        if "inimum" in name:
            least = max(least, math.floor(value) + 1 if name == "exclusiveMinimum" else math.ceil(value))
        else:
            most = min(most, math.ceil(value) - 1 if name == "exclusiveMaximum" else math.floor(value))
    if least > most:
        raise SchemaError(f"{place}: no integer is within its minimum and maximum")
    options = [f"-{_any_of(_natural(max(-most, 1), -least))}"] if least < 0 else []
    options += _natural(max(least, 0), most) if most >= 0 else []
    return _any_of(options)


def _natural(least: float, most: float) -> list[str]:
    """Expressions for the whole numbers from `least`, at least 0, to `most`."""
    if least > most:
        return []
    low = str(least)
    nines = 10 ** len(low) - 1
    if most <= nines:
        return [_digits(low, str(most))]
    if most == math.inf:
        return [_digits(low, str(nines)), f"[1-9][0-9]{{{len(low)},}}"]
    return [_digits(low, str(nines)), *_natural(nines + 1, most)]


def _digits(low: str, high: str) -> str:
    """The numbers between two with the same number of digits."""
    if not low or low == high:
        return low
    more = len(low) - 1
    first, last, options = int(low[0]), int(high[0]), []
    if first == last:
        return low[0] + _digits(low[1:], high[1:])
    if low[1:] != "0" * more:
        options.append(low[0] + _digits(low[1:], "9" * more))
        first += 1
    if high[1:] != "9" * more:
        options.append(high[0] + _digits("0" * more, high[1:]))
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}]" + ("[0-9]" + (f"{{{more}}}" if more > 1 else "") if more else ""))
    return _any_of(options)
