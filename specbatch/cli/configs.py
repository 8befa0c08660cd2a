"""The option --configs: configurations by name, or those of a file, as engine configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.cli.flags import in_keys
from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions
from specbatch.config.engine_config import EngineConfig
from specbatch.config.values import names
from specbatch.errors import SpecbatchError, each_once, refuse


def configured(engine: EngineOptions, configs: str, **settings: Any) -> dict[str, EngineConfig]:
    """The configurations of --configs: names, or a file whose settings override the command's options; each for every
    model of --model. settings: of `EngineOptions.config`."""
    from specbatch.sweeps.run.configurations import SUFFIXES, named

    settings["compares"] = True
    if configs.endswith(SUFFIXES):
        tables = tables_of(engine, configs)
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
        raise refuse("configs", where, in_keys(error, ENGINE_OPTIONS)) from error
