"""The option --configs: configurations by name, or those of a file, as engine configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbatch.cli.options import EngineOptions
from specbatch.cli.values import names
from specbatch.config import EngineConfig
from specbatch.errors import SpecbatchError, refuse


def configured(engine: EngineOptions, configs: str, **settings: Any) -> dict[str, EngineConfig]:
    """The configurations of --configs: names, or a file whose settings override the command's options. settings: of
    `EngineOptions.config`."""
    from specbatch.jobs.configurations import named
    from specbatch.sweeps.run.grid import SUFFIXES, read_grid

    settings["compares"] = True
    if not configs.endswith(SUFFIXES):
        return named(engine.having(spec="v2").config(**settings), names(configs))
    found = {}
    for name, changes in read_grid(Path(configs)).items():
        where = f"{configs}: {name}"
        options = engine.updated(changes, where)
        try:
            found[name] = options.config(**settings)
        except SpecbatchError as error:
            raise refuse("configs", where, str(error)) from error
    return found
