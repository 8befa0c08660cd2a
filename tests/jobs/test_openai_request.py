"""Requests of OpenAI batch files: what each field means, and which are refused by name."""

from __future__ import annotations

import json
import math

import pytest

from specbatch.core.sampling_params import SamplingParams
from specbatch.jobs.formats import BadRow
from specbatch.jobs.openai_batch import OpenAIBatch, is_openai_batch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def read(tmp_path):
    """The row of one request with this body."""

    def call(body, url=CHAT, given=(), envelope=()):
        required = {"messages": [{"role": "user", "content": "x"}]} if url == CHAT else {"prompt": "x"}
        row = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m"} | required | body}
        row |= dict(envelope)
        path = tmp_path / "in.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (found,) = OpenAIBatch(path, dict(given), seed=0, chat_template=True, model="m", log=print).rows()
        return found

    return call


@pytest.mark.parametrize(
    ("url", "body", "params"),
    [
        (CHAT, {"max_tokens": 5}, {"max_new_tokens": 5}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, {"max_new_tokens": 7}),
        (TEXT, {}, {"max_new_tokens": 16}),
        (
            TEXT,
            {"max_tokens": 3, "temperature": 0, "top_p": 0.5},
            {"max_new_tokens": 3, "temperature": 0, "top_p": 0.5},
        ),
        (TEXT, {"n": 3, "stop": "a", "seed": 5}, {"n": 3, "stop": ("a",), "seed": 5}),
        (TEXT, {"stop": ["a", "b"], "seed": None}, {"stop": ("a", "b"), "seed": None}),
        (TEXT, {"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        (TEXT, {"logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}, {"logprobs": True, "top_logprobs": 2}),
        (TEXT, {"min_tokens": 2, "ignore_eos": True, "top_k": 4}, {"min_tokens": 2, "ignore_eos": True, "top_k": 4}),
        (TEXT, {"top_k": -1, "min_p": 0.1, "stop_token_ids": [7]}, {"top_k": 0, "min_p": 0.1, "stop_token_ids": (7,)}),
    ],
)
def test_sampling_parameters(read, url, body, params):
    found = read(body, url)
    assert {name: getattr(found.params, name) for name in params} == params
    assert found.params.temperature == body.get("temperature", 1.0)


def test_options_of_the_command_replace_defaults_of_openai_but_not_values_of_a_request(read):
    given = {"temperature": 0.0, "max_new_tokens": 9}
    assert read({}, TEXT, given).params == SamplingParams(temperature=0.0, max_new_tokens=9)
    assert read({"temperature": 0.5, "max_tokens": 4}, CHAT, given).params == SamplingParams(0.5, max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", [("prompt", "a")]),
        (["a", "b"], [("prompt", "a"), ("prompt", "b")]),
        ([1, 2], [("prompt_token_ids", [1, 2])]),
        ([[1], [2, 3]], [("prompt_token_ids", [1]), ("prompt_token_ids", [2, 3])]),
    ],
)
def test_prompts_of_completions(read, prompt, wanted):
    assert read({"prompt": prompt}, TEXT).request.prompts() == wanted


def test_schema_of_a_response(read):
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    found = read({"response_format": form}, CHAT, {"regex": "a"}).params
    assert (found.json_schema, found.regex) == (json.dumps(schema), None)


def test_object_as_response(read):
    assert read({"response_format": {"type": "json_object"}}).params.json_schema == '{"type": "object"}'


def test_what_the_template_shows_of_tools(read):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    function = {"parameters": parameters, "name": "f", "strict": True, "description": None}
    found = read({"tools": [{"type": "function", "function": function}]}).request
    assert found.shown_tools == [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert list(found.shown_tools[0]["function"]) == ["name", "parameters"]
    assert read({"tools": [TOOL], "tool_choice": "none"}).request.shown_tools is None
    assert read({}).request.shown_tools is None


@pytest.mark.parametrize(("given", "thinking"), [({}, None), ({"enable_thinking": False}, False)])
def test_switch_of_reasoning(read, given, thinking):
    assert read({"chat_template_kwargs": given}).request.thinking is thinking


def test_text_parts_of_a_message_are_joined(read):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts}]
    (found,) = read({"messages": messages}).request.prompts()
    assert found == ("messages", [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_assistant_is_for_the_template(name, read):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "r"}]
    (found,) = read({"messages": messages}).request.prompts()
    assert found == ("messages", messages)


