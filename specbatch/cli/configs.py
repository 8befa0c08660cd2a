"""The option --configs: configurations by name, or those of a file, as engine configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions
from specbatch.config.engine_config import EngineConfig
from specbatch.config.flags import InFlags, in_flags, in_keys, in_text, option_of
from specbatch.config.values import names
from specbatch.errors import WORDING, SpecbatchError, each_once, refuse
from specbatch.servers.server import Server

KEYS = (*ENGINE_OPTIONS, *(item.name for item in fields(Server)))  # of a table, with underscores


@dataclass(frozen=True)
class Words(InFlags):
    """The wording of a command: flags, and for what a table of its file of configurations sets the keys of the table.

    file    of --configs; None: there is none
    tables  by configuration, what its table sets, with underscores
    """

    file: str | None = None
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def message(self, error: SpecbatchError) -> str:
        """With the file and the table, if it is about one."""
        if self.file is not None and error.setting == "configs" and not str(error).startswith("configs="):
            if error.value is None:
                return "\n".join(f"{self.file}: {line}" for line in str(error).splitlines())
            error = refuse("configs", f"{self.file}: {error.value}", error.works or "")
        elif self._is_of_table(error):
            error = refuse("configs", f"{self.file}: {error.configuration}", self.reason(error))
        return in_flags(error, self.flags)

    def reason(self, error: SpecbatchError) -> str:
        if not self._is_of_table(error):
            return in_flags(error, self.flags)
        others = {name: flag for name, flag in self.flags.items() if option_of(name) not in KEYS}
        return in_text(in_keys(error, KEYS), others)

    def _is_of_table(self, error: SpecbatchError) -> bool:
        if self.file is None or error.configuration is None:
            return False
        every = frozenset().union(*self.tables.values())  # of configurations that were renamed, one folder per model
        setting = error.setting or str(error).partition("=")[0]
        return option_of(setting) in self.tables.get(error.configuration, every)


def word_tables(file: str, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Have messages name the keys of tables. A server's settings are all its table's, also those that it leaves out."""
    words = WORDING.get()
    if isinstance(words, Words):
        of_servers = {item.name for item in fields(Server)}
        named = {name: frozenset(of_servers if own.get("engine") == "http" else own) for name, own in tables.items()}
        WORDING.set(replace(words, file=file, tables=named))


def configured(engine: EngineOptions, configs: str, **settings: Any) -> dict[str, EngineConfig]:
    """The configurations of --configs: names, or a file whose settings override the command's options; each for every
    model of --model. settings: of `EngineOptions.config`."""
    from specbatch.sweeps.run.configurations import SUFFIXES, named

    settings["compares"] = True
    if configs.endswith(SUFFIXES):
        tables = tables_of(engine, configs)
        word_tables(configs, tables)
        return {name: engine_of_table(engine, own, f"{configs}: {name}", **settings) for name, own in tables.items()}
    found = dict[str, EngineConfig]()
    for model, ending in _models(engine).items():
        base = engine.having(model=model, spec="v2").config(**settings)
        found |= {f"{name}{ending}": config for name, config in named(base, names("configs", configs)).items()}
    return found


def tables_of(engine: EngineOptions, configs: str) -> dict[str, dict[str, Any]]:
    """The tables of a file of configurations by name; those that name no model once for each of several of --model."""
    from specbatch.sweeps.run.configurations import read_grid

    models, found = _models(engine), dict[str, dict[str, Any]]()
    for name, table in read_grid(Path(configs)).items():
        if len(models) == 1 or "model" in table or table.get("engine") == "http":
            found[name] = table
        else:
            found |= {f"{name}{ending}": {**table, "model": model} for model, ending in models.items()}
    return found


def _models(engine: EngineOptions) -> dict[str, str]:
    """The models of --model, separated by commas, and how the names of their configurations end, as where a file has a
    list of models. A path may have commas."""
    several = names("model", engine.model) if not Path(engine.model).exists() else (engine.model,)
    each_once("model", several)
    return {model: f" model={model}" if len(several) > 1 else "" for model in several}


def engine_of_table(engine: EngineOptions, changes: Mapping[str, Any], where: str, **settings: Any) -> EngineConfig:
    """The configuration of a table of a file. where: it was read, for errors."""
    options = engine.updated(changes, where)
    try:
        return options.config(**settings)
    except SpecbatchError as error:
        raise refuse("configs", where, in_keys(error, KEYS)) from error
