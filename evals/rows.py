"""The rows of GSM8K tasks, which are bundled or from files, and the few-shot examples of any lm-eval task.

GSM8K and GSM8K-Platinum never come from the hub or its cache: whichever task or group asks for them gets the bundled
rows, so that the same command makes the same prompts everywhere. Examples are drawn by lm-eval from the rows that the
task names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.jobs.questions import BUNDLED, Questions, bundled_questions, read_questions, refuse_shared

TRAINING = "gsm8k_train"
# Data sets on the hub, with their configuration: the bundled rows of each split.
_ON_HUB = {
    ("openai/gsm8k", "main"): {"train": TRAINING, "test": "gsm8k"},
    ("madrylab/gsm8k-platinum", "main"): {"test": "gsm8k_platinum"},
}


class _Splits(dict[str, Any]):
    """A data set of the hub, by split: rows are unpacked when lm-eval reads a split."""

    def __init__(self, rows: dict[str, Callable[[], Questions]]) -> None:
        super().__init__()
        self.rows = rows

    def __missing__(self, split: str) -> Any:
        from datasets import Dataset

        if split not in self.rows:
            raise refuse("split", split, f"this data set has {', '.join(self.rows)}")
        return self.setdefault(split, Dataset.from_list(self.rows[split]().rows))


@dataclass(frozen=True)
class Examples:
    """The few-shot examples of a task.

    source   where they come from; "none" without examples
    warning  "" unless examples are scored rows
    """

    count: int
    source: str
    warning: str


@dataclass(frozen=True)
class GivenRows:
    """The rows that a user names instead of those of the task; None: the task's own."""

    scored: Questions | None
    shots: Questions | None

    @classmethod
    def read(cls, data: Path | None, fewshot_data: Path | None) -> GivenRows:
        """data: a JSONL file; fewshot_data: another, or the name of a bundled question set."""
        scored = None if data is None else read_questions("data", data)
        if fewshot_data is None:
            return cls(scored, None)
        name = str(fewshot_data)
        if name in BUNDLED:
            return cls(scored, replace(bundled_questions(name), path=fewshot_data))
        return cls(scored, read_questions("fewshot_data", fewshot_data))

    @contextmanager
    def answering_for_the_hub(self) -> Iterator[None]:
        """Give lm-eval the bundled data sets, with the scored rows of the user, where it asks for those of the hub."""
        import datasets

        on_hub = datasets.load_dataset

        def load_dataset(path: str, name: str | None = None, **how: Any) -> Any:
            bundled = None if how else _ON_HUB.get((path, name or ""))
            if bundled is None:
                self._refuse_given(f"reads the data set {path}")
                return on_hub(path, name, **how)
            rows: dict[str, Callable[[], Questions]] = {
                split: partial(bundled_questions, source) for split, source in bundled.items()
            }
            if (scored := self.scored) is not None:
                rows["test"] = lambda: scored
            return _Splits(rows)

        datasets.load_dataset = load_dataset
        try:
            yield
        finally:
            datasets.load_dataset = on_hub

    def _refuse_given(self, why: str) -> None:
        for setting, rows in (("data", self.scored), ("fewshot_data", self.shots)):
            if rows is not None:
                raise refuse(setting, str(rows.path), f"the task {why}; leave it out, or use gsm8k")

    def source(self, task: Any) -> str:
        """Where the questions of lm-eval's task come from."""
        config, split = task.config, _scored_split(task)
        if isinstance(task.dataset, _Splits):
            return str(task.dataset.rows[split]())
        parts = (config.dataset_path, config.dataset_name, split)
        return " ".join(str(part) for part in parts if part) if config.dataset_path else "made by the task"

    def set_examples(self, name: str, task: Any, num_fewshot: int | None) -> Examples:
        """Set the number of examples of lm-eval's task, None being its own, and the rows that they are drawn from."""
        split, why = _scored_split(task), "as lm-eval defines the task"
        if not isinstance(task.dataset, _Splits):
            self._refuse_given(f"{name} has its own questions")
        else:
            why += f" (--fewshot-data {TRAINING} takes training rows)"
            if self.scored is not None and split != "test":
                raise refuse(
                    "data", str(self.scored.path), f"the task scores the split {split}, not test; leave it out"
                )
        count = _set_count(name, task, num_fewshot)
        if self.shots is not None:
            self._check_shots(name, task, count)
            _draw_from(task, "examples", self.shots)
        elif count and self.scored is not None and task.fewshot_cfg.split == "train" and _has_training(self.scored):
            _draw_from(task, split, self.scored)
            why = "because some of these are training rows"
        if not count:
            return Examples(0, "none", "")
        source = _source(task, self.source(task))
        _refuse_too_many(task, count, source)
        warning = f"few-shot examples come from the scored rows, {why}" if _are_scored(task) else ""
        return Examples(count, source, warning)

    def _check_shots(self, name: str, task: Any, count: int) -> None:
        assert self.shots is not None
        path = str(self.shots.path)
        if task.fewshot_cfg.samples is not None:
            raise refuse("fewshot_data", path, f"task {name} has fixed examples; leave it out")
        if not count:
            raise refuse("fewshot_data", path, f"task {name} is asked without examples (num_fewshot=0); leave it out")
        refuse_shared(task.dataset.rows[_scored_split(task)](), self.shots)