def test_assistant_may_have_no_content(read):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": None},
    ]
    (found,) = read({"messages": messages}).request.prompts()
    shown = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found == (
        "messages",
        [
            messages[0],
            {"role": "assistant", "content": None, "tool_calls": [shown]},
            messages[2],
            {"role": "assistant", "content": ""},
        ],
    )


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "stream": False},
        {"tools": None, "response_format": None, "n": None, "stop": None},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "best_of": 1},
        {"n": 2, "best_of": 2},
    ],
)
def test_fields_that_change_nothing_are_accepted(read, neutral):
    assert not isinstance(read(neutral), BadRow)


@pytest.mark.parametrize(
    ("url", "body", "problem"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "body.tools.0.function is missing"),
        (
            CHAT,
            {"tools": [{"type": "custom", "function": {"name": "f"}}]},
            'body.tools.0.type="custom": use "function"',
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            'body.tools.0.function.name="a b": use ',
        ),
        (CHAT, {"tools": [TOOL, TOOL]}, 'body.tools has "f" twice; give each function a name of its own'),
        (CHAT, {"tool_choice": "required"}, 'body.tool_choice needs tools; add them, or use "auto"'),
        (CHAT, {"tools": [TOOL], "tool_choice": "any"}, 'body.tool_choice="any": use '),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            'body.tool_choice names "g", which is not in tools; use f, "auto" or "required"',
        ),
        (
            CHAT,
            {"tools": [TOOL], "response_format": {"type": "json_object"}},
            "body.tools together with response_format, regex or json_schema: leave one out, or use tool_choice=",
        ),
        (CHAT, {"chat_template_kwargs": {"x": 1}}, "body.chat_template_kwargs.x is not supported; leave it out"),
        (TEXT, {"tools": [TOOL]}, 'body.tools=[{"type": "function", "function": {"name": "f"}}] is not supported'),
        (
            CHAT,
            {"response_format": {"type": "grammar"}},
            'body.response_format={"type": "grammar"} is not supported; leave it out, or use {"type": "text"}, '
            '{"type": "json_object"} or {"type": "json_schema", ...}',
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "body.response_format: a json_",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}}},
            'body.response_format="{\\"contains\\": {}}": llguidance',
        ),
        (CHAT, {"response_format": {"type": "json_schema"}}, "body.response_format"),
        (CHAT, {"frequency_penalty": 2.5}, "body.frequency_penalty=2.5: use a number from -2 to 2"),
        (CHAT, {"presence_penalty": "much"}, "body.presence_penalty"),
        (CHAT, {"logit_bias": {"5": 101}}, "body.logit_bias="),
        (CHAT, {"logit_bias": {"five": 1}}, "body.logit_bias="),
        (CHAT, {"stream": True}, "body.stream=true is not supported"),
        (CHAT, {"reasoning_effort": "low"}, 'body.reasoning_effort="low" is not supported; leave it out'),
        (CHAT, {"top_logprobs": 2}, "body.top_logprobs=2 needs logprobs=true"),
        (CHAT, {"messages": []}, "body.messages=[]: it must not be empty"),
        (
            CHAT,
            {"messages": [{"role": "user"}]},
            "body.messages.0: content is null or missing; only messages of the assistant",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": None}]}, "body.messages.0: content is null or missing"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            'body.messages.0.content: a content part of type "image_url" is not supported; use type text',
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "body.messages.0.tool_calls.0.id is missing (1 more mistake)",
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "5"}}]}
                ]
            },
            'body.messages.0.tool_calls.0.function.arguments="5": write the arguments as a JSON object',
        ),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}],
                    }
                ]
            },
            r"""body.messages.0.tool_calls.0.function.arguments="{\"a\": \"\\ud83d\"}": a="\ud83d" has half of a""",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
            "body.messages.0: tool_calls belong to messages of the assistant",
        ),
        (TEXT, {"best_of": 3}, "body.best_of=3 is not supported"),
        (TEXT, {"echo": True}, "body.echo=true is not supported"),
        (TEXT, {"suffix": "x"}, 'body.suffix="x" is not supported; leave it out, or use ""'),
        (TEXT, {"guided_json": {}}, "body.guided_json={} is not supported; leave it out"),
        (TEXT, {"prompt": ""}, 'body.prompt="": has no tokens'),
        (TEXT, {"prompt": []}, "body.prompt: has no tokens"),
        (TEXT, {"prompt": [[]]}, "body.prompt: has no tokens"),
        (
            TEXT,
            {"prompt": 5},
            "body.prompt=5: use a string, a list of whole numbers, a list of strings or a list of lists of whole num",
        ),
        (TEXT, {"stop": [5]}, "body.stop=[5]: use a string or a list of strings"),
        (TEXT, {"max_tokens": 0}, "body.max_tokens=0: use at least 1"),
        (TEXT, {"max_tokens": "5"}, 'body.max_tokens="5": use a whole number'),
        (TEXT, {"temperature": "hot"}, 'body.temperature="hot": use a number'),
        (TEXT, {"temperature": -1}, "body.temperature=-1.0: use 0 (greedy) or a positive number"),
        (TEXT, {"temperature": math.nan}, "body.temperature=NaN: "),
        (TEXT, {"min_tokens": 9, "max_tokens": 4}, "body.min_tokens=9: use at most max_tokens=4"),
        (TEXT, {"n": 0}, "body.n=0: use at least 1"),
        (TEXT, {"n": 10**20}, "body.n=100000000000000000000: use at most 128"),
        (TEXT, {"stop": [""]}, 'body.stop=[""]: a stop string must not be empty'),
        (TEXT, {"logprobs": 21}, "body.logprobs=21: use at most 20"),
        (TEXT, {"prompt": ["x", "\ud800"]}, 'body.prompt.1="\\ud800" has half of a surrogate pair'),
        (TEXT, {"\ud800": 1}, 'the key "\\ud800" has half of a surrogate pair'),
    ],
)
def test_refused_field_is_named(read, url, body, problem):
    found = read(body, url)
    assert isinstance(found, BadRow)
    assert found.problem.startswith(problem)
    assert found.id == "a"


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        ({"custom_id": 5}, "custom_id=5: use a string"),
        ({"custom_id": ""}, 'custom_id="": it must not be empty'),
        ({"method": "GET"}, 'method="GET": use "POST"'),
        ({"url": "/v1/embeddings"}, 'url="/v1/embeddings" is not supported; use /v1/chat/completions or'),
        ({"body": []}, "body=[]: use an object"),
        ({"more": 1}, "more is not supported; leave it out"),
    ],
)
def test_refused_envelope_is_named(read, envelope, problem):
    found = read({}, envelope=envelope)
    assert isinstance(found, BadRow)
    assert found.problem.startswith(problem)


@pytest.mark.parametrize(
    ("lines", "is_batch"),
    [
        (['{"custom_id": "a", "method": "POST", "url": "u", "body": {}}'], True),
        (["", "{", '{"method": "POST", "body": {}}'], True),
        (['{"prompt": "a", "url": "u"}'], False),
        (['{"prompt": "a"}', '{"custom_id": "a", "method": "POST", "url": "u", "body": {}}'], False),
        (["5"], False),
        ([], False),
    ],
)
def test_batch_file_is_recognized_by_its_first_line(tmp_path, lines, is_batch):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    assert is_openai_batch(path) == is_batch
