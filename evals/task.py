"""Loads an lm-eval task with its questions and few-shot examples, and rejects tasks that the engine cannot score.

GSM8K, GSM8K-Platinum (as the installed lm-eval defines them) and the tasks in `tasks/` load in milliseconds. For any
other task lm-eval scans all of its task files, which takes half a minute; a name that none of them has is refused in
seconds.

The GSM8K tasks never wait for the hub. Their rows come from `data` if given, else from the local cache of the hub, else
from the question sets bundled with the package.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.jobs.questions import Questions, bundled_questions, read_questions, refuse_shared

EMBEDDED = "one_digit_sums"
CHOICES = "one_digit_choices"
FROM_FILE = ("gsm8k", "gsm8k_platinum")  # lm-eval's folders; their tasks need a question and an answer, no more
_BUNDLED = {"openai/gsm8k": "gsm8k", "madrylab/gsm8k-platinum": "gsm8k_platinum"}  # data set on the hub: bundled rows
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
    warning  why the few-shot examples are not lm-eval's training rows; "" if they are, or if there are none
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


def fallbacks(task: Any) -> dict[str, str | None]:
    """The value of each answer filter of lm-eval's task when it finds nothing; None for one that always finds
    something."""
    found: dict[str, str | None] = {}
    for entry in task.config.filter_list or [{"name": "none", "filter": []}]:
        patterns = [step for step in entry["filter"] if step["function"] in ("regex", "multi_choice_regex")]
        found[entry["name"]] = patterns[-1].get("fallback", "[invalid]") if patterns else None
    return found


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

    data, fewshot_data   JSONL files instead of the task's own rows
    seed                 draws the examples; lm-eval's default is 1234
    kinds                the output types that the caller supports
    """
    if fewshot_data is not None and data is None:
        raise refuse("fewshot_data", str(fewshot_data), "needs data as well, the questions to score")
    scored = read_questions("data", data) if data is not None else None
    shots = read_questions("fewshot_data", fewshot_data) if fewshot_data is not None else None
    if scored is not None and shots is not None:
        refuse_shared(scored, shots)
    with quiet():
        seed_globals()
        manager, spec = _find(name, kinds)
        config = _file_config(manager, name)
        with _offline() if config is not None else nullcontext():
            if config is not None and scored is None and not _is_cached(config):
                scored = bundled_questions(_BUNDLED[config["dataset_path"]])
            if config is not None and scored is not None and shots is None and not _has_own_shots(config):
                shots = _training_rows(scored)
            if scored is not None:
                spec = _with_rows(name, config, scored, shots)
            tasks, groups = _load(name, manager, spec, kinds)
        for task in tasks.values():
            task.set_fewshot_seed(seed=seed)
    counts = {_set_fewshot(own, task, num_fewshot) for own, task in tasks.items()}
    if len(counts) > 1:
        works = "its tasks have different numbers of few-shot examples; give num_fewshot, or name one task"
        raise refuse("task", name, works)
    (count,) = counts
    source = str(scored) if scored is not None else _each(map(_origin, tasks.values()))
    shown = [_fewshot_source(task, source, shots) if count else "none" for task in tasks.values()]
    for task, own in zip(tasks.values(), shown, strict=True):
        _refuse_too_many(task, count, own)
    warning = ""
    if count and shots is None and any(map(_examples_are_scored, tasks.values())):
        warning = "few-shot examples come from the scored rows: there are no training rows"
    return EvalTask(name, tasks, groups, count, source, _each(shown), warning)


def _training_rows(scored: Questions) -> Questions | None:
    """Rows of GSM8K's training split, as lm-eval takes them; None where `scored` has some of them."""
    rows = bundled_questions("gsm8k_train")
    known = {row["question"].strip() for row in scored.rows}
    return None if any(row["question"].strip() in known for row in rows.rows) else rows


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
    folders = [Path(__file__).parent / "tasks", *(upstream / folder for folder in FROM_FILE)]
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


def _file_config(manager: Any, name: str) -> dict[str, Any] | None:
    """lm-eval's definition of a task whose rows can come from a file; None for any other task."""
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None or entry.yaml_path.parent.name not in FROM_FILE:
        return None
    return deepcopy(dict(entry.cfg))


