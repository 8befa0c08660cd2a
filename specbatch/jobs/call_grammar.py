"""Regular expressions for answers with calls of functions whose arguments follow their schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from specbatch.errors import refuse
from specbatch.grammar.limits import RegexError
from specbatch.grammar.schema_engine import embedded_regex
from specbatch.grammar.schema_words import ASSERTIONS
from specbatch.jobs.openai_tools import Function, ToolUse
from specbatch.text.tool_calls import CallForm, referred, types_of

# Keywords of an object. Its additional properties are never written, and so have any schema.
_OBJECT = {"additionalProperties", "properties", "required", "type"}
_MOVED = "#/$defs/parameters"
_BLANK = "\\n{0,2}"  # between the end of reasoning and a call


def call_regex(use: ToolUse, form: CallForm, reasoning: str | None = None) -> str:
    """The expression of an answer, without its reasoning, that calls functions as `use` demands: of an answer that must
    call the calls, else a text, calls, or both.

    reasoning   what begins reasoning, if the answer may have some: only at its beginning, as a text that may have it
                anywhere needs many more states

    Raises SpecbatchError for a schema that has no grammar in this form.
    """
    one = "|".join(_call(function, form, always=use.must_call) for function in use.callable)
    several = form.separator is not None and use.parallel
    more = f"(?:{re.escape(form.separator or '')}(?:{one}))*" if several else ""
    calls = f"{re.escape(form.opening)}(?:{one}){more}{re.escape(form.closing)}"
    if use.must_call:
        return _BLANK + calls
    if form.mark:
        marks = [mark for mark in (form.mark, reasoning) if mark]
        return f"{text_without(*marks)}(?:{calls})?"
    return rf"(?:{calls}|[ \t\r\n]*[^{{ \t\r\n](?:.|\n)*)"


def text_without(*marks: str) -> str:
    """The expression of texts that contain none of the marks. These have one first character, and that only once, and
    none of them begins another one.

    A text is characters other than the first one of the marks, and beginnings of marks with another character after
    them than the next one of such a mark, or with the beginning of another one.
    """
    first = marks[0][0]
    for mark in marks:
        if mark[0] != first or first in mark[1:]:
            raise ValueError(f"{mark!r} does not have {first!r} once, as its first character")
    following: dict[str, set[str]] = {}
    for mark in marks:
        for size in range(1, len(mark)):
            following.setdefault(mark[:size], {first}).add(mark[size])
    begins = "|".join(re.escape(part) for part in sorted(following, key=len, reverse=True))
    other = "|".join(f"{re.escape(part)}[^{_in_set(sorted(after))}]" for part, after in following.items())
    return f"(?:[^{_in_set(first)}]|(?:{begins})*(?:{other}))*(?:{begins})*"


def _in_set(characters: Iterable[str]) -> str:
    return "".join(re.escape(one) if one.isascii() else one for one in characters)


def _call(function: Function, form: CallForm, *, always: bool) -> str:
    """One call. always: its arguments follow the schema also if it is not strict."""
    if always or function.strict:
        try:
            arguments = _in_parameters(function, form) if form.parameter else _json_of(_arguments(function))
        except RegexError as error:
            why = "strict" if function.strict else "tool_choice"
            works = f"its parameters have no grammar, which {why} needs ({error}); simplify them, or leave {why} out"
            raise refuse("tools", function.name, works) from None
        after = form.after
    elif form.end:
        arguments, after = text_without(form.end), form.end + form.after.partition(form.end)[2]
    else:  # an object, of any depth where nothing follows
        arguments, after = r"\{(?:.|\n)*\}" if form.separator is None else _json_of({"type": "object"}), form.after
    return re.escape(form.before + function.name + form.middle) + arguments + re.escape(after)


def _arguments(function: Function) -> dict[str, Any]:
    if (schema := function.arguments_schema) is None:
        raise RegexError("parameters must be an object")
    return schema


def _json_of(schema: Any, at: str = "#") -> str:
    """Of the schema in `schema` to which the reference `at` leads."""
    if at != "#":
        schema = {"$ref": _MOVED + at[1:], "$defs": {"parameters": _moved(schema)}}
    return f"(?:{embedded_regex(schema)})"


def _moved(schema: Any) -> Any:
    """A schema that refers to itself as a part of another one, at `_MOVED`."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: each if key in ("const", "default", "enum", "examples") else _moved(each) for key, each in schema.items()
    }
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        found["$ref"] = _MOVED + ref[1:]
    return found


def _in_parameters(function: Function, form: CallForm) -> str:
    """Arguments that are written one by one, in the order of the properties."""
    assert form.parameter is not None
    before, middle, after = form.parameter
    schema = _arguments(function)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or schema.get("type") != "object":
        raise RegexError("parameters must be an object with properties")
    if others := schema.keys() & ASSERTIONS - _OBJECT:
        raise RegexError(f"parameters have {', '.join(sorted(others))}, and this form writes them one by one")
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        raise RegexError(f"required has {missing[0]!r}, which is not in properties")
    found = ""
    for name, value in properties.items():
        if set("<>") & set(name):
            raise RegexError(f"property {name!r} has < or >, which end names in this form")
        part = re.escape(before + name + middle) + _value(name, value, schema, after.strip()) + re.escape(after)
        found += part if name in required else f"(?:{part})?"
    return found


def _value(name: str, schema: Any, root: Mapping[str, Any], end: str) -> str:
    """A value: a string as it is, all else as JSON."""
    kinds = types_of(schema, root)
    if not kinds:
        raise RegexError(f"property {name!r} states no type of its own, and this form writes strings without quotes")
    if "string" not in kinds:
        return _json_of(root, f"#/properties/{quote(name.replace('~', '~0').replace('/', '~1'), safe='')}")
    if isinstance(ref := schema.get("$ref"), str) and schema.keys() & ASSERTIONS == {"$ref"}:
        return _value(name, referred(ref, root), root, end)
    if kinds != {"string"} or (keys := schema.keys() & ASSERTIONS - {"type", "enum", "const"}):
        reason = f"also {', '.join(sorted(kinds - {'string'}))}" if kinds != {"string"} else ", ".join(sorted(keys))
        raise RegexError(f"property {name!r} is a string with {reason}, and this form writes strings without quotes")
    values: Any = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None and not (isinstance(values, list) and values):
        raise RegexError(f"enum of property {name!r} must be a list of values")
    if values is not None and "const" in schema and values != [schema["const"]]:
        raise RegexError(f"property {name!r} has const beside enum; leave one out")
    for value in values or ():
        if end in value or value != value.strip("\n"):
            raise RegexError(f"property {name!r} has the value {value!r}, which this form cannot write")
    return text_without(end) if values is None else f"(?:{'|'.join(map(re.escape, values))})"


def with_reasoning(regex: str, mark: str, end: str, *, opened: bool) -> str:
    """An answer after reasoning between two marks. opened: the prompt has begun it; else the answer may have it."""
    if opened:
        return text_without(end) + re.escape(end) + regex
    return f"(?:{re.escape(mark)}{text_without(end)}{re.escape(end)})?{regex}"


def check_marks(use: ToolUse, form: CallForm, hidden: Iterable[str]) -> None:
    """Refuse a form whose marks are special tokens, which never are part of what a grammar allows."""
    if (found := form.token_of(hidden)) is not None:
        works = f"calls in {form.name} form have {found}, and a grammar has no special tokens; use auto without strict"
        raise refuse("tools", [function.name for function in use.callable], works)
