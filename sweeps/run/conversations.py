"""Conversations of several turns (MT-Bench, SPEED-Bench): the prompts of each turn hold the answers to the ones before.

A point asks the first turns of all its conversations, then all second turns, and so on. The answers are those of the
configuration itself, as a user of it would see: greedy answers of a lossless configuration are the baseline's wherever
logits are not nearly equal. To give all configurations the same first answers, write them into the file, as messages of
the assistant: such a row is one prompt, or with `replay` a turn for each of them (`specbatch.jobs.replay`). Reasoning
is left out of answers, as chat clients do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.jobs.replay import history_after
from specbatch.text.thinking import Reasoning

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.servers.engine import HttpEngine
    from specbatch.sweeps.workload.workloads import Workload
    from specbatch.text.tokenizer import Tokenizer

Message = dict[str, Any]
TEMPLATE_TOKENS = 16  # that a template adds to a message, at most by estimate


@dataclass(frozen=True)
class _Turn:
    """The requests of one turn: the places of their conversations among the prompts of the point, token ids, sampling
    parameters, and the messages that the ids were rendered from. number: from 1."""

    number: int
    places: list[int]
    prompts: list[list[int]]
    params: list[SamplingParams]
    messages: list[list[Message]]


@dataclass(frozen=True)
class Call:
    """A call of `generate`: its turn, the places of its requests, and their completions."""

    turn: int
    places: list[int]
    completions: list[Completion]


def ask(
    engine: InferenceEngine | HttpEngine,
    workload: Workload,
    prompts: list[list[int]],
    params: list[SamplingParams],
    concurrency: int,
    on_completion: Callable[[Completion], None],
) -> Iterator[Call]:
    """Run the prompts of a point, encoded by `Workload.prompts`, and the later turns of their conversations."""
    turn: _Turn | None = _first_turn(workload, prompts, params)
    while turn is not None:
        answers: list[Completion] = []
        places = turn.places
        calls = [slice(at, at + 1) for at in range(len(places))] if workload.sequential else [slice(None)]
        for part in calls:
            done = engine.generate(
                turn.prompts[part],
                turn.params[part],
                concurrency=concurrency,
                arrivals=workload.arrivals(len(places)),
                on_completion=on_completion,
            )
            answers += done
            yield Call(turn.number, places[part], done)
        turn = _next_turn(workload, engine.tokenizer, turn, answers)
        if turn is not None and (know_messages := getattr(engine, "know_messages", None)):  # a client of a server
            know_messages(turn.prompts, turn.messages)


def label(workload: Workload, calls: list[Call], rows: list[dict[str, Any]], count: int) -> None:
    """Give the rows of all requests, in the order of the calls, their index in the point, and their turn and category
    if prompts have them. count: the prompts of the point."""
    remaining = iter(rows)
    has_categories = any(item.category for item in workload.rows)
    for call in calls:
        for row in islice(remaining, len(call.places)):
            place = call.places[row["index"]]
            row["index"] = (call.turn - 1) * count + place
            if workload.most_turns > 1:
                row["turn"] = call.turn
            if has_categories:
                row["category"] = workload.rows[place % len(workload.rows)].category or ""


def longest(
    workload: Workload, tokenizer: Tokenizer, prompts: list[list[int]], params: list[SamplingParams]
) -> Iterator[int]:
    """Most tokens of each conversation at its end."""
    for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        row = workload.rows[place % len(workload.rows)] if workload.rows else None
        later = () if row is None else row.later
        if row is not None and workload.replay:  # its last prompt is known
            history = [*row.value, *(message for step in later for message in step)]
            template = workload.chat_template is not False
            last = replace(row, value=history).encode(tokenizer, chat_template=template, thinking=workload.thinking)
            yield len(last) + wanted.max_new_tokens
            continue
        asked = sum(len(tokenizer.encode(str(text))) + 2 * TEMPLATE_TOKENS for text in later)
        yield len(prompt) + asked + (1 + len(later)) * wanted.max_new_tokens


def _first_turn(workload: Workload, prompts: list[list[int]], params: list[SamplingParams]) -> _Turn:
    places, rows = list(range(len(prompts))), workload.rows
    messages = [rows[place % len(rows)].value if workload.most_turns > 1 else [] for place in places]
    return _Turn(1, places, prompts, params, messages)


def _next_turn(workload: Workload, tokenizer: Tokenizer, turn: _Turn, answers: list[Completion]) -> _Turn | None:
    """The turn after `turn`, to whose prompts `answers` are the completions; None if it was the last. A conversation
    with a request that failed ends."""
    found = _Turn(turn.number + 1, [], [], [], [])
    if workload.most_turns < found.number:
        return None
    reasoning = Reasoning(tokenizer)
    each = zip(turn.places, turn.prompts, turn.params, turn.messages, answers, strict=True)
    for place, prompt, params, messages, answer in each:
        row = workload.rows[place % len(workload.rows)]
        if len(row.later) < turn.number or not answer.is_complete:
            continue
        reply = _text(tokenizer, reasoning, prompt, answer)
        history = history_after(messages, reply, row.later[turn.number - 1])
        template = workload.chat_template is not False
        found.places.append(place)
        found.prompts.append(
            replace(row, value=history).encode(tokenizer, chat_template=template, thinking=workload.thinking)
        )
        found.params.append(_of_turn(params, found.number))
        found.messages.append(history)
    return found if found.places else None


def _text(tokenizer: Tokenizer, reasoning: Reasoning, prompt: list[int], answer: Completion) -> str:
    """The text of an answer, without special tokens and reasoning. A server's answer has no token ids."""
    ids = answer.token_ids or tokenizer.encode(answer.text, add_special_tokens=False)
    opened = reasoning.is_opened_by(tokenizer.decode(prompt[-32:], skip_special_tokens=False))
    return reasoning.answer_of(tokenizer.decode(ids, skip_special_tokens=True), ids, opened=opened).strip()


def _of_turn(params: SamplingParams, number: int) -> SamplingParams:
    """A seed of its own for each turn, the same in all configurations."""
    if params.seed is None:
        return params
    return replace(params, seed=random.Random(f"{params.seed}/turn {number}").getrandbits(31))