def _has_own_shots(config: dict[str, Any]) -> bool:
    return "samples" in (config.get("fewshot_config") or {})


def _is_cached(config: dict[str, Any]) -> bool:
    """Whether the local cache of the hub holds the task's data set. To be called within `_offline`."""
    import datasets

    try:
        datasets.load_dataset(config["dataset_path"], config["dataset_name"])
    except (OSError, ValueError):  # ValueError: another configuration of the data set is cached
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Let the hub's libraries use their local cache only; the environment variable is read when they are imported."""
    import datasets
    import huggingface_hub

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _with_rows(name: str, config: dict[str, Any] | None, scored: Questions, shots: Questions | None) -> dict[str, Any]:
    """The task as lm-eval defines it, with other rows instead of its data set.

    Without `shots` the examples come from the scored rows, as lm-eval's gsm8k_platinum does: lm-eval leaves out the
    scored row when both splits have the same name.
    """
    if config is None:
        raise refuse("data", str(scored.path), f"task {name} has its own questions; leave it out, or use gsm8k")
    own_shots = _has_own_shots(config)
    if shots is not None and own_shots:
        raise refuse("fewshot_data", str(shots.path), f"task {name} has fixed examples; leave it out")
    rows = {"test": scored.rows}
    if shots is not None:
        rows["train"] = shots.rows

    def splits(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})

    for key in ("dataset_path", "dataset_name", "dataset_kwargs", "training_split", "fewshot_split"):
        config.pop(key, None)
    if not own_shots:
        config["fewshot_split"] = "test" if shots is None else "train"
    return config | {"test_split": "test", "custom_dataset": splits}


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


def _set_fewshot(name: str, task: Any, wanted: int | None) -> int:
    own = task.get_config("num_fewshot") or 0
    if wanted is None or wanted == own:
        wanted = own
    elif task.get_config("num_fewshot") == 0:
        raise refuse("num_fewshot", wanted, f"task {name} is defined without few-shot examples; leave it out, or use 0")
    task.set_config(key="num_fewshot", value=wanted)
    return int(wanted)


def _examples_are_scored(task: Any) -> bool:
    """Whether few-shot examples come from the split that is scored."""
    scored = task.config.test_split or task.config.validation_split
    if task.fewshot_cfg.split is not None:
        return bool(task.fewshot_cfg.split == scored)
    if task.fewshot_cfg.samples is not None or task.config.training_split is not None:
        return False
    return task.config.validation_split in (None, scored)


def _leaves_scored_out(task: Any) -> bool:
    """Whether examples come from the scored rows, of which lm-eval leaves out the question's own."""
    split = task.fewshot_cfg.split
    return split is not None and split == task.config.test_split


def _origin(task: Any) -> str:
    parts = (task.config.dataset_path, task.config.dataset_name, task.config.test_split or task.config.validation_split)
    return " ".join(str(part) for part in parts if part) if task.config.dataset_path else "made by the task"


def _fewshot_source(task: Any, data_source: str, shots: Questions | None) -> str:
    if shots is not None:
        return str(shots)
    if _leaves_scored_out(task):
        return f"the other rows of {data_source}"
    if task.fewshot_cfg.split is not None:
        return f"the task's {task.fewshot_cfg.split} rows"
    if task.fewshot_cfg.samples is not None:
        return "the task's own fixed examples"
    for split in ("training_split", "validation_split"):
        if task.get_config(split) is not None:
            return f"the task's {task.get_config(split)} rows"
    return "the scored rows, as lm-eval defines this task: a question may be among its own examples"


def _refuse_too_many(task: Any, count: int, source: str) -> None:
    pool = list(task.sampler.df) if count else []
    available = len(pool)
    if pool and _leaves_scored_out(task):  # duplicates of the question's row are left out with it
        available -= max(Counter(json.dumps(row, sort_keys=True, default=str) for row in pool).values())
    if count > available:
        raise refuse("num_fewshot", count, f"{source}: {available} are available; use at most {available}")
