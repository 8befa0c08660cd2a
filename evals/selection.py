"""Which questions of its tasks lm-eval asks: all, a part, or some by number.

lm-eval 0.4.13 has no offset. It asks the questions of `samples` in the order of the data and takes their numbers from
the list as it is written, so those of an unsorted list are wrong. Here each question has its number in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

Chosen = Mapping[str, Sequence[int]]  # by task: numbers of questions, ascending


@contextmanager
def asking(tasks: Mapping[str, Any], chosen: Chosen, built: Callable[[str, Any], None]) -> Iterator[None]:
    """In this block lm-eval asks the questions `chosen` of each of its `tasks`.

    The few-shot examples of a question depend on how many questions have drawn some before. For a range, those before
    it draw, too, and their prompts are dropped, so that every prompt is that of a run with all questions. For a list
    only its own questions draw, as in lm-eval.

    built: called with the name of a task and the task, when it has the prompts
    """
    for name, task in tasks.items():
        _choose(name, task, chosen[name], built)
    try:
        yield
    finally:
        for task in tasks.values():
            del task.build_all_requests, task.doc_iterator


def _choose(name: str, task: Any, numbers: Sequence[int], built: Callable[[str, Any], None]) -> None:
    build = task.build_all_requests

    def documents(numbers: Sequence[int]) -> list[tuple[int, Any]]:
        wanted = numbers if isinstance(numbers, range) else {*numbers}
        until = islice(task.eval_docs, numbers[-1] + 1 if numbers else 0)  # a data set takes time for each row
        return [(number, doc) for number, doc in enumerate(until) if number in wanted]

    def build_all_requests(**how: Any) -> None:
        before = numbers.start if isinstance(numbers, range) else 0
        every = documents(range(numbers.stop) if isinstance(numbers, range) else numbers)
        try:
            for part in (every[:before], every[before:]):
                if part:
                    task.doc_iterator = lambda part=part, **_: iter(part)
                    build(**how | {"limit": None})
        finally:
            task.doc_iterator = lambda **_: iter(documents(numbers))
        built(name, task)

    task.build_all_requests = build_all_requests
    task.doc_iterator = lambda **_: iter(documents(numbers))
