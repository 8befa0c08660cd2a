"""Loads an lm-eval task with its questions and few-shot examples, and rejects tasks that the engine cannot score.

GSM8K, GSM8K-Platinum (as the installed lm-eval defines them) and the tasks in `tasks/` load in milliseconds. For any
other task lm-eval scans all of its task files, which takes half a minute; a name that none of them has is refused in
seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError, each_once, one_line, refuse
from specbatch.evals.lm_eval_process import RandomState, quiet, seed_globals, template_errors
from specbatch.evals.options import EvalOptions
from specbatch.evals.rehearsal import rehearse
from specbatch.evals.rows import Examples, GivenRows
from specbatch.evals.selection import asking
from specbatch.evals.unparsed import observe_filters
from specbatch.evals.user_tasks import CONFIRM, UserTasks, missing_in, refuse_broken_scoring

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
    """A loaded task, or group of tasks.

    tasks    lm-eval's tasks by name: one, or those of the group and its subgroups
    groups   lm-eval's groups by name, the loaded one first; empty for a task and for a tag, which has no score
    fewshot  the number of few-shot examples by task
    *_source where questions and few-shot examples came from
    warning  why the few-shot examples are not lm-eval's training rows; "" if they are, or if there are none
    notes    what else the user should know, one sentence each without the full stop
    random_state   of the global generators when the task had been loaded
    definition     hash of what the user's files say, and of the rows; "" for tasks of lm-eval
    """

    name: str
    tasks: dict[str, Any]
    groups: dict[str, Any]
    fewshot: dict[str, int]
    data_source: str
    fewshot_source: str
    random_state: RandomState
    warning: str = ""
    notes: tuple[str, ...] = ()
    definition: str = ""

    @property
    def task(self) -> Any:
        """lm-eval's task; the first one of a group."""
        return next(iter(self.tasks.values()))

    @property
    def is_group(self) -> bool:
        return list(self.tasks) != [self.name]

    @property
    def num_fewshot(self) -> int | dict[str, int]:
        """By task where they differ."""
        counts = {*self.fewshot.values()}
        return counts.pop() if len(counts) == 1 else self.fewshot

    @property
    def kind(self) -> str:
        """One of `KINDS`, or several, separated by commas."""
        return ", ".join(dict.fromkeys(str(task.OUTPUT_TYPE) for task in self.tasks.values()))

    @property
    def generates(self) -> bool:
        """Whether a task generates text; the others score given texts by their log-likelihoods."""
        return any(task.OUTPUT_TYPE == GENERATING for task in self.tasks.values())

    @property
    def scores_texts(self) -> bool:
        """Whether a task scores given texts."""
        return self.kind != GENERATING

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of questions of each task."""
        return {name: len(task.eval_docs) for name, task in self.tasks.items()}

    def chosen(self, options: EvalOptions) -> dict[str, Sequence[int]]:
        """By task the numbers of the questions that are asked."""
        return {name: options.questions(name, size) for name, size in self.sizes.items()}

    def first_ids(self) -> dict[str, int]:
        """By task: the number of its first question among those of the group."""
        sizes = [size if self.is_group else 0 for size in self.sizes.values()]
        return dict(zip(self.tasks, accumulate(sizes, initial=0), strict=False))


def load_task(name: str, *, kinds: Collection[str] = KINDS, **options: Any) -> EvalTask:
    """Find task `name`, load its rows and set the number of few-shot examples.

    kinds     the output types that the caller supports
    options   of `EvalOptions`
    """
    return load_tasks([name], EvalOptions(name, **options), kinds)[0]


def load_tasks(names: Sequence[str], options: EvalOptions, kinds: Collection[str] = KINDS) -> list[EvalTask]:
    """Find tasks and groups, load their rows and set the numbers of few-shot examples. As by lm-eval's simple_evaluate,
    all are loaded after one seeding. A name that ends in .yaml is the path of a task's file."""
    given = GivenRows.read(options.data, options.fewshot_data)
    user = UserTasks(options.include_path, list(map(Path, filter(_is_file, names))), options.confirm_run_unsafe_code)
    with quiet(sandboxed=not options.confirm_run_unsafe_code):
        manager, names = _find(names, user, kinds)
        each_once("task", names)  # files may define the same task
        seed_globals()
        loaded: list[tuple[dict[str, Any], dict[str, Any]]] = []
        with given.answering_for_the_hub():
            for name in names:
                loaded.append(_load(name, manager, kinds, user))
        _refuse_duplicates(dict(zip(names, loaded, strict=True)))
        state = RandomState.now()
        several = sum(len(tasks) for tasks, _ in loaded) > 1
        notes = _replaced(names, manager, user)
        found = [
            _with_examples(name, *one, options, given, state, notes.get(name, []), several=several)
            for name, one in zip(names, loaded, strict=True)
        ]
        return [
            replace(task, notes=(*task.notes, *_tried(task, options, user)), definition=_definition(task, user))
            for task in found
        ]


