"""Answers with tokens and log-probabilities, in the forms of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest
from local_server import QuietHandler
from rival_servers import Rival, rival

from specbatch.servers.client import Failed
from specbatch.servers.engine import HttpEngine
from specbatch.servers.replies import Question, Reply, ask
from specbatch.servers.server import Server

TEXTS = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"a": -0.5, "c": -2.0}, {"b": -1.0}]}
IDS = {
    "tokens": ["token_id:5", "token_id:6"],
    "token_logprobs": [-0.5, -1.0],
    "top_logprobs": [{"token_id:7": -3}, None],
}


def reply(*choices: dict[str, Any], **chunk: Any) -> Reply:
    found = Reply()
    for choice in choices:
        found.take({"choices": [choice], **chunk})
    return found


def test_completions() -> None:
    found = reply({"text": "ab", "logprobs": TEXTS, "finish_reason": None}, {"text": "", "finish_reason": "length"})
    assert (found.text, found.tokens, found.logprobs) == ("ab", ["a", "b"], [-0.5, -1.0])
    assert found.top == [{"a": -0.5, "c": -2.0}, {"b": -1.0}]
    found.check()
    found = reply({"text": "ab", "token_ids": [5, 6], "logprobs": IDS, "finish_reason": "stop"})
    assert (found.ids, found.pieces, found.top) == ([5, 6], [5, 6], [{7: -3.0}, {}])


def test_chats_and_llamacpp() -> None:
    item = {"id": 9, "token": "a", "logprob": -0.25, "top_logprobs": [{"id": 9, "token": "a", "logprob": -0.25}]}
    choice = {"delta": {"reasoning": "x", "content": "a"}, "logprobs": {"content": [item]}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    found = reply(choice, usage=usage, timings={"predicted_n": 1, "draft_n": 4})
    assert (found.text, found.pieces, found.top, found.drafted) == ("xa", [9], [{9: -0.25}], 4)
    assert (found.prompt_tokens, found.completion_tokens) == (3, 1)
    found.check()
    assert (found.ids, found.unshown) == ([9], 0)


def test_tokens_that_llamacpp_drafted_have_no_log_probabilities() -> None:
    """So those of the others name no place of the answer, and its text is what can be compared."""
    item = {"id": 9, "token": "a", "logprob": -0.25, "top_logprobs": []}
    shown, drafted = {"text": "a", "logprobs": {"content": [item]}}, {"text": "b", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    found = reply(shown, drafted, shown | {"finish_reason": "length"}, usage=usage)
    found.check()
    assert (found.tokens, found.unshown) == (["a", "b", "a"], 1)
    assert not found.ids + found.pieces + found.logprobs + found.top

    found = reply(shown | {"finish_reason": "stop"}, usage=usage | {"completion_tokens": 2})
    found.check()
    assert (found.ids, found.unshown) == ([9], 0), "an end token is counted and not shown"


@pytest.mark.parametrize(("text", "finish"), [("\ufffd", "stop"), ("a", "length"), ("\ufffd", "length")])
def test_parts_of_characters_that_llamacpp_does_not_show(text: str, finish: str) -> None:
    """Only an end token is counted and not shown: else the tokens would lack one, as if the server had lost it."""
    item = {"id": 9, "token": text, "logprob": -0.25, "top_logprobs": []}
    choice = {"text": text, "logprobs": {"content": [item]}, "finish_reason": finish}
    found = reply(choice, usage={"prompt_tokens": 3, "completion_tokens": 2})
    found.check()
    assert (found.ids, found.pieces, found.unshown) == ([], [], 1)


def test_text_alone() -> None:
    assert reply({"text": "ab", "finish_reason": "stop"}).tokens == ["a", "b"]


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        ({"error": {"message": "full"}}, "the stream ended with an error: full"),
        ({"choices": ["a"]}, "a chunk that is not of a completion"),
        ({"choices": [{"text": 3}]}, "a text that is not a string"),
        (
            {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["x"]}}]},
            "logprobs in an unknown",
        ),
        ({"choices": [{"text": "a", "logprobs": [1]}]}, "logprobs in an unknown form"),
    ],
)
def test_invalid(chunk: dict[str, Any], said: str) -> None:
    with pytest.raises(Failed, match=said):
        Reply().take(chunk)


def test_incomplete() -> None:
    with pytest.raises(Failed, match="the stream ended before its answer did"):
        reply({"text": "ab"}).check()
    with pytest.raises(Failed, match="the server ended the answer: abort"):
        reply({"text": "ab", "finish_reason": "abort"}).check()


def test_a_busy_server_refuses_nothing() -> None:
    assert Reply(status=400).is_refused
    assert not any(Reply(status=status).is_refused for status in (429, 408, 503, None))


def test_penalties_are_sent_and_events_may_be_long() -> None:
    """vLLM takes penalties that are not sent from generation_config.json. With return_token_ids the first event has all
    ids of the prompt."""
    server, prompt = Rival("vllm", model="org/toy"), list(range(100_000))
    send = QuietHandler.send_event
    with rival(server) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuietHandler, "send_event", lambda self, event: send(self, _with_prompt(event, prompt)))
        engine = HttpEngine(Server(url), tokenizer=False)
        asked = [Question([5], {"max_tokens": 2}), Question([5], {"max_tokens": 2, "repetition_penalty": 2.0})]
        found = ask(engine, asked)
    assert [one.error for one in found] == [None, None]
    assert [body["repetition_penalty"] for _, body in server.bodies] == [1.0, 2.0]
    assert {(body["presence_penalty"], body["frequency_penalty"]) for _, body in server.bodies} == {(0.0, 0.0)}


def _with_prompt(event: Any, prompt: list[int]) -> Any:
    return event | {"prompt_token_ids": prompt} if isinstance(event, dict) else event
