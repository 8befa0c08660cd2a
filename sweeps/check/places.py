"""Places of an answer whose tokens a setting must change, or rounding cannot, by the server's log-probabilities."""

from __future__ import annotations

import math

from specbatch.servers.replies import Reply, Token

HOT = 2.0  # a temperature


def lead(reply: Reply, index: int) -> float:
    """How much likelier the token at `index` is than any other, in nats; negative if it is not the most likely one."""
    top, token = reply.top[index], reply.pieces[index]
    others = [value for other, value in top.items() if other != token]
    return reply.logprobs[index] - max(others) if others else math.inf


def largest_gap(reply: Reply) -> float:
    """The largest distance, in nats, of a token from the most likely one of its place."""
    return max((-lead(reply, index) for index in range(_shown(reply))), default=0.0)


def clear_tokens(reply: Reply, least: float) -> int:
    """The number of first tokens that lead by `least` each."""
    count = _shown(reply)
    return next((index for index in range(count) if lead(reply, index) < least), count)


def hot_chances(reply: Reply) -> list[float]:
    """For each token an upper bound of its probability at temperature `HOT`: that where all others are one token."""
    found = []
    for value in reply.logprobs:
        own = math.exp(min(value, 0.0) / HOT)
        rest = -math.expm1(min(value, 0.0))
        found.append(own / (own + rest ** (1 / HOT)))
    return found


def stop_place(text: str) -> int | None:
    """Where two characters of a text are for the first time, from its second quarter on."""
    for at in range(max(1, len(text) // 4), len(text) - 2):
        stop = text[at : at + 2]
        if text.find(stop) == at and "\ufffd" not in stop and stop.strip() == stop:
            return at
    return None


def first_change(reply: Reply, known: set[Token], *, is_raised: bool, least: float) -> int | None:
    """The number of tokens until a penalty must have changed one. known: tokens of the prompt, which some servers count
    as well."""
    seen: set[Token] = set()
    for index in range(_shown(reply)):
        token, top = reply.pieces[index], reply.top[index]
        if is_raised:
            others = [value for other, value in top.items() if other in seen]
            is_place = token not in seen | known
        else:
            others = [value for other, value in top.items() if other not in seen | known]
            is_place = token in seen
        if is_place and others and reply.logprobs[index] - max(others) < least:
            return index + 1
        seen.add(token)
    return None


def repeats(reply: Reply, prompt: set[Token]) -> tuple[list[int], list[int]]:
    """The numbers of tokens until a repetition penalty of 2 should have changed one: near ties of a token that the
    answer had before, and of one of the prompt, as long as none of the answer is concerned."""
    seen: set[Token] = set()
    of_answer: list[int] = []
    of_prompt: list[int] = []
    for index in range(_shown(reply)):
        token = reply.pieces[index]
        best = max(
            (value for other, value in reply.top[index].items() if other not in seen | prompt), default=-math.inf
        )
        if reply.logprobs[index] - best < 0.5:
            if token in seen:
                of_answer.append(index + 1)
            elif token in prompt and not of_answer:
                of_prompt.append(index + 1)
        seen.add(token)
    return of_answer, of_prompt


def _shown(reply: Reply) -> int:
    return min(len(reply.top), len(reply.logprobs), len(reply.pieces))


def new_token(ids: list[int]) -> int | None:
    """The place of the first token that is not one of those before it."""
    return next((at for at in range(1, min(len(ids), 5)) if ids[at] not in ids[:at]), None)
