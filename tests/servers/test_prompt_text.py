"""Prompts as text: the BOS token is left out where the server adds it, and only there."""

from __future__ import annotations

import json
import types

import pytest

from specbatch.servers.prompt_text import QUESTION, PromptText

BOS = 1
PROMPT = [BOS, *b"user: hi"]
ALONE = len("user: hi")


def tokenizer(*, adds: bool, bos_id: int | None = BOS):
    """A byte is a token; the BOS token is written "<s>"."""

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS, *text[3:].encode()] if text.startswith("<s>") else list(text.encode())
        return [BOS, *ids] if add_special_tokens and adds else ids

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("<s>" if one == BOS else chr(one) for one in ids)

    return types.SimpleNamespace(encode=encode, decode=decode, bos_id=bos_id)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("shown", [True, False, None])
def test_server_shows_whether_it_adds_the_token(adds, shown):
    """shown: by /tokenize; None: it has none, so that the tokenizer's rule counts."""
    asked = []

    def tokenize(body):
        asked.append(body)
        return "" if shown is None else json.dumps({"tokens": [BOS, 97] if shown else [97], "count": 1})

    texts = PromptText(tokenizer(adds=adds), tokenize)
    is_added = adds if shown is None else shown
    assert asked == [QUESTION]
    assert texts.of(PROMPT) == ("user: hi" if is_added else "<s>user: hi")
    assert texts.of(PROMPT[1:]) == "user: hi"
    texts.learn(PROMPT, texts.of(PROMPT), ALONE if is_added else ALONE + 2)  # disagrees
    later = is_added if shown is not None else not adds
    assert texts.of(PROMPT) == ("user: hi" if later else "<s>user: hi")


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("does", [True, False])
def test_first_count_of_a_prompt_decides_without_tokenize(adds, does):
    texts = PromptText(tokenizer(adds=adds), lambda body: "")
    texts.learn(PROMPT[1:], "user: hi", ALONE + 1)  # without the token: shows nothing
    texts.learn(PROMPT, texts.of(PROMPT), 3 * ALONE)  # counted otherwise: shows nothing
    texts.learn(PROMPT, texts.of(PROMPT), None)
    assert texts.of(PROMPT) == ("user: hi" if adds else "<s>user: hi")
    texts.learn(PROMPT, texts.of(PROMPT), ALONE + (not adds) + does)
    assert texts.of(PROMPT) == ("user: hi" if does else "<s>user: hi")
    texts.learn(PROMPT, texts.of(PROMPT), ALONE + does + (not does))  # later counts change nothing
    assert texts.of(PROMPT) == ("user: hi" if does else "<s>user: hi")


@pytest.mark.parametrize("answer", ["", "[]", "nonsense", '{"tokens": "ab"}', '{"tokens": ["a"]}', '{"detail": 404}'])
def test_other_answers_show_nothing(answer):
    assert PromptText(tokenizer(adds=True), lambda body: answer).of(PROMPT) == "user: hi"
    assert PromptText(tokenizer(adds=False), lambda body: answer).of(PROMPT) == "<s>user: hi"


def test_tokenizer_without_the_token():
    assert PromptText(tokenizer(adds=False, bos_id=None), lambda body: "").of(PROMPT) == "<s>user: hi"
