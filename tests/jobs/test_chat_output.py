"""Messages of chat completions: reasoning, content and calls apart, with special tokens, stop strings and limits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from call_forms import TEMPLATES
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.errors import SpecbatchError
from specbatch.jobs.chat_output import ChatOutput
from specbatch.jobs.openai_request import ChatBody
from specbatch.text.tokenizer import Tokenizer

THINK = "{{ x.split('</think>') }}"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def output(template: str | None, *names: str, special: tuple[str, ...] = ("<eos>",), **options: Any) -> ChatOutput:
    """Of a tokenizer of bytes and these tokens. special: those that a text does not show; <eos> ends an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=name in special, normalized=False) for name in ("<eos>", *names)])
    return ChatOutput(Tokenizer(backend, name="t", eos_ids=[256], chat_template=template), **options)


def message(
    of: ChatOutput,
    text: str,
    *,
    prompt: str = "assistant\n",
    reason: str = "stop",
    shown: str | None = None,
    **body: Any,
) -> tuple[dict[str, Any], str]:
    """Of an answer with these tokens, which ends with <eos> unless `shown` is its text up to a stop string."""
    asked = ChatBody.read({"model": "m", "messages": [{"role": "user", "content": "x"}], **body})
    tokens = of.tokenizer.encode(text)
    whole = of.tokenizer.decode(tokens)
    ended = tokens + ([256] if reason == "stop" and shown is None else [])
    done = Completion(
        0, of.tokenizer.encode(prompt), ended, whole if shown is None else shown, reason, RequestMetrics()
    )
    found, why = of.message(done, asked, "name")
    assert (found.pop("role"), found.pop("refusal")) == ("assistant", None)
    return found, why


@pytest.mark.parametrize(
    ("text", "prompt", "wanted"),
    [
        ("Yes.", "assistant\n", {"content": "Yes."}),
        (" Yes. ", "assistant\n", {"content": " Yes. "}),
        ("<think>\nHm.\n</think>\n\nYes.", "assistant\n", {"reasoning_content": "Hm.", "content": "Yes."}),
        ("Hm.\n</think>\n\nYes.", "assistant\n<think>\n", {"reasoning_content": "Hm.", "content": "Yes."}),
        ("Hm.\n</think>\n\nYes.", "assistant\n", {"reasoning_content": "Hm.", "content": "Yes."}),
        ("Hm.", "assistant\n<think>\n", {"reasoning_content": "Hm.", "content": None}),
        ("<think>Hm.", "assistant\n", {"reasoning_content": "Hm.", "content": None}),
        ("<think>\n\n</think>\n\nYes.", "assistant\n", {"reasoning_content": "", "content": "Yes."}),
        (
            "The tag </think> ends it.",
            "assistant\n<think>\n\n</think>\n\n",
            {"content": "The tag </think> ends it."},
        ),
        (
            "<think>Hm.</think>The tag </think> ends it.",
            "assistant\n",
            {"reasoning_content": "Hm.", "content": "The tag </think> ends it."},
        ),
    ],
)
@pytest.mark.parametrize("special", [("<eos>",), ("<eos>", "<think>", "</think>")])
def test_reasoning_is_apart(text: str, prompt: str, wanted: dict[str, Any], special: tuple[str, ...]) -> None:
    found, reason = message(output(THINK, *MARKS, special=special), text, prompt=prompt)
    if special != ("<eos>",):  # which texts do not show
        wanted = {key: value and value.replace("</think>", "") for key, value in wanted.items()}
    assert (found, reason) == (wanted, "stop")


def test_model_without_these_tokens_reasons_only_after_an_opening_mark() -> None:
    of = output("{{ x }}")
    assert message(of, "Write </think> then.")[0] == {"content": "Write </think> then."}
    assert message(of, "<think>a</think>b")[0] == {"reasoning_content": "a", "content": "b"}


def test_end_belongs_to_the_opening_mark() -> None:
    of = output(THINK, *MARKS, "[THINK]", "[/THINK]")
    found, _ = message(of, "<think>a[/THINK]b</think>c")
    assert found == {"reasoning_content": "a[/THINK]b", "content": "c"}
    found, _ = message(of, "a[/THINK]b</think>c", prompt="assistant<think>")
    assert found == {"reasoning_content": "a", "content": "b</think>c"}


def test_answer_in_a_format_does_not_reason_though_the_prompt_opens_it() -> None:
    of = output(THINK, *MARKS)
    prompt = "assistant\n<think>\n"
    assert message(of, "{}", prompt=prompt, response_format={"type": "json_object"})[0] == {"content": "{}"}
    assert message(output(THINK, *MARKS, has_grammar=True), "{}", prompt=prompt)[0] == {"content": "{}"}


