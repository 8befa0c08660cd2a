"""Sanity checks of outputs: each problem gives a warning, good outputs give none."""

from __future__ import annotations

import json

import pytest

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.sweeps.run.sanity_checks import LEAST_LOOP, LONGEST_PERIOD, ends_in_loop, warnings
from specbatch.sweeps.workload.workloads import Workload


def answers(*texts, reason="stop", tokens=9, sent=3, counted=3):
    metrics = RequestMetrics(prompt_tokens=counted, output_tokens=tokens)
    return [Completion(n, [5] * sent, [], text, reason, metrics) for n, text in enumerate(texts)]


def reasoning(text, tokens, reasoned=2):
    """An answer of which so many tokens are reasoning, without its opening mark."""
    (one,) = answers(text, tokens=tokens)
    one.metrics.reasoning_tokens = reasoned
    return [one]


@pytest.fixture
def asked(tmp_path):
    def make(form="messages", **settings):
        row = {"messages": [{"role": "user", "content": "Hi"}]} if form == "messages" else {form: "Hi"}
        (tmp_path / "in.jsonl").write_text(json.dumps(row))
        return Workload(str(tmp_path / "in.jsonl"), output_len=16, **settings)

    return make


def found(workload, completions, *, drafts=True):
    return " | ".join(warnings(workload, completions, workload.params(len(completions)), drafts=drafts))


def test_good_answers_give_no_warning(asked):
    good = answers("It is 42.<|im_end|>", "Paris.")
    one_long = answers("It is 42.", "Paris.")
    one_long[0].finish_reason = "length"
    for workload, completions in (
        (asked(), good),
        (asked(thinking=False), good),
        (asked("prompt"), good),
        (asked(thinking=True), answers("<think>So</think>42", "<think>\n</think>Paris")),
        (asked(), []),
        (asked(), answers("", reason="abort")),
        (asked(), one_long),
        (asked(), answers("4", "", "7", "5")),  # an end token alone is counted, not shown
        (Workload(output_len=16), answers("<think>", reason="length", tokens=16)),  # random prompts: only the length
    ):
        assert found(workload, completions) == ""


def test_reasoning_that_the_prompt_opens_is_known_by_its_tokens(asked):
    assert found(asked(thinking=True), reasoning("b", tokens=3)) == ""


@pytest.mark.parametrize(
    ("form", "settings", "completions", "warning"),
    [
        ("messages", {"thinking": False}, answers("<think>", "a"),
         "1 of 2 answers contain <think> though thinking is off"),
        ("messages", {"thinking": False}, answers("b</think>", "a"), "though thinking is off"),
        ("messages", {"thinking": True}, answers("a", "b"),
         "no answer contains <think> or </think> though thinking is on"),
        ("messages", {}, answers("<think>Hm", "a"), "1 of 2 answers end inside their reasoning: use more than 16"),
        ("messages", {"thinking": False}, reasoning("b", tokens=3), "1 of 1 answers contain <think> though"),
        ("messages", {}, reasoning("b", tokens=3, reasoned=3), "1 of 1 answers end inside their reasoning"),
        ("messages", {}, answers("a", "b", reason="length"),
         "all answers were cut off at 16 tokens: use a larger --output-len, or the model is a base model"),
        ("messages", {}, answers("x<|im_start|>", "a"),
         "1 of 2 answers contain special tokens of a chat template: a base model"),
        ("prompt", {}, answers("[INST] x", "a"), "needs --chat-template"),
        ("messages", {}, [*answers("", "", tokens=1), *answers("a")],
         "2 of 3 answers are empty: try --no-chat-template"),
        ("prompt", {}, answers("", tokens=1), "empty: try --chat-template"),
    ],
)  # fmt: skip
def test_warnings(asked, form, settings, completions, warning):
    assert warning in found(asked(form, **settings), completions)


def test_whole_warnings(asked):
    cut = answers("a", "b", reason="length")
    assert found(asked("prompt"), cut) == "all answers were cut off at 16 tokens: use a larger --output-len"
    short = "2 of 2 answers are shorter than requested: the engine stops at end tokens"
    assert found(Workload(output_len=16), answers("", "", tokens=15)) == short
    limit = "2 of 3 answers were cut off at the server's maximum length of prompt and answer: "
    limited = [*answers("", "", tokens=15, reason="length"), *answers("", tokens=16, reason="length")]
    assert found(Workload(output_len=16), limited).startswith(limit)
    tokens = "8 input tokens were counted where 6 were sent: the server tokenizes prompts differently"
    assert found(asked(), answers("a", "b", counted=4)) == tokens
    assert found(Workload(output_len=16), answers("a", "b", counted=4, tokens=16)) == tokens


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_loops_at_the_end_are_found(period: int) -> None:
    repeated = [n % period for n in range(period + LEAST_LOOP)]
    assert ends_in_loop([99, 98, *repeated])
    assert not ends_in_loop(repeated[1:])
    assert not ends_in_loop([*repeated, 99])
    assert not ends_in_loop([*repeated[:-5], 99, *repeated[-4:]])
    assert not ends_in_loop([n % (LONGEST_PERIOD + 1) for n in range(100)])


def test_answers_that_end_in_a_loop_are_counted(asked) -> None:
    one, other = answers("a b a b", "It is 42.")
    one.token_ids = [3, 4] * 40
    for workload in (asked(), Workload(output_len=9)):
        assert "1 of 2 answers end in a loop, which is easy to draft" in found(workload, [one, other])
        assert "loop" not in found(workload, [one, other], drafts=False)
