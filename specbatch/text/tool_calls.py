"""Calls of functions in answers: the forms in which model families write them, and their arguments.

The form follows from the source of the chat template, which shows calls of earlier turns to the model in the same form.
"""

# ruff: noqa: RUF001  # marks of DeepSeek have a full-width bar
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import unquote

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of functions, by their names
_MOST = 1_000  # beginnings of calls that are looked at
_NAME = r"(?P<name>[^\s<>\[\]{}\"]+)"
_CLOSED = r"(?:\s*{}|\s*\Z)"  # a call that a limit or a stop cut off before its closing mark is a call


class Call(NamedTuple):
    """A call of a function. arguments: an object."""

    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON; halves of surrogate pairs, which are no text, stay escaped."""
        text = json.dumps(self.arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(self.arguments)
        return text


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls: `opening`, calls with `separator` between them (None: it writes one only), `closing`.
    A call is `before`, the name, `middle`, the arguments and `after`.

    marks      a template with this form has all of them in its source. The first one begins a call; "": JSON alone does
    start      an expression for what comes before a call with JSON; in its group `name` the name, else the JSON has it
    parameter  what comes before the name of a parameter, after it, and after its value, where arguments are no JSON
    value_ends what cannot be in the value of a parameter
    end        a text that ends a call whose arguments are not known; "" if there is none
    id_length  characters of the id of a call; 0: as in OpenAI's API
    """

    name: str
    marks: tuple[str, ...]
    start: str
    stop: str
    opening: str = ""
    before: str = ""
    middle: str = ""
    after: str = ""
    separator: str | None = "\n"
    closing: str = ""
    parameter: tuple[str, str, str] | None = None
    end: str = ""
    id_length: int = 0
    _start: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _stop: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_start", re.compile(self.start))
        object.__setattr__(self, "_stop", re.compile(self.stop))

    @property
    def mark(self) -> str:
        """What begins a call; "" if nothing but JSON does."""
        return self.marks[0]

    def is_of(self, template: str) -> bool:
        return all(mark in template for mark in self.marks)

    def token_of(self, tokens: Iterable[str]) -> str | None:
        """The first of these tokens that a call has."""
        texts = (self.opening, self.before, self.middle, self.after, self.closing)
        return next((token for token in tokens if any(token in text for text in texts)), None)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        """The text without its calls, and these. What is no valid call stays in the text."""
        calls, rest, at = list[Call](), list[str](), 0
        for match in islice(self._start.finditer(text), _MOST):
            if match.start() < at:
                continue
            found, end = (self._in_parameters if self.parameter else self._in_json)(text, match, schemas)
            if found:
                rest.append(text[at : match.start()])
                calls += found
                at = end
        if calls:
            rest.append(text[at:].lstrip().removeprefix(self.closing))
        return ("".join(rest).strip(), calls) if calls else (text, [])

    def _in_json(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[Call], int]:
        try:
            value, end = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return [], 0
        name = match.groupdict().get("name")
        if name is not None:
            value = {"name": name, "arguments": value}
        found = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
        stop = self._stop.match(text, end)
        if stop is None or not all(found):
            return [], 0
        return [call for call in found if call is not None], stop.end()

    def _in_parameters(self, text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[Call], int]:
        assert self.parameter is not None
        before, middle, after = (re.escape(part.strip()) for part in self.parameter)
        name, at, arguments = match["name"], match.end(), dict[str, Any]()
        schema = schemas.get(name, {})
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        begin = re.compile(rf"\s*{before}(?P<key>[^<>]+?){middle}\n?")
        whole, close = re.compile(rf"(.*?)\n?{after}", re.DOTALL), re.compile(rf"\s*{after}")
        while (found := begin.match(text, at)) is not None:
            kinds = types_of(properties.get(found["key"]), schema)
            value, end = _json_at(text, found.end()) if kinds and "string" not in kinds else (None, 0)
            ended = close.match(text, end) if end else None  # JSON may have the mark in a string
            if ended is None and (ended := whole.match(text, found.end())) is not None:
                value = _typed(ended[1], kinds)
            if ended is None:
                break
            arguments[found["key"]], at = value, ended.end()
        stop = self._stop.match(text, at)
        return ([], 0) if stop is None else ([Call(name, arguments)], stop.end())


def _no_constant(text: str) -> None:
    raise ValueError(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ARGUMENTS = ("arguments", "parameters")


def _call_of(value: Any) -> Call | None:
    """The call of {"name": ..., "arguments": {...}}; arguments may be JSON in a text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def types_of(schema: Any, root: Any, followed: set[str] | None = None) -> set[str]:
    """The types that a schema allows, also in its alternatives and references; none if it does not say.

    root      what it refers to places in
    followed  references that count already
    """
    followed = set() if followed is None else followed
    while isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
        if ref in followed:
            return set()
        followed.add(ref)
        schema = referred(ref, root)
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    for value in [*_list_in(schema, "enum"), *([schema["const"]] if "const" in schema else [])]:
        found |= _kinds_of(value)
    parts = [item for name in ("anyOf", "oneOf", "allOf") for item in _list_in(schema, name)]
    return found.union(*(types_of(item, root, followed) for item in parts))


def referred(ref: str, root: Any) -> Any:
    """What a reference (`#/$defs/Name`) names in a schema; None if that is not there."""
    for part in unquote(ref).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _list_in(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _kinds_of(value: Any) -> set[str]:
    """The types of JSON Schema that a value has."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON at a place, and its end; 0 without one."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError, OverflowError):
        return None, 0


