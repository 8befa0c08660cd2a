"""Separates reasoning from the answer, for models that write <think> ... </think> (Qwen3, DeepSeek-R1)."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside reasoning, as the templates of models that always reason do."""
    return prompt.rstrip().endswith(OPEN)


def answer_of(text: str, *, opened: bool = False) -> str:
    """The text after the reasoning: all of it if there is none, nothing if the reasoning did not end.

    opened   whether the prompt ended inside reasoning (`opens_thinking`)
    """
    _, closed, answer = text.rpartition(CLOSE)
    if closed:
        return answer.lstrip()
    return "" if opened or OPEN in text else text
