"""Error messages in the words of the command line: settings become options, `max_running=0` becomes `--max-running=0`.

Errors name the fields of Python. This is the only place that knows the options of commands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from specbatch.config.engine_config import Graphs
from specbatch.errors import SpecbatchError

_VALUE = r"'[^']*'|\"[^\"]*\"|\([\d, ]*\)|[\w.-]*\w"
_PLAIN = re.compile(r"[\w.,:/+-]+")  # a shell takes it without quotes
GRAPHS = {f"graphs.{item.name}": f"{item.name}_graph" for item in fields(Graphs)}
_OTHER_NAMES = {
    "input": "source",
    "schedule": "spec",
    **GRAPHS,
}  # of settings, by the names that errors use
# Settings by the options that set them, too, where they have no option of their own or it is not given.
_SET_BY = {
    "concurrency": ("batch",),
    "configs": ("ablation",),
    "max_model_len": ("max_len",),
    "max_running": ("concurrency", "batch"),
    "thinking": ("compare_thinking",),
    "window": ("input_len",),
}
_OF_FILES = (
    "answers", "baseline", "configs", "data", "dataset", "fewshot_data", "gen_kwargs", "peers", "policy",
    "simulate_accept",
)  # fmt: skip


class Flag(NamedTuple):
    """An option, or an argument, of a command.

    name     as the user writes it
    no       what switches it off, if it is a switch
    is_switch  whether it takes no value
    of_file  whether what follows in an error is about the contents of a file, or about arguments within the value
    """

    name: str
    no: str | None
    is_switch: bool
    of_file: bool


def flags_of(params: Iterable[Any], given: Collection[str] | None = None) -> dict[str, Flag]:
    """The flags of a command's parameters by the names of settings: those that set them. given: the parameters that the
    user gave, None: not known"""
    found: dict[str, Flag] = {}
    for item in params:
        if item.param_type_name == "argument":
            found[item.name] = Flag((item.metavar or item.name.upper()).rstrip("."), None, False, True)
            continue
        names = [name for name in item.opts if name.startswith("--")]
        flag = Flag(names[0], next(iter(item.secondary_opts), None), item.is_flag, item.name in _OF_FILES)
        found |= dict.fromkeys([item.name, *(name[2:].replace("-", "_") for name in names)], flag)
    own = found if given is None else given
    for name, others in _SET_BY.items():
        by = next((other for other in others if other in own), None)
        if name not in own and by is not None and not (name == "max_running" and "data_parallel" in own):  # a share
            found[name] = found[by]
    return found | {other: found[name] for other, name in _OTHER_NAMES.items() if name in found}


@dataclass(frozen=True)
class InFlags:
    """The wording of a command: its `flags` in place of settings."""

    flags: Mapping[str, Flag]

    def message(self, error: SpecbatchError) -> str:
        return in_flags(error, self.flags)

    def reason(self, error: SpecbatchError) -> str:
        return in_flags(error, self.flags)


def in_flags(error: SpecbatchError, flags: Mapping[str, Flag]) -> str:
    """The message of an error with the names of options. What an error says of the contents of a file is left as it
    is: there the names are keys."""
    text = str(error)
    flag = flags.get(error.setting or "")
    if flag is None or not text.startswith(f"{error.setting}="):
        return text if flag is not None and flag.of_file else in_text(text, flags)
    rest = text[len(f"{error.setting}=") :]
    value = re.match(r"(True|False|None|\([\d, ]*\))(?=: )", rest)
    if value is not None:
        head, rest = _written(flag, value[0]), rest[value.end() :]
        return head + (rest if flag.of_file else in_text(rest, flags))
    works = error.works if error.works is not None and rest.endswith(error.works) else ""
    shown = rest.removesuffix(works)
    return f"{flag.name}={shown}{works if flag.of_file else in_text(works, flags)}"


# The option of each command that a word without an option may be meant for.
_TAKES_WORDS = {
    "bench": "--model",
    "generate": "--output",
    "send-one": "--prompt",
    "sweep": "--dataset",
    "trace": "--model",
    "train-draft": "--data",
}


def no_argument(command: Any, words: str) -> str:
    """What works for words that are no arguments of a command."""
    option = _TAKES_WORDS.get(command.name)
    arguments = [item.metavar or item.name.upper() for item in command.params if item.param_type_name == "argument"]
    takes = f"takes no more than {' '.join(arguments)}" if arguments else "takes no arguments"
    return f"{command.name} {takes}; {f'name the option, such as {option} {words}' if option else 'leave it out'}"


def in_keys(error: SpecbatchError, names: Iterable[str]) -> str:
    """The message of an error about a table of a file, with the keys of such tables: `max-running=0`."""
    keys = {name: name.replace("_", "-") for name in names if "_" in name}
    return _renamed(str(error), keys | {name: option_of(name).replace("_", "-") for name in GRAPHS})


def option_of(setting: str | None) -> str:
    """The option of the setting that an error names, with underscores."""
    return _OTHER_NAMES.get(setting or "", setting or "")


def in_text(text: str, flags: Mapping[str, Flag]) -> str:
    """A text with the names of options in place of those of settings."""
    options = {name: flag for name, flag in flags.items() if flag.name.startswith("--")}
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    pairs = re.compile(rf"(?<![\w.\"'=-])({names})=({_VALUE})")
    text = pairs.sub(lambda found: _written(options[found[1]], found[2]), text)
    return _renamed(text, {name: flag.name for name, flag in options.items() if "_" in name})


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Names of several words, which cannot be words of the sentence."""
    if not names:
        return text
    longest = sorted(map(re.escape, names), key=len, reverse=True)
    return re.sub(rf"(?<![\w.\"'-])({'|'.join(longest)})(?!\w)", lambda found: names[found[1]], text)


def _written(flag: Flag, value: str) -> str:
    """An option with a value that is written as in Python."""
    if flag.is_switch and value in ("True", "False"):
        return flag.name if value == "True" else flag.no or flag.name
    if value == "None":
        return flag.name
    plain = value.strip("()'\"").replace(", ", ",").rstrip(",")
    return f"{flag.name}={plain if _PLAIN.fullmatch(plain) else value}"
