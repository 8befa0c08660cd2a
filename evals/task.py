"""Loads an lm-eval task with its questions and few-shot examples, and rejects tasks that the engine cannot score.

GSM8K, GSM8K-Platinum (as the installed lm-eval defines them) and the tasks in `tasks/` load in milliseconds. For any
other task lm-eval scans all of its task files, which takes half a minute; a name that none of them has is refused in
seconds.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.evals.rows import GivenRows
from specbatch.evals.unparsed import observe_filters

EMBEDDED = "one_digit_sums"
CHOICES = "one_digit_choices"
_QUICK = ("gsm8k", "gsm8k_platinum")  # lm-eval's folders of the tasks that are found without scanning the others
REASONING = "reasoning_gym:"
GENERATING = "generate_until"
ROLLING = "loglikelihood_rolling"
_SUFFIXES = (".yaml", ".yml", "")  # of lm-eval's files of tasks and groups
_BETWEEN_WORDS = re.compile(rb"[\s\"'\[\],#{}]+")
_TASK = re.compile(rb"^[\s-]*task\s*:\s*[\"']?([\w.+-]+)", re.MULTILINE)
KINDS = (GENERATING, "multiple_choice", "loglikelihood", ROLLING)  # lm-eval's output types


@dataclass(frozen=True)
class EvalTask:
    """A loaded task, or group of tasks of one kind.

    tasks    lm-eval's tasks by name: one, or those of the group and its subgroups
    groups   lm-eval's groups by name, the loaded one first; empty for a task and for a tag, which has no score
    *_source where questions and few-shot examples came from
    warning  about few-shot examples that are scored rows; "" without one
    """

    name: str
    tasks: dict[str, Any]
    groups: dict[str, Any]
    num_fewshot: int
    data_source: str
    fewshot_source: str
    warning: str = ""

    @property
    def task(self) -> Any:
        """lm-eval's task; the first one of a group."""
        return next(iter(self.tasks.values()))

    @property
    def is_group(self) -> bool:
        return list(self.tasks) != [self.name]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return str(self.task.OUTPUT_TYPE)

    @property
    def generates(self) -> bool:
        """Whether the task generates text; the others score given texts by their log-likelihoods."""
        return self.kind == GENERATING

    def questions(self, limit: int | None) -> int:
        """How many questions are asked with at most `limit` of each task."""
        sizes = [len(task.eval_docs) for task in self.tasks.values()]
        return sum(sizes if limit is None else (min(limit, size) for size in sizes))

    def first_ids(self) -> dict[str, int]:
        """By task: the number of its first question among those of the group."""
        sizes = [len(task.eval_docs) if self.is_group else 0 for task in self.tasks.values()]
        return dict(zip(self.tasks, accumulate(sizes, initial=0), strict=False))


def load_task(
    name: str,
    *,
    num_fewshot: int | None,
    data: Path | None,
    fewshot_data: Path | None,
    seed: int,
    kinds: Collection[str] = KINDS,
) -> EvalTask:
    """Find task `name`, load its rows and set the number of few-shot examples.

    data, fewshot_data   rows instead of the task's own, as `GivenRows.read` takes them
    seed                 draws the examples; lm-eval's default is 1234
    kinds                the output types that the caller supports
    """
    given = GivenRows.read(data, fewshot_data)
    with quiet():
        seed_globals()
        manager, spec = _find(name, kinds)
        with given.answering_for_the_hub():
            tasks, groups = _load(name, manager, spec, kinds)
        examples = [given.set_examples(own, task, num_fewshot) for own, task in tasks.items()]
        for task in tasks.values():
            task.set_fewshot_seed(seed=seed)
            observe_filters(task)
    if len(counts := {one.count for one in examples}) > 1:
        works = "its tasks have different numbers of few-shot examples; give num_fewshot, or name one task"
        raise refuse("task", name, works)
    (count,) = counts
    data_source, fewshot_source = _each(map(given.source, tasks.values())), _each(one.source for one in examples)
    warning = _each(one.warning for one in examples if one.warning)
    return EvalTask(name, tasks, groups, count, data_source, fewshot_source, warning)


