"""Tasks that users define in YAML files (`--include-path DIR`, or the path of a file), read as data.

lm-eval 0.4.13 runs Python that such a file names: functions (`!function`), classes, scripts of metrics that it does not
have itself. Its templates can reach any Python object. Here a file that would run Python is refused with the file and
the key, unless `confirm_run_unsafe_code` is set, and templates are rendered in Jinja's sandbox. Files of lm-eval's
package, which a user's file may include, keep their functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from specbatch.errors import SpecbatchError, one_line, refuse

CONFIRM = "confirm_run_unsafe_code"
_FUNCTIONS = ("class", "custom_dataset", "process_docs", "process_results")  # keys whose value is Python
_READERS = ("arrow", "csv", "json", "parquet", "text", "xml")  # of local files, which run no code of the file
_TRUSTED_PROMPTS = "qa-basic:"
_PLAIN = "tag:yaml.org,2002:"
_PYTHON = f"{_PLAIN}python"


@dataclass
class UserTasks:
    """Folders and files with tasks of the user.

    runs_code   whether the Python that they name may run
    checked     names of the tasks and groups that `check` has found no fault with
    unsafe      those of which a file says that they execute the model's answers
    """

    folders: Sequence[Path]
    files: Sequence[Path] = ()
    runs_code: bool = False
    checked: set[str] = field(default_factory=set)
    unsafe: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for folder in self.folders:
            if not folder.is_dir():
                raise refuse("include_path", str(folder), "is no folder; name one with YAML files of tasks")

    def add_files(self, index: dict[str, Any]) -> list[str]:
        """Add the tasks and groups of `files` to lm-eval's index, and return their names."""
        names = []
        for path in self.files:
            config = self._read(path)
            found = self._entries(path)
            name = str(config.get("group") or config.get("task"))
            names.append(name)
            index |= {key: entry for key, entry in found.items() if key == name}
        return names

    def owns(self, entry: Any) -> bool:
        """Whether an entry of lm-eval's index is from the user's folders or files."""
        return entry.yaml_path is not None and not is_trusted(entry.yaml_path)

    def check(self, name: str, index: Mapping[str, Any]) -> Iterator[Any]:
        """The entry of task or group `name` in lm-eval's index, and those of the members of the user's groups. Refused:
        those that would run Python, or are not complete."""
        for entry, group in _reached(name, index):
            if isinstance(entry, str):
                raise refuse("task", name, f"group {group} names task {entry}, which does not exist")
            if self.owns(entry):
                self._refuse_twice(entry)
                self._check_file(entry.name, entry.yaml_path)
                self.checked.add(entry.name)
            yield entry

    @contextmanager
    def without_scripts(self, name: str, index: Mapping[str, Any]) -> Iterator[None]:
        """In this block lm-eval loads `name` without scripts of metrics, if a file of the user is part of it: whether a
        task needs a metric depends on all files and groups that define it, as one can take back `process_results`."""
        from lm_eval.api import task as module

        find = module.get_metric

        def get_metric(metric: Any, hf_evaluate_metric: bool = False) -> Any:
            if hf_evaluate_metric or not _is_metric(metric):
                raise refuse("task", name, f"{_no_metric(metric)}; take it out, or allow it with {CONFIRM}")
            return find(metric)

        if not self.runs_code and any(isinstance(one, str) or self.owns(one) for one, _ in _reached(name, index)):
            module.get_metric = get_metric
        try:
            yield
        finally:
            module.get_metric = find

    def explain(self, name: str) -> None:
        """Refuse the file that defines `name` if lm-eval has passed over it because it cannot be read."""
        for path, text in self._texts.items():
            if name in text.replace('"', " ").replace("'", " ").split():
                self._entries(path)

    def refuse_names(self) -> None:
        """Refuse a file of the folders with a name that is no text, which lm-eval cannot sort among the others."""
        for path in self._texts:
            with suppress(SpecbatchError):  # lm-eval passes over a file that cannot be read
                found = self._entries(path)
                if names := [name for name in found if not isinstance(name, str)]:
                    break
        else:
            return
        raise refuse("include_path", str(path), f"the name of a task is {names[0]!r}, which is no text; quote it")

    @cached_property
    def _texts(self) -> dict[Path, str]:
        texts = {}
        for path in sorted({path for folder in self.folders for path in folder.rglob("*.yaml")}):
            with suppress(OSError):
                texts[path] = path.read_text(errors="replace")
        return texts

    def _refuse_twice(self, entry: Any) -> None:
        """Refuse a name that two files of a folder define, of which lm-eval takes the first with a log line."""
        line = re.compile(rf"^(task|group)\s*:\s*[\"']?{re.escape(entry.name)}[\"']?\s*$", re.MULTILINE)
        for folder in self.folders:
            files = [path for path, text in self._texts.items() if path.is_relative_to(folder) and line.search(text)]
            if len(files) > 1:
                raise refuse("task", entry.name, f"is defined in {files[0]} and in {files[1]}; rename one of them")

    def _read(self, path: Path) -> dict[str, Any]:
        """A file with what it includes; functions are texts."""
        from lm_eval.tasks._yaml_loader import load_yaml

        with _explained("task", path):
            config: dict[str, Any] = load_yaml(path, resolve_func=False)
        return config

    def _entries(self, path: Path) -> dict[str, Any]:
        """What lm-eval's index has of a file."""
        from lm_eval.tasks._index import TaskIndex

        found: dict[str, Any] = {}
        config = self._read(path)
        with _explained("task", path):
            TaskIndex.process_cfg(config, path, found)
        return found

    def _check_file(self, name: str, path: Path) -> None:
        merged = self._read(path)
        members = merged.get("task")
        if "group" in merged and not (isinstance(members, list) and members):
            raise refuse("task", str(path), f"group {name} needs a list of tasks (task: [NAME, ...])")
        for file, own in _chain(path):
            if own.get("unsafe_code"):
                self.unsafe.add(name)
            if not is_trusted(file):
                if not self.runs_code:
                    _refuse_tags(file)
                self._check_config(file, own, has_results=bool(merged.get("process_results")))

    def _check_config(self, file: Path, config: Mapping[str, Any], *, has_results: bool) -> None:
        """Refuse what lm-eval would run as Python, and names that it does not know, which show late in a run."""
        from lm_eval.api.registry import aggregation_registry, filter_registry
        from lm_eval.api.samplers import SAMPLER_REGISTRY

        if not self.runs_code:
            for key, value in _python_in(config, has_results=has_results):
                raise _unsafe(file, key, value)
        for item in _dicts(config.get("metric_list")):
            name = item.get("aggregation")
            if isinstance(name, str) and name not in aggregation_registry and not _is_function(name, self.runs_code):
                raise refuse(
                    "task", str(file), f"metric_list: no aggregation {name!r}; use {_some(aggregation_registry)}"
                )
        for chain in _dicts(config.get("filter_list")):
            for item in _dicts(chain.get("filter")):
                name = item.get("function")
                if isinstance(name, str) and name not in filter_registry and not _is_function(name, self.runs_code):
                    raise refuse("task", str(file), f"filter_list: no filter {name!r}; use {_some(filter_registry)}")
        shots = config.get("fewshot_config")
        name = shots.get("sampler") if isinstance(shots, dict) else None
        if isinstance(name, str) and name not in SAMPLER_REGISTRY and not _is_function(name, self.runs_code):
            raise refuse("task", str(file), f"fewshot_config: no sampler {name!r}; use {_some(SAMPLER_REGISTRY)}")
        for member in _dicts(config.get("task")):
            inherited = has_results or bool(member.get("process_results"))
            self._check_config(file, member, has_results=inherited)


