"""Datasets of text for a workload: GSM8K, tasks of lm-eval, and files of prompts; all categories, or one."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from specbatch.errors import refuse
from specbatch.jobs.long_text import DOCUMENTS, MANY_SHOT, REPOSITORY
from specbatch.jobs.prompts import FORMS, TURNS, Prompt, read_prompts
from specbatch.jobs.questions import bundled_questions
from specbatch.jobs.replay import read_replay

LM_EVAL = "lm-eval:"
DATASETS = (
    f"random, gsp, gsm8k, sharegpt, {LM_EVAL}TASK, {REPOSITORY}FOLDER, {DOCUMENTS}FOLDER, {MANY_SHOT} or the path of "
    "a .jsonl file"
)


class TaskReader(Protocol):
    """Reads the prompts of a task, and the texts that end an answer."""

    def __call__(self, name: str, data: Path | None, *, as_messages: bool) -> tuple[list[Prompt], tuple[str, ...]]: ...


def read_dataset(
    dataset: str, data: Path | None, read_task: TaskReader | None, *, as_messages: bool, replay: bool = False
) -> tuple[list[Prompt], tuple[str, ...]]:
    """The rows of a dataset of text, and what ends its answers. data: the file with its questions; None: its own;
    as_messages: of a task, conversations instead of plain text; replay: of a file, conversations as recorded."""
    if replay and not dataset.endswith(".jsonl"):
        raise refuse("replay", True, "asks the conversations of a file; use dataset='FILE.jsonl'")
    if dataset == "gsm8k":
        return (read_prompts(data, "data", takes_sampling=True) if data else _gsm8k()), ()
    if dataset.startswith(LM_EVAL):
        if read_task is None:
            raise refuse("dataset", dataset, "pass read_task=specbatch.evals.prompts.task_prompts")
        return read_task(dataset.removeprefix(LM_EVAL), data, as_messages=as_messages)
    if not dataset.endswith(".jsonl"):
        raise refuse("dataset", dataset, f"use {DATASETS}")
    if replay:
        return read_replay(Path(dataset)), ()
    return read_prompts(Path(dataset), "dataset", (*FORMS, TURNS), takes_sampling=True), ()


def of_categories(rows: list[Prompt], category: str | None) -> list[Prompt]:
    """The rows of a category, or of each in turn."""
    by_category: dict[str | None, list[Prompt]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    if category is None:
        return [row for round in zip_longest(*by_category.values()) for row in round if row is not None]
    if category not in by_category:
        known = ", ".join(name for name in by_category if name)
        raise refuse("category", category, f"use one of {known}" if known else "the prompts have no categories")
    return by_category[category]


def _gsm8k() -> list[Prompt]:
    rows = bundled_questions("gsm8k").rows
    return [Prompt(line=number, form="question", value=row["question"]) for number, row in enumerate(rows, start=1)]