def _each(texts: Iterable[str]) -> str:
    """Texts of several tasks, each once."""
    found = dict.fromkeys(texts)
    return "; ".join([*found][:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def seed_globals() -> None:
    """Seed the global generators like lm-eval's simple_evaluate; some tasks shuffle rows or draw choices with them."""
    import numpy

    random.seed(0)
    numpy.random.seed(1234)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and logs of lm-eval and the data libraries; commands show their own progress. Templates
    are compiled once: lm-eval compiles one for each text, 24,000 for GSM8K, which takes longer than to generate."""
    from lm_eval import utils
    from lm_eval.api import metrics
    from lm_eval.api import task as module

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bar, bootstrap, from_string = module.tqdm, metrics.bootstrap_stderr, utils.env.from_string
    try:
        utils.env.from_string = cache(from_string)
        metrics.bootstrap_stderr = _bootstrap_stderr
        module.tqdm = partial(bar, disable=True)  # TQDM_DISABLE is read at import, which is over
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        module.tqdm, metrics.bootstrap_stderr, utils.env.from_string = bar, bootstrap, from_string
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _bootstrap_stderr(statistic: Callable[[Sequence[Any]], float], values: Sequence[Any], iters: int) -> float:
    """lm-eval's function, silent and within this process: a CUDA context does not survive a fork."""
    from lm_eval.api.metrics import _bootstrap_internal_no_mp, sample_stddev

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return float(sample_stddev(_bootstrap_internal_no_mp(statistic, values, iters)))


def _find(name: str, kinds: Collection[str]) -> tuple[Any, Any]:
    """A task manager that knows task `name`, and the task's name or definition for it to load."""
    from lm_eval.tasks import TaskManager

    upstream = _definitions()
    folders = [Path(__file__).parent / "tasks", *(upstream / folder for folder in _QUICK)]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if name.startswith(REASONING):
        from specbatch.evals.reasoning import config

        return manager, config(name)
    if name in manager.all_subtasks:
        return manager, name
    known = manager.all_subtasks
    may_exist, names = _names_in(upstream, name)
    if may_exist:
        manager = TaskManager()
    if name not in manager.all_tasks:
        near = get_close_matches(name, [*known, *names], n=4)
        meant = f"did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
        works = f"use gsm8k, gsm8k_platinum, {EMBEDDED}, {CHOICES} or another task of lm-eval"
        raise refuse("task", name, f"no such task; {meant}{works}")
    if name in manager.all_subtasks:
        kind = manager.task_index[name].cfg.get("output_type", "generate_until")
        _refuse_kind(name, kind, kinds)  # before the data is downloaded
    return manager, name


def _definitions() -> Path:
    """The folder of lm-eval's tasks."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def _names_in(folder: Path, name: str) -> tuple[bool, list[str]]:
    """Whether `name` is a word of lm-eval's task definitions, and the names of tasks that they have in plain text.

    It takes a second, where parsing the files takes half a minute.
    """
    found, names, word = False, set[bytes](), name.encode()
    for path in folder.rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            found = found or (word in content and word in _BETWEEN_WORDS.split(content))
            names.update(_TASK.findall(content))
    return found, sorted(item.decode() for item in names)


def _load(name: str, manager: Any, spec: Any, kinds: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm-eval's tasks and groups by name."""
    try:
        loaded = manager.load([spec])
    except OSError as error:  # raised by `datasets` if neither its cache nor the hub has the rows
        path = (getattr(manager.task_index.get(name), "cfg", None) or {}).get("dataset_path", "its data")
        works = f"go online, or use a task that needs no network: gsm8k, gsm8k_platinum or {EMBEDDED}"
        reason = f"{path} is not in the local cache and the hub cannot be reached"
        raise refuse("task", name, f"{reason}; {works}") from error
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        works = "install its dependencies, or use another task"
        raise refuse("task", name, f"lm-eval cannot load it here ({reason}); {works}") from error
    tasks: dict[str, Any] = loaded["tasks"]
    of = {key: f"{key} of group {name}" if key != name else name for key in tasks}
    for key, task in tasks.items():
        _refuse_kind(of[key], task.OUTPUT_TYPE, kinds)
        if not hasattr(task, "sampler"):
            raise refuse("task", of[key], "is not a ConfigurableTask of lm-eval; use one that is, such as gsm8k")
        if getattr(task, "MULTIMODAL", False):
            raise refuse("task", of[key], "needs images or audio; use a text task, such as gsm8k")
        if getattr(task, "UNSAFE_CODE", False):
            raise refuse("task", of[key], "executes code written by the model; use a task that does not, such as gsm8k")
    if len(found := {str(task.OUTPUT_TYPE) for task in tasks.values()}) > 1:
        raise refuse("task", name, f"its tasks are of types {' and '.join(sorted(found))}; name one of them")
    return tasks, loaded["groups"]


def _refuse_kind(name: str, kind: str | None, kinds: Collection[str]) -> None:
    if kind is not None and kind not in kinds:
        raise refuse("task", name, f"is of type {kind}; use a task of type {' or '.join(kinds)}, such as gsm8k")