def test_calls() -> None:
    of = output(TEMPLATES["Hermes'"] + THINK, *MARKS)
    found, reason = message(of, f"<think>Hm.</think>\n\nI look.\n{CALL}\n{CALL}", tools=[F])
    assert reason == "tool_calls"
    assert (found["reasoning_content"], found["content"]) == ("Hm.", "I look.")
    first, second = found["tool_calls"]
    assert first["function"] == second["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert message(of, CALL, tools=[F])[0]["content"] is None
    alone, _ = message(of, f"{CALL}\n{CALL}", tools=[F], parallel_tool_calls=False)
    assert len(alone["tool_calls"]) == 1


def test_what_is_no_call() -> None:
    of = output(TEMPLATES["Hermes'"] + THINK, *MARKS)
    assert message(of, CALL) == ({"content": CALL}, "stop")  # no tools
    assert message(of, CALL, tools=[F], tool_choice="none") == ({"content": CALL}, "stop")
    assert message(of, "Yes.", tools=[F]) == ({"content": "Yes."}, "stop")
    in_thought, reason = message(of, f"<think>{CALL}</think>No.", tools=[F])
    assert (in_thought, reason) == ({"reasoning_content": CALL, "content": "No."}, "stop")


def test_call_before_a_limit() -> None:
    of = output(TEMPLATES["Hermes'"], *MARKS)
    found, reason = message(of, f'{CALL}\n<tool_call>\n{{"name": "f", "argu', reason="length", tools=[F])
    assert (found["content"], len(found["tool_calls"]), reason) == ('<tool_call>\n{"name": "f", "argu', 1, "length")


def test_call_before_a_stop_string() -> None:
    of = output(TEMPLATES["Mistral's"], "[TOOL_CALLS]", special=("<eos>", "[TOOL_CALLS]"))
    call = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
    found, reason = message(of, f"{call}\nEND", shown=f"{call[12:]}\n", tools=[F], stop="END")
    assert (found["content"], reason) == (None, "tool_calls")
    assert len(found["tool_calls"][0]["id"]) == 9  # as templates of Mistral demand
    whole, _ = message(of, f"{call}\nEND", tools=[F])
    assert whole["content"] == "END"


def test_channels_of_gpt_oss() -> None:
    marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"]
    of = output("<|start|>{{ tools }}<|channel|>analysis<|message|>", *marks, special=("<eos>", *marks))
    begin = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert message(of, f"{begin}<|channel|>final<|message|>Yes.")[0] == {"reasoning_content": "Hm.", "content": "Yes."}
    found, reason = message(
        of, f'{begin}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}', tools=[F]
    )
    assert (found["reasoning_content"], found["content"], reason) == ("Hm.", None, "tool_calls")
    assert message(of, "plain")[0] == {"content": "plain"}


def test_grammars_that_there_cannot_be() -> None:
    def grammar(of: ChatOutput, prompt: str = "assistant\n", **body: Any) -> str | None:
        asked = ChatBody.read({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [F], **body})
        return of.grammar(asked.use, of.tokenizer.encode(prompt))

    hermes = TEMPLATES["Hermes'"]
    assert grammar(output(hermes)) is None
    assert grammar(output(hermes), tool_choice="required")
    assert "think" in (grammar(output(hermes + THINK, *MARKS), tool_choice="required") or "")
    strict = grammar(output(hermes + THINK, *MARKS), tools=[{**F, "function": {**F["function"], "strict": True}}]) or ""
    for text, fits in [
        ("<think>a</think>b", True),
        (f"<think>{CALL}, or not</think>\n\nText.\n{CALL}", True),
        ("Text.", True),
        ("Text. <think>", False),  # reasoning is at the beginning only: else there are too many states
        ("<think>a", False),
    ]:
        assert bool(re.fullmatch(strict, text)) is fits, text
    off = "assistant\n<think>\n\n</think>\n\n"
    assert "think" not in (grammar(output(hermes + THINK, *MARKS), off, tool_choice="required") or "think")
    with pytest.raises(SpecbatchError, match="this tool_choice needs a grammar, and calls of t have gpt-oss' form"):
        grammar(output("<|start|><|channel|><|message|>"), tool_choice="required")
    with pytest.raises(SpecbatchError, match="<think> and </think> are special tokens, which it cannot have; switch"):
        grammar(output(hermes, *MARKS, special=("<think>", "</think>")), "<think>", tool_choice="required")