def _has_training(scored: Questions) -> bool:
    """Whether some of the rows are training rows, which would then be shown with their answers."""
    training = {row["question"].strip() for row in bundled_questions(TRAINING).rows}
    return any(row["question"].strip() in training for row in scored.rows)


def _scored_split(task: Any) -> str:
    return str(task.config.test_split or task.config.validation_split)


def _draw_from(task: Any, split: str, rows: Questions) -> None:
    """Let lm-eval draw the examples of a task with bundled rows from others, as `split`. Where this is the split that
    is scored, it leaves out the row of the question."""
    task.dataset.rows[split] = lambda: rows
    task.fewshot_cfg.split = split
    task.sampler.replace_df(list(task.fewshot_docs()))


def _set_count(name: str, task: Any, wanted: int | None) -> int:
    own = task.get_config("num_fewshot") or 0
    if wanted is None or wanted == own:
        wanted = own
    elif task.get_config("num_fewshot") == 0:
        raise refuse("num_fewshot", wanted, f"task {name} is defined without few-shot examples; leave it out, or use 0")
    task.set_config(key="num_fewshot", value=wanted)
    return int(wanted)


def _are_scored(task: Any) -> bool:
    """Whether few-shot examples come from the split that is scored."""
    scored = _scored_split(task)
    if task.fewshot_cfg.split is not None:
        return bool(task.fewshot_cfg.split == scored)
    if task.fewshot_cfg.samples is not None or task.config.training_split is not None:
        return False
    return task.config.validation_split in (None, scored)


def _leaves_scored_out(task: Any) -> bool:
    """Whether examples come from the scored rows, of which lm-eval leaves out the question's own."""
    split = task.fewshot_cfg.split
    return split is not None and split == task.config.test_split


def _source(task: Any, data_source: str) -> str:
    """Where the examples of a task come from."""
    if _leaves_scored_out(task):
        return f"the other rows of {data_source}"
    if (split := task.fewshot_cfg.split) is not None:
        return str(task.dataset.rows[split]()) if isinstance(task.dataset, _Splits) else f"the task's {split} rows"
    if task.fewshot_cfg.samples is not None:
        return "the task's own fixed examples"
    for split in (task.config.training_split, task.config.validation_split):
        if split is not None:
            return f"the task's {split} rows"
    return "the scored rows, as lm-eval defines this task: a question may be among its own examples"


def _refuse_too_many(task: Any, count: int, source: str) -> None:
    pool = list(task.sampler.df)
    available = len(pool)
    if pool and _leaves_scored_out(task):  # duplicates of the question's row are left out with it
        available -= max(Counter(json.dumps(row, sort_keys=True, default=str) for row in pool).values())
    if count > available:
        raise refuse("num_fewshot", count, f"{source}: {available} are available; use at most {available}")
