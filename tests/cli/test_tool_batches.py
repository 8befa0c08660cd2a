"""`specbatch generate` with tools in batch files: calls that follow their schemas, forms of the output, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from call_forms import TEMPLATES
from checkpoints import SPECIAL
from letters import LETTERS, write_letters
from openai_types import ErrorLine, OutputLine
from typer.testing import Result

COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "loud": {"type": "boolean"}},
    "required": ["n"],
}
SCHEMAS = {"paint": COLOR, "count": COUNT}
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
END = {str(len(LETTERS) + SPECIAL.index("<|im_end|>")): 9}  # likely, so that random weights write few calls
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def tools(strict: bool | None = None) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def request(name: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "paint it"}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, "max_tokens": 150, "tools": tools()} | body,
    }


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def generate(run_toy: Callable[..., Callable[..., Result]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The lines of both files by custom_id, of a model that has this template."""

    def call(rows: list[Any], template: str, *marks: str, failed: bool = False) -> dict[str, Any]:
        folder = write_letters(tmp_path / "model", template=template, marks=marks)
        Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = f"--model {folder} --device cpu --dtype float32 --algorithm ngram --draft-tokens 3"
        result = run_toy(words.split())("generate in.jsonl -o out.jsonl", exit_code=int(failed))
        found = {"": result.stderr}
        for path, kind in (("out.jsonl", OutputLine), ("out.jsonl.errors.jsonl", ErrorLine)):
            for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
                row = kind.model_validate_json(line, strict=True).model_dump()
                found[row["custom_id"]] = row["error"] or row["response"]["body"]
        return found

    return call


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls of a choice, which follow their schemas."""
    found = []
    for call in choice["message"]["tool_calls"]:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[name])
        found.append((name, arguments))
    return found


@pytest.mark.parametrize("name", ["Hermes'", "Qwen3-Coder's", "Llama 3's JSON"])
def test_calls_of_a_batch(generate: Callable[..., dict[str, Any]], name: str) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    rows = [
        request("required", tool_choice="required", n=4, logit_bias=END, **off),
        request("named", tool_choice=named("count"), n=3, **off),
        request("one", tool_choice="required", parallel_tool_calls=False, n=3, **off),
        request("strict", tools=tools(True), n=3, max_tokens=20, **off),
        request("none", tool_choice="none", max_tokens=5, **off),
        request("undefined", tool_choice=named("pant")),
        request("object", tools=[], response_format={"type": "json_object"}, max_tokens=40),
    ]
    template = TEMPLATES[name].replace("assistant\n{% endif %}", f"assistant\n{THINKING}{{% endif %}}")
    found = generate(rows, template, *MARKS, failed=True)
    ids = list[str]()
    for row in ("required", "named", "one"):
        for choice in found[row]["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            calls = calls_of(choice)
            assert len(calls) == 1 or row == "required"
            assert {called for called, _ in calls} <= ({"count"} if row == "named" else set(SCHEMAS))
            ids += [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    for choice in found["strict"]["choices"]:
        assert choice["message"]["tool_calls"] is None or calls_of(choice)
    (choice,) = found["none"]["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("length", None)
    assert choice["message"]["content"]
    assert found["undefined"]["message"] == (
        'body.tool_choice names "pant", which is not in tools; use paint or count, "auto" or "required"'
    )
    (choice,) = found["object"]["choices"]
    assert choice["message"]["content"].startswith("{")


def test_reasoning_before_a_required_call(generate: Callable[..., dict[str, Any]]) -> None:
    """Of a prompt that opens it. The end is likely, too."""
    ends = END | {str(len(LETTERS) + len(SPECIAL) + MARKS.index("</think>")): 9}
    template = TEMPLATES["Hermes'"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    found = generate([request("a", tool_choice="required", n=4, logit_bias=ends)], template, *MARKS)
    for choice in found["a"]["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] is not None
        assert calls_of(choice)
    details = found["a"]["usage"]["completion_tokens_details"]
    assert 4 <= details["reasoning_tokens"] < found["a"]["usage"]["completion_tokens"]


def test_templates_without_tools_or_without_a_known_form(generate: Callable[..., dict[str, Any]]) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = generate([request("a"), request("b", tools=[])], plain, failed=True)
    assert found["a"]["message"].startswith('body.tools=["paint", "count"]: the chat template of model does not show')
    assert found["b"]["choices"]


def test_form_that_is_not_known(generate: Callable[..., dict[str, Any]]) -> None:
    plain = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [request("a", max_tokens=3), request("b", max_tokens=3), request("c", tool_choice="required")]
    found = generate([*rows, request("d", tools=tools(True))], plain, failed=True)
    for row in ("a", "b"):
        assert found[row]["choices"][0]["message"]["tool_calls"] is None
    assert found[""].count("note: tools: calls of model have no known form; they stay in the content of answers") == 1
    wanted = 'body.tools=["paint", "count"]: this tool_choice needs a grammar, and calls of model have no known form'
    assert found["c"]["message"].startswith(wanted)
    assert "strict needs a grammar" in found["d"]["message"]
