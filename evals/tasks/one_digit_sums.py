"""Sums and differences of two one-digit numbers: arithmetic of which even a very small model solves about half.

There are 200 such expressions. A seeded shuffle splits them into 100 scored ones and 100 for few-shot examples, so no
scored expression is ever an example.
"""

from __future__ import annotations

import random
from typing import Any

SEED = 0
SCORED = 100


def rows() -> list[dict[str, str]]:
    """All 200 `{"question": "4 - 9", "answer": "-5"}`, always in the same order; the first `SCORED` are scored."""
    made = []
    for left in range(10):
        for right in range(10):
            made.append({"question": f"{left} + {right}", "answer": str(left + right)})
            made.append({"question": f"{left} - {right}", "answer": str(left - right)})
    random.Random(SEED).shuffle(made)
    return made


def splits(**_: Any) -> Any:
    """The `DatasetDict` that lm-eval reads; the task file names this function."""
    from datasets import Dataset, DatasetDict

    made = rows()
    return DatasetDict(train=Dataset.from_list(made[SCORED:]), test=Dataset.from_list(made[:SCORED]))


def choices(**_: Any) -> Any:
    """The same rows for `one_digit_choices`, with four numbers within 4 of the answer, in a seeded order, and the index
    of the correct one."""
    from datasets import Dataset, DatasetDict

    drawn, made = random.Random(SEED), []
    for row in rows():
        answer = int(row["answer"])
        others = drawn.sample([number for number in range(answer - 4, answer + 5) if number != answer], 3)
        numbers = drawn.sample([answer, *others], 4)
        made.append({**row, "choices": [str(number) for number in numbers], "right": numbers.index(answer)})
    return DatasetDict(train=Dataset.from_list(made[SCORED:]), test=Dataset.from_list(made[:SCORED]))