def _tried(task: EvalTask, options: EvalOptions, user: UserTasks) -> Iterator[str]:
    """Refuse tasks of the user whose prompts cannot be built, or whose answers cannot be scored, before a model is
    loaded. Yields notes."""
    chosen = {name: numbers for name, numbers in task.chosen(options).items() if numbers}
    tasks = {name: task.tasks[name] for name in chosen if user.checked & {task.name, name.partition("::")[0]}}
    for name, one in tasks.items():
        if name.partition("::")[0] in user.checked:
            _build(name, one, chosen[name])
    if user.runs_code or any(numbers[-1] >= task.sizes[name] for name, numbers in chosen.items()):
        return
    for name, one in tasks.items():
        yield from rehearse(name, {name: one}, {}, chosen)
    if task.groups and tasks.keys() == task.tasks.keys():
        yield from rehearse(task.name, tasks, task.groups, chosen)


def _definition(task: EvalTask, user: UserTasks) -> str:
    if task.name not in user.checked and not user.checked & {*task.tasks}:
        return ""
    parts = [
        ({**one.dump_config(), "metadata": None}, list(one.eval_docs), list(one.fewshot_docs() or ()))
        for one in task.tasks.values()
    ]
    text = json.dumps(parts, default=lambda value: getattr(value, "__qualname__", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()


def _build(name: str, task: Any, numbers: Sequence[int]) -> None:
    try:
        with asking({name: task}, {name: numbers}, lambda *_: None), template_errors(name):
            task.build_all_requests()
    except SpecbatchError:
        raise
    except Exception as error:
        raise refuse("task", name, f"its prompts cannot be built ({one_line(error)}); correct it") from error


def _with_examples(
    name: str,
    tasks: dict[str, Any],
    groups: dict[str, Any],
    options: EvalOptions,
    given: GivenRows,
    state: RandomState,
    notes: list[str],
    *,
    several: bool,
) -> EvalTask:
    """several: whether the run has several tasks, of which some may not take the number of examples"""
    found: dict[str, Examples] = {}
    kept = []
    for own, task in tasks.items():
        wanted = options.num_fewshot
        if several and wanted and task.get_config("num_fewshot") == 0:
            kept.append(own)
            wanted = None
        found[own] = given.set_examples(own, task, wanted)
        task.set_fewshot_seed(seed=options.seed)
        observe_filters(task)
        if options.predict_only:
            task.override_metric(metric_name="bypass")
    if kept:
        notes.append(f"num_fewshot={options.num_fewshot} has no effect on {_each(kept)}: defined without examples")
    if options.predict_only:
        notes.append("answers were not scored (predict_only)")
    return EvalTask(
        name,
        tasks,
        groups,
        {own: examples.count for own, examples in found.items()},
        _each(given.source(task) for task in tasks.values()),
        _each(examples.source for examples in found.values()),
        state,
        _each(examples.warning for examples in found.values() if examples.warning),
        tuple(notes),
    )


def _replaced(names: Sequence[str], manager: Any, user: UserTasks) -> dict[str, list[str]]:
    """Notes by the name of a task of the user that lm-eval has, too."""
    entries = {name: manager.task_index[name] for name in names if user.owns(manager.task_index[name])}
    known = names_in(_definitions())[1] if entries else []
    return {
        name: [f"task {name} of {entry.yaml_path} replaces lm-eval's task of this name"]
        for name, entry in entries.items()
        if name in known
    }


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _refuse_duplicates(loaded: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    owner: dict[str, str] = {}
    for name, (tasks, _) in loaded.items():
        for own in tasks:
            if owner.setdefault(own, name) != name:
                raise refuse("task", ",".join(loaded), f"task {own} is in {owner[own]} and in {name}; name it once")


def _each(texts: Iterable[str]) -> str:
    """Texts of several tasks, each once."""
    found = dict.fromkeys(texts)
    return "; ".join([*found][:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _find(names: Sequence[str], user: UserTasks, kinds: Collection[str]) -> tuple[Any, list[str]]:
    """A task manager that knows tasks and groups, and their names."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    upstream, own = _definitions(), Path(__file__).parent / "tasks"
    known = [own, *(upstream / folder for folder in _QUICK)]

    def manager_of(folders: Sequence[Path], *, defaults: bool) -> tuple[Any, list[str]]:
        try:
            manager = TaskManager(include_path=[*folders, *user.folders], include_defaults=defaults)
        except TypeError:
            user.refuse_names()
            raise
        index, of_files = manager.task_index, iter(user.add_files(manager.task_index))
        found = []
        for name in names:
            if name.startswith(REASONING):
                from specbatch.evals.reasoning import config

                index[name] = TaskIndex.entry_from_config(config(name))
            found.append(next(of_files) if _is_file(name) else name)
        return manager, found

    manager, found = manager_of(known, defaults=False)
    missing = {one: name for name in found for one in missing_in(name, manager.task_index)}
    near: list[str] = []
    if missing:
        for name in missing:
            user.explain(name)
        may_exist, of_tasks = names_in(upstream, tuple(missing))
        near = [*manager.task_index, *of_tasks]
        if len(may_exist) == len(missing):
            manager, found = manager_of([own], defaults=True)
    for name in found:
        if name not in manager.task_index:
            like = get_close_matches(name, near, n=4)
            meant = f"did you mean {', '.join(dict.fromkeys(like))}? " if like else ""
            works = f"use gsm8k, gsm8k_platinum, {EMBEDDED}, {CHOICES} or another task of lm-eval"
            raise refuse("task", name, f"no such task; {meant}{works}")
        for entry in user.check(name, manager.task_index):
            _refuse_unsafe(entry.name, entry.cfg or {}, user)
        entry = manager.task_index[name]
        if entry.kind.name == "TASK":
            _refuse_kind(name, (entry.cfg or {}).get("output_type", GENERATING), kinds)  # before data is downloaded
    return manager, found


def _definitions() -> Path:
    """The folder of lm-eval's tasks."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


@cache
def names_in(folder: Path, wanted: tuple[str, ...] = ()) -> tuple[set[str], list[str]]:
    """Which of the `wanted` names are words of lm-eval's task definitions, and the names of tasks that they have in
    plain text.

    It takes a second, where parsing the files takes half a minute.
    """
    found, names, words = set[str](), set[bytes](), {name: name.encode() for name in wanted}
    for path in folder.rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            if any(words[name] in content for name in words.keys() - found):
                of_file = {*_BETWEEN_WORDS.split(content)}
                found |= {name for name, word in words.items() if word in of_file}
            names.update(_TASK.findall(content))
    return found, sorted(item.decode() for item in names)


def _load(name: str, manager: Any, kinds: Collection[str], user: UserTasks) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm-eval's tasks and groups by name."""
    entry = manager.task_index[name]
    try:
        with template_errors(name), user.without_scripts(name, manager.task_index):
            loaded = manager.load([name])
    except SpecbatchError:
        raise
    except Exception as error:
        raise refuse("task", name, _reason(error, entry)) from error
    tasks: dict[str, Any] = loaded["tasks"]
    if not tasks:
        raise refuse("task", name, "is a group without tasks; name a task")
    of = {key: f"{key} of group {name}" if key != name else name for key in tasks}
    for key, task in tasks.items():
        _refuse_kind(of[key], task.OUTPUT_TYPE, kinds)
        if not hasattr(task, "sampler"):
            raise refuse("task", of[key], "is not a ConfigurableTask of lm-eval; use one that is, such as gsm8k")
        if getattr(task, "MULTIMODAL", False):
            raise refuse("task", of[key], "needs images or audio; use a text task, such as gsm8k")
        _refuse_unsafe(of[key], {"unsafe_code": getattr(task, "UNSAFE_CODE", False)}, user)
        refuse_broken_scoring(of[key], task)
    return tasks, loaded["groups"]


def _refuse_unsafe(name: str, config: Mapping[str, Any], user: UserTasks) -> None:
    if (config.get("unsafe_code") or name in user.unsafe) and not user.runs_code:
        works = f"executes code written by the model, without a sandbox; allow it with {CONFIRM}, or use gsm8k"
        raise refuse("task", name, works)


def _reason(error: Exception, entry: Any) -> str:
    """Why lm-eval could not load a task, and what works."""
    path = (entry.cfg or {}).get("dataset_path", "its data")
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, FileNotFoundError) and "hub" not in reason.lower():
        return f"its data cannot be read ({reason}); correct data_files, which are relative to the current folder"
    if isinstance(error, OSError):  # raised by `datasets` if neither its cache nor the hub has the rows
        works = f"go online, or use a task that needs no network: gsm8k, gsm8k_platinum or {EMBEDDED}"
        return f"{path} is not in the local cache and the hub cannot be reached; {works}"
    if isinstance(error, ImportError | RuntimeError):
        return f"lm-eval cannot load it here ({reason}); install its dependencies, or use another task"
    if isinstance(error, KeyError):
        return f"lm-eval cannot load it: its definition names {error}, which does not exist; correct it"
    return f"lm-eval cannot load it ({one_line(error)}); correct its definition, or use another task"


def _refuse_kind(name: str, kind: str | None, kinds: Collection[str]) -> None:
    if kind is not None and kind not in kinds:
        raise refuse("task", name, f"is of type {kind}; use a task of type {' or '.join(kinds)}, such as gsm8k")
