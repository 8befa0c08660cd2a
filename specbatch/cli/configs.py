"""The option --configs: configurations by name, or those of a file, as engine configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.cli.flags import in_keys
from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions
from specbatch.cli.values import names
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError, refuse


def configured(engine: EngineOptions, configs: str, **settings: Any) -> dict[str, EngineConfig]:
    """The configurations of --configs: names, or a file whose settings override the command's options. settings: of
    `EngineOptions.config`."""
    from specbatch.jobs.configurations import named
    from specbatch.sweeps.run.grid import SUFFIXES, read_grid

    settings["compares"] = True
    if not configs.endswith(SUFFIXES):
        return named(engine.having(spec="v2").config(**settings), names(configs))
    tables = read_grid(Path(configs))
    return {
        name: engine_of_table(engine, changes, f"{configs}: {name}", **settings) for name, changes in tables.items()
    }


def engine_of_table(engine: EngineOptions, changes: Mapping[str, Any], where: str, **settings: Any) -> EngineConfig:
    """The configuration of a table of a file. where: it was read, for errors."""
    options = engine.updated(changes, where)
    try:
        return options.config(**settings)
    except SpecbatchError as error:
        raise refuse("configs", where, in_keys(error, ENGINE_OPTIONS)) from error
