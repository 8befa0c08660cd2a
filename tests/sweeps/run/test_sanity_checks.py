"""Sanity checks of outputs: each problem gives a warning, good outputs give none."""

from __future__ import annotations

import json

import pytest

from specbatch.core.request import Completion, RequestMetrics
from specbatch.sweeps.run.sanity_checks import warnings
from specbatch.sweeps.run.workloads import Workload


def answers(*texts, reason="stop", tokens=9, sent=3, counted=3):
    metrics = RequestMetrics(prompt_tokens=counted, output_tokens=tokens)
    return [Completion(n, [5] * sent, [], text, reason, metrics) for n, text in enumerate(texts)]


@pytest.fixture
def asked(tmp_path):
    def make(form="messages", **settings):
        row = {"messages": [{"role": "user", "content": "Hi"}]} if form == "messages" else {form: "Hi"}
        (tmp_path / "in.jsonl").write_text(json.dumps(row))
        return Workload(str(tmp_path / "in.jsonl"), output_len=16, **settings)

    return make


def told(workload, found):
    return " | ".join(warnings(workload, found, workload.params(len(found))))


def test_good_answers_give_no_warning(asked):
    good = answers("It is 42.<|im_end|>", "Paris.")
    assert told(asked(), good) == ""
    assert told(asked(thinking=False), good) == ""
    assert told(asked("prompt"), good) == ""
    assert told(asked(thinking=True), answers("<think>So</think>42", "<think>\n</think>Paris")) == ""
    assert told(asked(), []) == told(asked(), answers("", reason="abort")) == ""
    one_long = answers("It is 42.", "Paris.")
    one_long[0].finish_reason = "length"
    assert told(asked(), one_long) == ""
    assert told(asked(), answers("4", "", "7", "5")) == "", "an end token alone is counted, not seen"


def test_unexpected_and_missing_reasoning(asked):
    assert "1 of 2 answers contain <think> though thinking is off" in told(
        asked(thinking=False), answers("<think>", "a")
    )
    assert "though thinking is off" in told(asked(thinking=False), answers("b</think>", "a"))
    assert "no answer contains <think> or </think> though thinking is on" in told(
        asked(thinking=True), answers("a", "b")
    )
    assert "1 of 2 answers end inside their reasoning: use more than 16" in told(asked(), answers("<think>Hm", "a"))


def test_answers_that_are_all_cut_off(asked):
    cut = answers("a", "b", reason="length")
    assert told(asked(), cut).startswith(
        "all answers were cut off at 16 tokens: use a larger --output-len, or the model is a base model"
    )
    assert told(asked("prompt"), cut) == "all answers were cut off at 16 tokens: use a larger --output-len"


def test_template_tokens_and_empty_answers(asked):
    assert "1 of 2 answers contain special tokens of a chat template: a base model" in told(
        asked(), answers("x<|im_start|>", "a")
    )
    assert "needs --chat-template" in told(asked("prompt"), answers("[INST] x", "a"))
    assert "2 of 3 answers are empty: try --no-chat-template" in told(
        asked(), [*answers("", "", tokens=1), *answers("a")]
    )
    assert "empty: try --chat-template" in told(asked("prompt"), answers("", tokens=1))


def test_random_prompts_are_checked_only_for_length():
    workload = Workload(output_len=16)
    assert told(workload, answers("<think>", reason="length", tokens=16)) == ""
    assert told(workload, answers("", "", tokens=15)) == (
        "2 of 2 answers are shorter than requested: the engine stops at end tokens"
    )


def test_prompts_that_were_tokenized_differently(asked):
    said = "8 input tokens were counted where 6 were sent: the server tokenizes prompts differently"
    assert told(asked(), answers("a", "b", sent=3, counted=4)) == said
    assert told(Workload(output_len=16), answers("a", "b", sent=3, counted=4, tokens=16)) == said