def _typed(text: str, kinds: set[str]) -> Any:
    """The value of a parameter that is written as text: JSON, or the text itself where the schema allows a string and
    not the type of that. `None` and `True`, as the templates of such models write them, are JSON's null and true.
    kinds: `types_of` the schema."""
    word = {"None": "null", "True": "true", "False": "false"}.get(text.strip(), text)
    try:
        value = _DECODER.decode(word)
        is_value = not kinds or bool(_kinds_of(value) & (kinds - {"string"})) or "string" not in kinds
    except (ValueError, RecursionError, OverflowError):
        return text
    return value if is_value else text


FORMS = (
    CallForm(
        "DeepSeek-V3's",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        start=rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>{_NAME}\s*```json\s*",
        stop=r"\s*```" + _CLOSED.format("<｜tool▁call▁end｜>"),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    CallForm(
        "DeepSeek-V3.1's",
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        start=rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>\s*",
        stop=_CLOSED.format("<｜tool▁call▁end｜>"),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        end="<｜tool▁call▁end｜>",
        separator="",
        closing="<｜tool▁calls▁end｜>",
    ),
    CallForm(
        "Mistral's with [ARGS]",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        start=rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*",
        stop="",
        before="[TOOL_CALLS]",
        middle="[ARGS]",
        separator="",
        id_length=9,
    ),
    CallForm(
        "Mistral's",
        marks=("[TOOL_CALLS]",),
        start=r"\[TOOL_CALLS\]\s*",
        stop="",
        opening="[TOOL_CALLS] [",
        before='{"name": "',
        middle='", "arguments": ',
        after="}",
        separator=", ",
        closing="]",
        id_length=9,
    ),
    CallForm(
        "Qwen3-Coder's",
        marks=("<tool_call>", "<function="),
        start=rf"(?:<tool_call>\s*)?<function={_NAME}>",
        stop=r"\s*</function>(?:\s*</tool_call>)?",
        before="<tool_call>\n<function=",
        middle=">\n",
        after="</function>\n</tool_call>",
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        end="</function>",
    ),
    CallForm(
        "GLM-4.5's",
        marks=("<tool_call>", "<arg_key>"),
        start=rf"<tool_call>\s*{_NAME}",
        stop=r"\s*</tool_call>",
        before="<tool_call>",
        middle="\n",
        after="</tool_call>",
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        end="</tool_call>",
    ),
    CallForm(
        "Hermes'",
        marks=("<tool_call>", "</tool_call>"),
        start=r"<tool_call>\s*",
        stop=_CLOSED.format("</tool_call>"),
        before='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        after="}\n</tool_call>",
        end="</tool_call>",
    ),
    CallForm(
        "Llama 3's JSON",
        marks=("", '{"name": "', '"parameters": ', "ipython"),
        start=r"(?:\A\s*(?:<\|python_tag\|>\s*)?|;\s*)(?=\{)",
        stop="",
        before='{"name": "',
        middle='", "parameters": ',
        after="}",
        separator=None,
    ),
)


def form_of(template: str) -> CallForm | None:
    """The form of calls that a chat template has; None if it is not known."""
    return next((form for form in FORMS if form.is_of(template)), None)


class Harmony:
    """The channels of gpt-oss: `analysis` is reasoning, what is sent to `functions.NAME` a call, all else the answer.
    https://github.com/openai/harmony"""

    name = "gpt-oss'"
    _END = r"(?:<\|(?:end|call|return)\|>|\Z)"
    _MESSAGE = re.compile(rf"(?P<head>(?:(?!<\|message\|>).)*)<\|message\|>(?P<body>.*?){_END}", re.DOTALL)
    _RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    def split(self, text: str) -> tuple[str | None, str, list[Call]] | None:
        """Reasoning, answer and calls of an output with its special tokens; None if it has no channels."""
        reasoning, answer, calls = list[str](), list[str](), list[Call]()
        if "<|message|>" not in text:
            return None
        for match in self._MESSAGE.finditer(text):
            head, body = match["head"], match["body"]
            if (recipient := self._RECIPIENT.search(head)) is not None:
                call = _call_of({"name": recipient[1], "arguments": body.strip() or "{}"})
                if call is not None:
                    calls.append(call)
                    continue
            (reasoning if "<|channel|>analysis" in head and recipient is None else answer).append(body)
        return "\n".join(reasoning) if reasoning else None, "\n".join(answer), calls


def shown_calls(calls: Iterable[Call], id_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Calls in OpenAI's form."""
    return [
        {"id": id_of(n), "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for n, call in enumerate(calls)
    ]
