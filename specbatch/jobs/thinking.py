"""Where reasoning ends and the answer begins, for models that write <think> ... </think> (Qwen3, DeepSeek-R1)."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def opens_thinking(prompt: str) -> bool:
    """Does a rendered prompt end inside reasoning? Templates of models that always reason write the mark themselves."""
    return prompt.rstrip().endswith(OPEN)


def answer_of(text: str, *, opened: bool = False) -> str:
    """The text behind the reasoning; all of it where there is none, nothing where reasoning never ended.

    `opened`: the prompt had begun it (`opens_thinking`).
    """
    _, closed, answer = text.rpartition(CLOSE)
    if closed:
        return answer.lstrip()
    return "" if opened or OPEN in text else text
