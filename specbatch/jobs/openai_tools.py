"""Pydantic models of `tools` and `tool_choice` in OpenAI's requests for chat completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, field_validator

from specbatch.errors import shown_json
from specbatch.text.tool_calls import referred


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_DEPTH = 32  # of references and choices in each other


class Function(_Strict):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) is None:
            raise ValueError("use 1 to 64 letters, digits, _, - and .")
        return name

    @property
    def arguments_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the arguments, which are an object also where it does not say so, or allows more;
        None if it allows none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}}
        found = _objects(self.parameters, self.parameters)
        if found is None or "$defs" not in self.parameters:
            return found
        return {"$defs": self.parameters["$defs"], **found}


def _objects(schema: Any, root: Any, depth: int = 0) -> dict[str, Any] | None:
    """What of a schema in `root` accepts objects; None if nothing does."""
    if schema is True:
        return {"type": "object"}
    if not isinstance(schema, dict) or depth > _DEPTH:
        return None
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return None
    if isinstance(schema.get("$ref"), str) and "type" not in schema:
        return _objects(referred(schema["$ref"], root), root, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and "type" not in schema:
            options = [_objects(each, root, depth + 1) for each in schema[name]]
            kept = [each for each in options if each is not None]
            return schema | {name: kept} if kept and (name != "allOf" or len(kept) == len(options)) else None
    if isinstance(values := schema.get("enum"), list):
        kept = [each for each in values if isinstance(each, dict)]
        return {key: each for key, each in schema.items() if key != "type"} | {"enum": kept} if kept else None
    return schema if "const" in schema and "type" not in schema else schema | {"type": "object"}


class Tool(_Strict):
    type: Literal["function"]
    function: Function

    def as_template_value(self) -> dict[str, Any]:
        """As chat templates take it: with the keys that are there, in OpenAI's order, and without `strict`, which is
        for the engine."""
        names = ("name", "description", "parameters")
        shown = {name: value for name in names if (value := getattr(self.function, name)) is not None}
        return {"type": self.type, "function": shown}


@dataclass(frozen=True)
class NamedChoice:
    """The function that an answer must call."""

    name: str


def _read_choice(value: Any) -> Any:
    if value in _CHOICES:
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **beside}, **more} if not beside and not more:
            return NamedChoice(name)
    named = '{"type": "function", "function": {"name": NAME}}'
    raise ValueError(f"use {', '.join(map(shown_json, _CHOICES))} or {named}")


_CHOICES = ("none", "auto", "required")
Choice = Annotated[str | NamedChoice, PlainValidator(_read_choice)]  # one of these, or a function


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, and how its answer is to call them.

    callable   functions that it may call: all, or the one that `tool_choice` names
    must_call  whether it must call one
    parallel   whether it may have more than one call
    """

    callable: Sequence[Function]
    must_call: bool
    parallel: bool

    @property
    def is_constrained(self) -> bool:
        """Whether arguments have to follow their schemas."""
        return self.must_call or any(function.strict for function in self.callable)


def tool_use(tools: Sequence[Tool], choice: str | NamedChoice | None, parallel: bool | None) -> ToolUse | None:
    """None: no function can be called. Raises ValueError for a choice that the tools do not have."""
    functions = [tool.function for tool in tools]
    names = [function.name for function in functions]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f'tools has "{doubled}" twice; give each function a name of its own')
    if not functions and (choice == "required" or isinstance(choice, NamedChoice)):
        raise ValueError('tool_choice needs tools; add them, or use "auto"')
    if isinstance(choice, NamedChoice):
        if choice.name not in names:
            works = f'use {" or ".join(names)}, "auto" or "required"'
            raise ValueError(f'tool_choice names "{choice.name}", which is not in tools; {works}')
        functions = [function for function in functions if function.name == choice.name]
    if not functions or choice == "none":
        return None
    named = isinstance(choice, NamedChoice)
    return ToolUse(functions, named or choice == "required", not named and parallel is not False)
