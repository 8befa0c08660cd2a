"""Calls of functions in answers: forms by chat template, what is no call, types of parameters, channels."""

from __future__ import annotations

import json

import pytest
from call_forms import F1, F2, SEVERAL, TEMPLATES, WRITTEN, Written

from specbatch.text.chat_template import ChatTemplate, with_argument_texts
from specbatch.text.tool_calls import Call, Harmony, form_of, shown_calls

SCHEMAS = {
    "f": {"properties": {"a": {"type": "integer"}}},
    "g-2": {"properties": {"city": {"type": "string"}}},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_form_follows_from_the_template_and_reads_what_that_writes(name: str) -> None:
    form = form_of(TEMPLATES[name])
    assert form is not None
    assert form.name == name
    calls = [F1, F2] if name in SEVERAL else [F1]
    shown = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    messages = [{"role": "assistant", "content": "", "tool_calls": shown}]
    if name.startswith("DeepSeek"):
        messages = with_argument_texts(messages) or []
    text = ChatTemplate(TEMPLATES[name], "m").render(messages=messages)
    text = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    content, found = form.split(text, SCHEMAS)
    assert (content, found) == ("", [Call(*call) for call in calls])
    if form.parameter is None:  # what a grammar is made of
        own = [f"{form.before}{name}{form.middle}{json.dumps(v, ensure_ascii=False)}{form.after}" for name, v in calls]
        assert form.opening + (form.separator or "").join(own) + form.closing == text


def test_unknown_form() -> None:
    assert form_of("{% for m in messages %}{{ tools }}<|tool_call_start|>[f(a=1)]{% endfor %}") is None
    assert form_of("") is None


@pytest.mark.parametrize("written", WRITTEN)
def test_calls_are_split_from_the_text(written: Written) -> None:
    form = form_of(TEMPLATES[written.form])
    assert form is not None
    content, calls = form.split(written.text, SCHEMAS)
    assert (content, [tuple(call) for call in calls]) == (written.content, written.calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, '"x"', '"x"'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": 1.5}, "1.5", 1.5),
        ({"type": "object"}, '{"b": [1, 2]}', {"b": [1, 2]}),
        ({"type": "object"}, "{b}", "{b}"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "5", 5),
        (None, "five", "five"),
        ({"type": "string"}, " two\nlines ", " two\nlines "),
        ({"type": "array"}, '["</parameter>", "</function>"]', ["</parameter>", "</function>"]),
        ({"type": ["object", "null"]}, '{"b": "x\\n</parameter>\\n"}', {"b": "x\n</parameter>\n"}),
        ({"$ref": "#/properties/t"}, "1", "1"),
        ({"allOf": [{"$ref": "#/properties/t"}]}, "null", "null"),
        ({"$ref": "#/properties/a"}, "5", 5),
        ({"$ref": "#/nothing"}, "5", 5),
    ],
)
def test_parameters_have_the_type_of_their_schema(schema: object, text: str, value: object) -> None:
    form = form_of(TEMPLATES["Qwen3-Coder's"])
    assert form is not None
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    schemas = {"f": {"properties": {"t": {"enum": ["1", "null"]}} | ({} if schema is None else {"a": schema})}}
    assert form.split(written, schemas)[1] == [Call("f", {"a": value})]  # type: ignore[arg-type]


def test_calls_in_the_form_of_openai() -> None:
    calls = [Call("f", {"a": "é"}), Call("f", {"a": "\ud83d"})]
    first, second = shown_calls(calls, "call_{}".format)
    assert first == {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    assert second["function"]["arguments"] == r'{"a": "\ud83d"}'


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", ("Hm.", "Yes.", [])),
        (f"{ANALYSIS}<|channel|>final<|message|>Yes.", ("Hm.", "Yes.", [])),
        ("<|channel|>final<|message|>Yes.", (None, "Yes.", [])),
        ("<|channel|>analysis<|message|>Hm, so", ("Hm, so", "", [])),
        (
            f'{ANALYSIS}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
            ("Hm.", "", [Call(*F1)]),
        ),
        (
            f'{ANALYSIS} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}',
            ("Hm.", "", [Call(*F1)]),
        ),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1',
            ("Hm.", 'I look.\n{"a": 1', []),
        ),
        ("Yes.", None),
    ],
)
def test_channels_of_gpt_oss(text: str, parts: object) -> None:
    assert Harmony().split(text) == parts