def refuse_broken_scoring(name: str, task: Any) -> None:
    """Refuse a task whose filters or metrics do not exist, which lm-eval shows after all answers are generated."""
    for chain in task._filters:
        for make in chain.filters:
            try:
                make()
            except Exception as error:
                raise refuse("task", name, f"filter {chain.name} cannot be made: {one_line(error)}") from error
    if not callable(task.config.process_results):
        for metric, call in task._metric_fn_list.items():
            if call is None:
                raise refuse("task", name, f"has no metric {metric}: neither lm-eval nor the library evaluate has it")


def _python_in(config: Mapping[str, Any], *, has_results: bool) -> Iterator[tuple[str, Any]]:
    """Keys of a file's configuration whose values run Python."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    for key in _FUNCTIONS:
        if config.get(key) is not None:
            yield key, config[key]
    shots = config.get("fewshot_config")
    if isinstance(shots, dict) and shots.get("process_docs") is not None:
        yield "fewshot_config: process_docs", shots["process_docs"]
    path, how = config.get("dataset_path"), config.get("dataset_kwargs")
    if isinstance(path, str) and path in _PACKAGED_DATASETS_MODULES and path not in _READERS:
        yield "dataset_path", path
    if isinstance(how, dict) and how.get("trust_remote_code"):
        yield "dataset_kwargs: trust_remote_code", how["trust_remote_code"]
    if (prompt := config.get("use_prompt")) is not None and not str(prompt).startswith(_TRUSTED_PROMPTS):
        yield "use_prompt", prompt
    for item in _dicts(config.get("metric_list")):
        if item.get("hf_evaluate"):
            yield "metric_list: hf_evaluate", item["hf_evaluate"]
        if not has_results and not _is_metric(item.get("metric")):
            yield "metric_list: metric", item.get("metric")
    for chain in _dicts(config.get("filter_list")):
        for item in _dicts(chain.get("filter")):
            if item.get("function") == "custom":
                yield "filter_list: function", "custom"


def _is_metric(name: Any) -> bool:
    from lm_eval.api import metrics  # noqa: F401  # registers them
    from lm_eval.api.registry import metric_registry

    return isinstance(name, str) and name in metric_registry


def _no_metric(name: Any) -> str:
    return f"metric_list: metric: lm-eval has no metric {name!r} and would run a script of that name, which is off"


def _unsafe(file: Path, key: str, value: object) -> SpecbatchError:
    reason = f"{key}: {value!r} would run Python, which is off"
    if key == "metric_list: metric":
        reason = _no_metric(value)
    return refuse("task", str(file), f"{reason}; take it out, or allow it with {CONFIRM}")


def _refuse_tags(file: Path) -> None:
    """Refuse a file with tags that make Python objects (`!function`)."""
    seen = set[int]()

    def walk(node: Any, key: str) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if not node.tag.startswith(_PLAIN) or node.tag.startswith(_PYTHON):
            raise _unsafe(file, f"line {node.start_mark.line + 1}, {key}", f"{node.tag} {node.value}")
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                walk(name, key)
                walk(value, str(name.value))
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                walk(value, key)

    with _explained("task", file), file.open("rb") as stream:
        root = yaml.compose(stream, Loader=yaml.SafeLoader)
    walk(root, "the file")


def _chain(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A file and those that it includes, as lm-eval finds them, each with its own keys. `load_yaml` has refused
    cycles."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = path.expanduser().resolve()
    own = load_yaml(path, resolve_func=False, recursive=False)
    yield path, own
    includes = own.get("include") or []
    for name in includes if isinstance(includes, list) else [includes]:
        yield from _chain(path.parent / name)


def _reached(name: str, index: Mapping[str, Any], groups: tuple[str, ...] = ()) -> Iterator[tuple[Any, str]]:
    """The entries of `name` and of its members, each with the group that names it; a text for one that is missing.
    groups: those that contain it."""
    entry = index.get(name)
    if name in groups:
        raise refuse("task", name, f"group {groups[-1]} contains itself")
    yield name if entry is None else entry, groups[-1] if groups else ""
    if entry is None:
        return
    if entry.kind.name == "TAG":
        for member in sorted(entry.tags):
            yield from _reached(member, index, (*groups, name))
    elif entry.kind.name == "GROUP":
        found = _members(entry.cfg or {}, index, (*groups, name))
        yield from found if not is_trusted(entry.yaml_path) else (one for one in found if not isinstance(one[0], str))


def _members(config: Mapping[str, Any], index: Mapping[str, Any], groups: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    members = config.get("task")
    for member in members if isinstance(members, list) else []:
        own = member if isinstance(member, dict) else {"task": member}
        name = str(own.get("group", own.get("task")))
        if name not in index and "group" in own and own.get("task"):
            yield from _members(own, index, (*groups, name))
        elif name in index or not {"task", "dataset_path"} <= {*own}:
            yield from _reached(name, index, groups)


def missing_in(name: str, index: Mapping[str, Any]) -> list[str]:
    """The tasks that `name`, or a group of the user that it reaches, needs and `index` does not have."""
    return [entry for entry, _ in _reached(name, index) if isinstance(entry, str)]


def is_trusted(path: Path) -> bool:
    """Whether a file is part of lm-eval or of this package."""
    import lm_eval

    folders = (Path(lm_eval.__file__).parent, Path(__file__).parent)
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _is_function(name: str, runs_code: bool) -> bool:
    """Whether a text is a function that `load_yaml` has not resolved."""
    return runs_code and "/" in name


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    return (item for item in (value if isinstance(value, list) else []) if isinstance(item, dict))


def _some(names: Any) -> str:
    return ", ".join(sorted(names.keys()))


@contextmanager
def _explained(setting: str, path: Path) -> Iterator[None]:
    """Refuse a file that lm-eval cannot read, with the reason in one line."""
    try:
        yield
    except SpecbatchError:
        raise
    except Exception as error:
        reason = one_line(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1} is not valid YAML ({error.problem})"
        elif isinstance(error, OSError):
            reason = f"{error.filename or path}: {error.strerror or error}"
        raise refuse(setting, str(path), f"cannot be read: {reason}") from error
