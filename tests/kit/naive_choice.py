"""The token that a target chooses by the rules of its sampling parameters, worked out by hand, for `Letters`."""

from __future__ import annotations

import regex
import torch
from targets import Letters

from specbatch import SamplingParams


def chosen(row: torch.Tensor, history: list[int], prompt: int, params: SamplingParams, ends: tuple[int, ...]) -> int:
    """The most likely token after `history`, by the rules as OpenAI and vLLM describe them."""
    values = adjusted(row, history, prompt, params)
    allowed = allowed_tokens(history[prompt:], params)
    without = {*ends, *completing(history[prompt:], params)}
    if allowed - without:  # else the grammar prevails: first over end tokens, then over bad words
        allowed -= without
    elif allowed - {*completing(history[prompt:], params)}:
        allowed -= {*completing(history[prompt:], params)}
    return max(allowed, key=values.__getitem__)


def adjusted(row: torch.Tensor, history: list[int], prompt: int, params: SamplingParams) -> list[float]:
    """The logits with biases and penalties."""
    values: list[float] = row.double().tolist()
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(history):
        rule = params.repetition_penalty
        values[token] = values[token] / rule if values[token] > 0 else values[token] * rule
    for token in set(history[prompt:]):
        values[token] -= params.frequency_penalty * history[prompt:].count(token) + params.presence_penalty
    return values


def allowed_tokens(answer: list[int], params: SamplingParams) -> set[int]:
    """Tokens after which the answer can still become a match, and end tokens if it is one."""
    letters = Letters()
    if params.regex is None:
        return set(range(letters.vocab_size))
    text = letters.decode(answer)
    found = {
        token
        for token in set(range(letters.vocab_size)) - letters.eos_ids
        if regex.fullmatch(params.regex, text + letters.decode([token]), partial=True)
    }
    return found | (letters.eos_ids if regex.fullmatch(params.regex, text) else set())


def completing(answer: list[int], params: SamplingParams) -> list[int]:
    """Tokens that complete a bad word."""
    words = [Letters().encode(text) for text in params.bad_words]
    return [word[-1] for word in words if answer[len(answer) - len(word) + 1 :] == word[:-1]]
