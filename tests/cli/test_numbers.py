"""Numbers that no option can take, for every option of every command and every field of the settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.training.recipe import Recipe

HUGE = 10**20
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
MODEL = "./no-such-model"  # so that a value that is accepted ends the command, too


# Options that are written as text, such as 1,8,32 or 64-256.
AS_TEXT = (
    "concurrency", "input_len", "output_len", "shared_len", "draft_tokens", "verify_budget", "aux_layers",
    "request_rate", "burst", "time_limit", "prompt_len", "new_tokens", "repeats", "sections",
)  # fmt: skip


def options() -> Iterator[Any]:
    """Command, option and its types, for all that take numbers. Each option is quick for one command."""
    seen: set[str] = set()
    for name, command in COMMANDS.items():
        if hasattr(command, "commands"):  # a group
            continue
        parameters = inspect.signature(command.callback, eval_str=True).parameters
        for item in command.params:
            if item.param_type_name == "option" and item.name in parameters:
                parts = get_args(parameters[item.name].annotation)
                kinds = {*parts} | {kind for part in parts for kind in get_args(part)}
                if kinds & {int, float} or item.name in AS_TEXT:
                    marks = pytest.mark.slow if item.name in seen else ()
                    seen.add(item.name)
                    yield pytest.param(name, item.opts[0], kinds, marks=marks, id=f"{name}{item.opts[0]}")


def run(command: str, option: str, value: str) -> Any:
    """The result of a command with this option, and values for what it requires."""
    arguments = [command, f"{option}={value}"]
    for item in COMMANDS[command].params:
        if item.param_type_name == "argument":
            arguments += ["./no-such-file"] * max(item.nargs, 1)
        elif item.required and option not in item.opts:
            arguments.append(f"{item.opts[0]}={'eagle3' if item.name == 'algorithm' else './no-such-file'}")
        elif item.name == "model":
            arguments.append(f"--model={MODEL}")
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(("command", "option", "kinds"), list(options()))
def test_numbers_beyond_any_count(
    command: str, option: str, kinds: set[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = [str(HUGE), "9" * 5_000] if int in kinds else ["nan", "1e400"] if float in kinds else [str(HUGE), "nan"]
    for value in values:
        result = run(command, option, value)
        lines = [line for line in result.stderr.splitlines() if line]
        assert result.exit_code == 2, (value, result.output, result.exception)
        assert lines[-1].startswith("error: "), (value, lines)
        assert not any(line.startswith(("Traceback", "error")) for line in lines[:-1])
        if int in kinds:
            assert option.strip("-").replace("-", "_") in lines[-1].replace("-", "_"), lines[-1]
            assert not list(tmp_path.iterdir())


def fields() -> Iterator[tuple[type[Any], str]]:
    for kind in (EngineConfig, Speculation, Graphs, SamplingParams, Recipe):
        types = get_type_hints(kind)
        for item in dataclasses.fields(kind):
            if {int, float} & {types[item.name], *get_args(types[item.name])}:
                yield kind, item.name


@pytest.mark.parametrize(("kind", "name"), list(fields()))
def test_fields(kind: type[Any], name: str) -> None:
    given: dict[str, Any] = {"algorithm": "ngram"} if kind is Speculation else {"algorithm": "eagle3"}
    given = given if kind in (Speculation, Recipe) else {}
    for value in (HUGE, -HUGE, 10**400, float("nan"), float("inf")):
        if name == "temperature" and value == HUGE:
            continue  # any positive number
        with pytest.raises(SpecbatchError) as caught:
            kind(**given | {name: value})
        assert name in str(caught.value)
