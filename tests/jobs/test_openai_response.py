"""Log-probabilities in OpenAI's responses: names and bytes of tokens, equal texts, the chosen token."""

from __future__ import annotations

from typing import Any

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.jobs.chat_output import ChatOutput
from specbatch.jobs.openai_request import BODIES
from specbatch.jobs.openai_response import response_body
from specbatch.text.tokenizer import ByteTokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OF = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}


def logprobs(url: str, tokens: list[int], text: str, top: list[dict[int, float]] | None = None) -> dict[str, Any]:
    body = BODIES[url].read({"model": "m", **OF[url]})
    values = [-1.0 - place for place in range(len(tokens))]
    done = Completion(0, [1], tokens, text, "stop", RequestMetrics(), logprobs=values, top_logprobs=top)
    found: dict[str, Any] = response_body("n", "m", body, [[done]], ChatOutput(ByteTokenizer(300)))["choices"][0][
        "logprobs"
    ]
    return found


def test_bytes_in_chat_are_those_of_the_tokens() -> None:
    tokens = [*"é".encode(), 256]
    found = logprobs(CHAT, tokens, "é", [{0xC3: -1.0, 0xC4: -2.0}, {0xA9: -2.0}, {256: -3.0, 299: -4.0, 400: -5.0}])
    content = found["content"]
    assert [one["bytes"] for one in content] == [[0xC3], [0xA9], [*b"<eos>"]]
    assert [one["token"] for one in content] == ["\\xc3", "\\xa9", "<eos>"]
    others = [[(one["token"], one["bytes"]) for one in place["top_logprobs"]] for place in content]
    assert others[0] == [("\\xc3", [0xC3]), ("\\xc4", [0xC4])]
    assert others[2] == [("<eos>", [*b"<eos>"]), ("<299>", [*b"<299>"]), ("", [])]


def test_completions_keep_entries_of_equal_text() -> None:
    top = [{97: -0.5, 98: -1.0}, {0xC4: -0.1, 0xC3: -2.0, 400: -3.0, 401: -4.0}, {98: -0.2, 97: -0.3}]
    found = logprobs(TEXT, [97, 0xC3, 0xA9], "aé", top)
    assert found["tokens"] == ["a", "", "é"]
    assert found["text_offset"] == [0, 1, 1]
    assert found["top_logprobs"] == [
        {"a": -1.0, "b": -1.0},
        {"bytes:\\xc4": -0.1, "": -2.0, "token_id:400": -3.0, "token_id:401": -4.0},
        {"b": -0.2, "a": -0.3, "é": -3.0},  # the chosen token was not among the likeliest
    ]
    assert logprobs(TEXT, [97], "a")["top_logprobs"] is None


def test_infinity_is_openais_value() -> None:
    found = logprobs(TEXT, [97], "a", [{97: -1.0, 98: float("-inf")}])
    assert found["top_logprobs"] == [{"a": -1.0, "b": -9999.0}]


def test_no_logprobs() -> None:
    body = BODIES[TEXT].read({"model": "m", "prompt": "x"})
    done = Completion(0, [1], [97], "a", "stop", RequestMetrics())
    assert response_body("n", "m", body, [[done]], ChatOutput(ByteTokenizer(300)))["choices"][0]["logprobs"] is None
