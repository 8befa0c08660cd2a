"""Configurations to compare: known ones by name (baseline, v1, v2, v2+piecewise, ...), or those of a file.

A file is TOML or YAML, with a table for each configuration, whose keys are options of the command and override those of
the command line. A list makes one configuration for each of its values, and several lists all combinations:

    [baseline]                    # ratios are over the configuration of this name, else over the first one
    spec = "off"

    [eagle]
    algorithm = "eagle3"
    draft = "heads/eagle3"
    draft-tokens = [1, 3, 7]      # eagle draft-tokens=1, eagle draft-tokens=3, ...
    spec = "v2"

    [vllm]                        # a server of another engine, with the options of --engine http
    engine = "http"
    base-url = "http://localhost:8000"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import each_once, refuse
from specbatch.files.text_files import read_toml, read_yaml
from specbatch.records.sweep_plan import folder_name
from specbatch.servers.server import Server
from specbatch.sweeps.run.engine_groups import engines_of
from specbatch.sweeps.run.loading import OF_WEIGHTS

Config = TypeVar("Config", EngineConfig, EngineConfig | Server)
Settings = dict[str, str | int | float | bool]
SUFFIXES = (".toml", ".yaml", ".yml")
NAME_BYTES = 255  # that a folder's name may have


def _scheduled(config: EngineConfig, schedule: str) -> EngineConfig:
    return replace(config, speculation=replace(config.speculation, schedule=schedule))


def _piecewise(config: EngineConfig) -> EngineConfig:
    return replace(config, graphs=replace(config.graphs, prefill="piecewise"))


def _baseline(config: EngineConfig) -> EngineConfig:
    none = Speculation(algorithm=NO_SPECULATION, schedule="v2")
    return replace(config, speculation=none, draft_attention_backend="auto")


# Each name changes the configuration of the user. The baseline runs without speculation, under schedule v2.
CONFIGURATIONS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "baseline": _baseline,
    "v1": lambda config: _scheduled(config, "v1"),
    "v2": lambda config: _scheduled(config, "v2"),
    "baseline+piecewise": lambda config: _piecewise(_baseline(config)),
    "v1+piecewise": lambda config: _piecewise(_scheduled(config, "v1")),
    "v2+piecewise": lambda config: _piecewise(_scheduled(config, "v2")),
}
PIECEWISE = "+piecewise"


def named(base: EngineConfig, names: Iterable[str]) -> dict[str, EngineConfig]:
    """The configurations of these names. base: the engine with the speculation of v1 and v2."""
    listed = list(names)
    for name in listed:
        if name not in CONFIGURATIONS:
            works = f"use some of {', '.join(CONFIGURATIONS)}, or the path of a file (.toml, .yaml, .yml)"
            raise refuse("configs", name, works)
    each_once("configs", listed)
    for name in listed if base.graphs.prefill == "piecewise" else ():
        if f"{name}{PIECEWISE}" in listed:
            works = f"{name} and {name}{PIECEWISE} would be the same; leave it out, or one of them"
            raise refuse("graphs.prefill", "piecewise", works)
    if base.speculation.algorithm == NO_SPECULATION and any(not name.startswith("baseline") for name in listed):
        raise refuse(
            "algorithm",
            NO_SPECULATION,
            "only the configuration baseline drafts nothing; use ngram, or another with its draft",
        )
    return {name: CONFIGURATIONS[name](base) for name in listed}


def by_model(configs: Mapping[str, Config]) -> dict[str, dict[str, Config]]:
    """Configurations that can share weights, by a name for their model. Settings of the weights are removed from their
    names, so that each model has its baseline. Servers are compared with the engines of one model."""
    if any(isinstance(config, Server) for config in configs.values()):
        models = {tuple(getattr(config, key) for key in OF_WEIGHTS) for config in engines_of(configs).values()}
        if len(models) > 1:
            works = "configurations next to a server must have its model; write a file for each model"
            raise refuse("model", ", ".join(sorted(str(model[0]) for model in models)), works)
        return {"servers": dict(configs)}
    found: dict[tuple[object, ...], dict[str, Config]] = {}
    for name, config in configs.items():
        weights = tuple(getattr(config, key) for key in OF_WEIGHTS)
        for key, value in zip(OF_WEIGHTS, weights, strict=True):
            name = name.replace(f" {key}={value}", "").replace(f" {key.replace('_', '-')}={value}", "")
        found.setdefault(weights, {})[name] = config
    names = [Path(str(weights[0])).name for weights in found]
    if len(set(names)) < len(names):
        names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
    return dict(zip(names, found.values(), strict=True))


def read_grid(path: Path) -> dict[str, Settings]:
    """The settings of each configuration of a file: keys with underscores, lists expanded."""
    read = read_toml if path.suffix == ".toml" else read_yaml
    tables = read("configs", path, "name a TOML or YAML file of configurations")
    if not isinstance(tables, Mapping) or not tables:
        raise refuse("configs", str(path), "has no configurations: write a table of options for each")
    found: dict[str, Settings] = {}
    for name, table in tables.items():
        if not isinstance(name, str) or not name.isprintable() or set(name) & {*"/|"} or name[:1] in ("", "."):
            works = "a configuration name must be printable, must not contain / or | and must not start with a dot"
            raise refuse("configs", f"{path}: {name}", works)
        if not isinstance(table, Mapping):
            raise refuse("configs", f"{path}: {name}", "write a table of options")
        for label, settings in _combined(path, name, table).items():
            _check_folder(path, label, found)
            found[label] = settings
    return found


def _check_folder(path: Path, label: str, others: Iterable[str]) -> None:
    """Refuse a configuration whose folder is that of another one, or too long a name."""
    folder = folder_name(label)
    for other in others:
        if folder_name(other) == folder:
            raise refuse("configs", f"{path}: {label}", f"{other} has a folder of that name, too; rename one of them")
    if len(folder.encode()) > NAME_BYTES:
        works = f"too long for a folder's name ({NAME_BYTES} bytes); use a table for each value, with a short name"
        raise refuse("configs", f"{path}: {label}", works)


def _written(value: Any) -> str:
    """A value as in a file."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _combined(path: Path, name: str, table: Mapping[Any, Any]) -> dict[str, Settings]:
    axes: list[list[tuple[str, Any]]] = []
    known: set[str] = set()
    for key, value in table.items():
        if (option := str(key).replace("-", "_")) in known:
            raise refuse("configs", f"{path}: {name}.{key}", "is given twice, with - and with _; remove one")
        known.add(option)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(item, (str, int, float, bool)) for item in values):
            raise refuse("configs", f"{path}: {name}.{key}", "use a text, a number, true or false, or a list of them")
        axes.append([(str(key), item) for item in values])
    found: dict[str, Settings] = {}
    for chosen in product(*axes):
        varied = [f"{key}={_written(value)}" for (key, value), axis in zip(chosen, axes, strict=True) if len(axis) > 1]
        label = " ".join([name, *varied])
        if label in found:
            raise refuse("configs", f"{path}: {label}", "name each value of a list once")
        found[label] = {key.replace("-", "_"): value for key, value in chosen}
    return found
