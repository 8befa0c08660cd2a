"""Recorded conversations, such as those of agents with tool results, asked again turn by turn.

A line of the JSONL file has `messages` as in OpenAI's chat completions, tool calls and results included, and may have
`tools`, `id`, `category` and `sampling`. Every message of the assistant is a turn: what comes before it is the prompt.
The answer is measured and dropped, and the next prompt goes on with the recorded message: all engines get the same
prompts.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specbatch.config.field_errors import first_problem
from specbatch.errors import refuse
from specbatch.jobs.openai_request import Message
from specbatch.jobs.openai_tools import Tool
from specbatch.jobs.prompt_file import location, stream_rows
from specbatch.jobs.prompts import HALF_PAIR, SAMPLING, MalformedRowError, Prompt, no_text_in, parse_row, sampling_of

ASSISTANT = "assistant"
_BESIDE = ("tools", "id", "category", SAMPLING)


class _Recorded(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # named in a note

    messages: list[Message]
    tools: list[Tool] = Field(default_factory=list)
    id: str | int | None = None
    category: str | None = None
    sampling: Any = None


def read_replay(path: Path, setting: str = "dataset") -> list[Prompt]:
    """The conversations of a file, each asked first at its first message of the assistant. Refused: lines that are no
    conversations, and those that begin with the assistant or do not have it."""
    found = []
    unread: list[str] = []  # columns of a data set
    for number, row in stream_rows(setting, path, ("messages",), _BESIDE, unread=unread):
        try:
            value = parse_row(row)
            if (place := no_text_in(value)) is not None:
                raise MalformedRowError(f"{place} {HALF_PAIR}")
            if "messages" not in value:
                raise MalformedRowError(
                    'has no messages to replay; rows with "prompt" or "turns" are asked without a replay'
                )
            found.append(_prompt(number, _Recorded.model_validate(value), unread))
        except ValidationError as error:
            raise refuse(setting, location(path, number), first_problem(error)) from None
        except MalformedRowError as error:
            raise refuse(setting, location(path, number), str(error)) from None
    if not found:
        raise refuse(setting, str(path), 'has no conversations; write {"messages": [...]} on each line')
    return found


def _prompt(number: int, row: _Recorded, columns: list[str]) -> Prompt:
    turns = [place for place, message in enumerate(row.messages) if message.role == ASSISTANT]
    if not turns or not turns[0]:
        raise MalformedRowError("needs a message of the assistant, and one before it")
    messages = [message.as_template_value() for message in row.messages]
    return Prompt(
        number,
        "messages",
        messages[: turns[0]],
        row.id,
        sampling_of(row.sampling),
        category=row.category,
        later=tuple(messages[begin:end] for begin, end in pairwise(turns)),
        tools=[tool.as_template_value() for tool in row.tools],
        unread=(*columns, *(row.model_extra or ())),
    )


def history_after(
    messages: list[dict[str, Any]], answer: str, step: str | list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages of the next turn. step: what the user says after `answer`, or the recorded messages that take its
    place."""
    if isinstance(step, str):
        return [*messages, {"role": ASSISTANT, "content": answer}, {"role": "user", "content": step}]
    return [*messages, *step]
