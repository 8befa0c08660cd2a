"""Regular expressions of calls: texts without a mark, each form, strict and other functions, refusals."""

# ruff: noqa: E501
from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from call_forms import SEVERAL, TEMPLATES

from specbatch.errors import SpecbatchError
from specbatch.jobs.call_grammar import call_regex, check_marks, text_without, with_reasoning
from specbatch.jobs.openai_tools import Function, ToolUse
from specbatch.text.tool_calls import CallForm, form_of

F = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y<"]}}, "required": ["a"]}


def form(name: str) -> CallForm:
    found = form_of(TEMPLATES[name])
    assert found is not None
    return found


def function(name: str = "f", schema: Any = F, strict: bool | None = None) -> Function:
    return Function(name=name, parameters=schema, strict=strict)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls in a form, as its models write them."""
    of = form(name)

    def arguments(values: dict[str, Any]) -> str:
        if of.parameter is None:
            return json.dumps(values)
        before, middle, after = of.parameter
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return "".join(f"{before}{key}{middle}{text}{after}" for key, text in texts.items())

    own = [f"{of.before}{name}{of.middle}{arguments(values)}{of.after}" for name, values in calls]
    return of.opening + ("; " if of.separator is None else of.separator).join(own) + of.closing


@pytest.mark.parametrize(
    ("marks", "letters"),
    [
        (["</t>"], "</t>a\n"),
        (["<|"], "<|a"),
        (["\n/"], "\n/a"),
        (["[]^"], "[]^a"),
        (["<t/", "<ta>"], "<ta/>"),
    ],
)
def test_texts_without_marks(marks: list[str], letters: str) -> None:
    expression = re.compile(text_without(*marks))
    for size in range(8 if len(letters) < 6 else 6):
        for characters in itertools.product(letters, repeat=size):
            text = "".join(characters)
            assert (expression.fullmatch(text) is not None) == (not any(mark in text for mark in marks)), text


def test_mark_with_its_first_character_twice() -> None:
    with pytest.raises(ValueError, match="does not have '<' once"):
        text_without("<a<")
    with pytest.raises(ValueError, match="does not have '<' once"):
        text_without("<a", "[a")


@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_follow_their_schemas(name: str) -> None:
    g = function("g", {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"]})
    use = ToolUse([function(), g], must_call=True, parallel=True)
    expression = re.compile(call_regex(use, form(name)))
    right = [("f", {"a": 1}), ("f", {"a": -12, "b": "y<"}), ("g", {"c": "some text"})]
    for call in right:
        assert expression.fullmatch(written(name, call)), call
    for call in [("f", {}), ("f", {"a": "x"}), ("f", {"a": 1, "b": "z"}), ("h", {"a": 1}), ("g", {"a": 1})]:
        assert not expression.fullmatch(written(name, call)), call
    assert bool(expression.fullmatch(written(name, *right))) == (name in SEVERAL)
    assert not expression.fullmatch("")
    assert not expression.fullmatch("text")
    one = re.compile(call_regex(ToolUse([function(), g], must_call=True, parallel=False), form(name)))
    assert one.fullmatch(written(name, right[0]))
    assert not one.fullmatch(written(name, *right))
    content, calls = form(name).split(written(name, *right[:1]), {})
    assert (content, [tuple(call) for call in calls]) == ("", right[:1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_with_strict_functions_there_may_be_text_and_no_call(name: str) -> None:
    use = ToolUse([function(strict=True), function("loose", F)], must_call=False, parallel=True)
    expression = re.compile(call_regex(use, form(name)))
    before = "" if name not in SEVERAL else "I see < and [.\n"
    other = {"z": [1]} if name.startswith("Mistral") else {"z": [{"y": [{}]}]}
    for text in ["Just text.", "a\nb", before + written(name, ("f", {"a": 1})), written(name, ("loose", other))]:
        assert expression.fullmatch(text), text
    for call in [("f", {"a": "x"}), ("f", {}), ("h", {"a": 1})]:
        assert not expression.fullmatch(written(name, call)), call


def test_reasoning_before_a_call() -> None:
    optional = re.compile(with_reasoning("x", "<think>", "</think>", opened=False))
    opened = re.compile(with_reasoning("x", "<think>", "</think>", opened=True))
    for text, fits, fits_opened in [
        ("x", True, False),
        ("<think>a < b\n</think>x", True, True),
        ("a</think>x", False, True),
        ("<think>a</think></think>x", False, False),
        ("<think>a", False, False),
    ]:
        assert (bool(optional.fullmatch(text)), bool(opened.fullmatch(text))) == (fits, fits_opened), text


def test_function_without_parameters() -> None:
    for name in TEMPLATES:
        use = ToolUse([Function(name="f")], must_call=True, parallel=False)
        assert re.fullmatch(call_regex(use, form(name)), written(name, ("f", {})))


@pytest.mark.parametrize(
    ("name", "schema", "reason"),
    [
        ("Hermes'", {"type": "object", "properties": {"a": {"not": {}}}}, "its parameters have no grammar, which strict"),
        ("Qwen3-Coder's", {"type": "object", "properties": {"a": {}}}, "property 'a' states no type of its own"),
        ("Qwen3-Coder's", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "property 'a' is a string with pattern"),
        ("GLM-4.5's", {"properties": {"a": {"type": ["string", "null"]}}}, "property 'a' is a string with also null"),
        ("GLM-4.5's", {"type": "array"}, "parameters must be an object"),
        ("GLM-4.5's", {"properties": {}, "required": ["b"]}, "required has 'b', which is not in properties"),
        ("Hermes'", {"type": "string"}, "parameters must be an object"),
        ("Hermes'", {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}}, "parameters must be an object"),
        ("Hermes'", {"allOf": 5}, "has no expression here"),
        ("Hermes'", {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, "#/allOf has several schemas"),
        ("GLM-4.5's", {"type": "object", "$ref": "#/$defs/A"}, "parameters have $ref, and this form writes them one"),
        ("GLM-4.5's", {"properties": {}, "minProperties": 1}, "parameters have minProperties"),
        ("GLM-4.5's", {"properties": {"a<b": {"type": "integer"}}}, "property 'a<b' has < or >"),
        ("Qwen3-Coder's", {"properties": {"a": {"enum": ["x", "\n</parameter>"]}}}, "has the value '\\n</parameter>'"),
        ("Qwen3-Coder's", {"properties": {"a": {"enum": ["x\n"]}}}, "has the value 'x\\n'"),
        ("Qwen3-Coder's", {"properties": {"a": {"enum": ["x", "y"], "const": "x"}}}, "has const beside enum"),
    ],
)  # fmt: skip
def test_schema_without_a_grammar_is_refused(name: str, schema: Any, reason: str) -> None:
    with pytest.raises(SpecbatchError, match=re.escape(reason)) as error:
        call_regex(ToolUse([function("f", schema, strict=True)], False, True), form(name))
    assert "\n" not in str(error.value)
    assert "tools='f'" in str(error.value)


A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/A", "$defs": {"A": A}},
        {"anyOf": [A, {"type": "string"}, {"type": "null"}]},
        {"allOf": [A]},
        {"enum": [{"a": 1}, {}, 5, "x", None]},
    ],
)
def test_arguments_are_an_object_whatever_else_their_schema_allows(schema: Any) -> None:
    use = ToolUse([function("f", schema)], must_call=True, parallel=True)
    expression = re.compile(call_regex(use, form("Hermes'")))
    for arguments in ("{}", '{"a": 1}'):
        assert expression.fullmatch(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    for arguments in ("5", '"x"', "null", "[]"):
        assert not expression.fullmatch(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')


@pytest.mark.parametrize("name", TEMPLATES)
def test_empty_schema_of_parameters(name: str) -> None:
    use = ToolUse([function("f", {}, strict=True)], must_call=False, parallel=True)
    assert re.fullmatch(call_regex(use, form(name)), written(name, ("f", {})))


def test_schema_of_parameters_that_are_written_one_by_one() -> None:
    schema = {
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "type": "object",
        "properties": {"p": {"type": "array", "items": {"$ref": "#/$defs/P"}}, "t": {"const": "a.b"}},
        "required": ["p", "t"],
    }
    expression = re.compile(call_regex(ToolUse([function("f", schema)], True, True), form("Qwen3-Coder's")))
    assert expression.fullmatch(written("Qwen3-Coder's", ("f", {"p": [{"x": 1.5}], "t": "a.b"})))
    assert not expression.fullmatch(written("Qwen3-Coder's", ("f", {"p": [{"x": "y"}], "t": "a.b"})))
    assert not expression.fullmatch(written("Qwen3-Coder's", ("f", {"p": [{"x": 1.5}], "t": "axb"})))


def test_references_of_parameters_that_are_written_one_by_one() -> None:
    schema = {
        "$defs": {"U": {"$ref": "#/$defs/V"}, "V": {"type": "string", "enum": ["C", "1"]}, "N": {"type": "integer"}},
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/U", "description": "x"},
            "a/b%~": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
            "parts": {"type": "array", "items": {"$ref": "#/properties/a~1b%25~0"}},
        },
        "required": ["unit"],
    }
    expression = re.compile(call_regex(ToolUse([function("f", schema)], True, True), form("GLM-4.5's")))
    right = [{"unit": "1"}, {"unit": "C", "a/b%~": 5}, {"unit": "C", "a/b%~": None, "parts": [5, None]}]
    for arguments in right:
        text = written("GLM-4.5's", ("f", arguments))
        assert expression.fullmatch(text)
        assert form("GLM-4.5's").split(text, {"f": schema}) == ("", [("f", arguments)])
    for arguments in [{"unit": "F"}, {"unit": "C", "a/b%~": "x"}, {"unit": "C", "parts": ["x"]}]:
        assert not expression.fullmatch(written("GLM-4.5's", ("f", arguments))), arguments
    circle = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    with pytest.raises(SpecbatchError, match="property 'a' states no type"):
        call_regex(ToolUse([function("f", circle)], True, True), form("GLM-4.5's"))


def test_special_tokens_have_no_grammar() -> None:
    use = ToolUse([function()], True, True)
    with pytest.raises(SpecbatchError, match=r"\[TOOL_CALLS\], and a grammar has no special tokens; use auto"):
        check_marks(use, form("Mistral's"), ["[TOOL_CALLS]"])
    check_marks(use, form("Hermes'"), ["<|im_end|>"])
