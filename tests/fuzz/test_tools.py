"""Mutated tools and answers: each request has a grammar or one line of refusal, and each answer is split."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from call_forms import TEMPLATES, WRITTEN
from fuzzing import Fuzz
from mutate import mutate_bytes, mutate_value
from pydantic import ValidationError

from specbatch.errors import SpecbatchError
from specbatch.jobs.call_grammar import call_regex
from specbatch.jobs.openai_request import ChatBody, UnsupportedError
from specbatch.text.tool_calls import CallForm, Harmony, form_of

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "city": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "x"},
        "unit": {"enum": ["C", "F", 3]},
        "list": {"type": "array", "items": {"const": "x"}},
    },
    "required": ["a"],
}
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "g-2", "description": "x"}},
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
HARMONY = (
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
)


def forms() -> list[CallForm]:
    return [form for template in TEMPLATES.values() if (form := form_of(template)) is not None]


def text_of(random: Random, text: str) -> str:
    """A text with broken parts."""
    return mutate_bytes(random, text.encode()).decode(errors="replace") if random.random() < 0.9 else text


def test_requests_and_answers(fuzz: Fuzz) -> None:
    for random in fuzz.rounds(quick=60):
        body: Any = mutate_value(random, BODY) if random.random() < 0.9 else BODY
        if not isinstance(body, dict):
            continue
        try:
            read = ChatBody.read(body)
            use = read.use
        except (UnsupportedError, ValidationError, SpecbatchError) as error:
            fuzz.outcome(type(error).__name__)
            continue
        if use is None:
            continue
        schemas = {one.name: one.arguments_schema or {} for one in use.callable}
        for form in forms():
            try:
                assert call_regex(use, form)
                fuzz.outcome("grammars")
            except SpecbatchError as error:
                fuzz.refused(error)
            for written in WRITTEN:
                text = text_of(random, written.text)
                content, calls = form.split(text, schemas)
                assert content == text or calls
                for call in calls:
                    assert isinstance(json.loads(call.arguments_json), dict)
        Harmony().split(text_of(random, HARMONY))


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_long_answers_take_linear_time(form: CallForm) -> None:
    """Half calls, which are looked at from each beginning."""
    for text in (form.mark or "; {", form.before, form.opening + form.before + "f" + form.middle, "<", "[", "{"):
        form.split(text * 20_000, {})
