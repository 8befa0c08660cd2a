"""N-gram lookup in plain Python."""

from __future__ import annotations


def continuations(tokens: list[int], longest: int, shortest: int, count: int) -> list[list[int]]:
    """The `count` tokens after each earlier occurrence of a suffix of `shortest` to `longest` tokens, longest and
    latest first, without duplicates. A continuation may run into itself."""
    found: list[list[int]] = []
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for place in range(start + length, start + length + count):
                    text.append(text[place])
                if text[len(tokens) :] not in found:
                    found.append(text[len(tokens) :])
    return found
