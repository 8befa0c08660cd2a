"""Separating reasoning from the answer."""

from __future__ import annotations

import pytest

from specbatch.jobs.thinking import answer_of, opens_thinking


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("The answer is 4.", False, "The answer is 4."),
        ("<think>\n2 + 2 = 5?\n</think>\n\nThe answer is 4.", False, "The answer is 4."),
        ("2 + 2 = 5?\n</think>\n\n4", True, "4"),
        ("<think>a</think>b<think>c</think> d ", False, "d "),
        ("<think>\nIt may be 5", False, ""),
        ("It may be 5", True, ""),
        ("<think></think>", False, ""),
        (" 4", False, " 4"),
    ],
)
def test_answer_is_the_text_after_the_reasoning(text, opened, answer):
    assert answer_of(text, opened=opened) == answer


def test_template_can_open_the_reasoning():
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("What is <think>?")
