"""The points of `specbatch eval --configs`: configurations, runs of each model, tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specbatch.cli.options import EngineOptions
from specbatch.cli.output import say, show
from specbatch.cli.servers import configured_with_servers
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import about, refuse
from specbatch.evals.options import GridOptions
from specbatch.progress.bars import progress
from specbatch.servers.server import CONCURRENCY, Server

if TYPE_CHECKING:
    from specbatch.evals.grid_table import Grid
    from specbatch.evals.thinking import ThinkingGrids
    from specbatch.replicas.cluster import Cluster

_ABLATION, _ON_CUDA = ("baseline", "v1", "v2"), ("baseline+piecewise", "v2+piecewise")


def check_grid(engine: EngineOptions, configs: str | None, ablation: bool) -> None:
    option = "--configs" if configs is not None else "--ablation"
    if ablation and configs is not None:
        raise refuse("configs", configs, "--ablation is short for one; leave one of them out")
    if engine.spec is not None:
        raise refuse("spec", engine.spec, f"{option} runs several; leave it out")


def grid_asked(
    engine: EngineOptions,
    configs: str | None,
    steps: tuple[int, ...] | None,
    thinking: bool | None,
    *,
    elsewhere: bool,
) -> tuple[dict[str, EngineConfig | Server], tuple[int, ...], dict[str, str]]:
    """The configurations, the concurrencies (default: what the engine runs at once), and why --ablation leaves some
    configurations out. elsewhere: engines run on other machines."""
    from specbatch.runtime.device import device_type
    from specbatch.sweeps.run.engine_groups import engines_of
    from specbatch.sweeps.run.loading import most_at_once, with_concurrency

    left_out: dict[str, str] = {}
    if configs is None:
        configs = ",".join(_ABLATION)
        if device_type(engine.device) == "cuda":
            configs = ",".join((*_ABLATION, *_ON_CUDA))
        else:
            left_out = dict.fromkeys(_ON_CUDA, "piecewise prefill graphs need a CUDA device")
    most = None if steps is None else max(steps)
    found = configured_with_servers(engine, configs, thinking, concurrency=most, elsewhere=elsewhere)
    own = engines_of(found)
    if steps is None:
        steps = (most_at_once(own, elsewhere=elsewhere) if own else CONCURRENCY,)
    fit: dict[str, EngineConfig | Server] = {}
    for name, config in found.items():
        seeded = replace(config, seed=engine.seed) if isinstance(config, Server) else config
        with about(name):
            fit[name] = with_concurrency(own[name], max(steps)) if name in own else seeded
    return fit, steps, left_out


def compare(
    models: dict[str, dict[str, EngineConfig | Server]],
    left_out: dict[str, str],
    options: GridOptions,
    folder: Path,
    workers: Cluster | None,
) -> tuple[dict[str, dict[str, Grid]], list[int]]:
    """Run all points. The tables by model and task, and the exit statuses of models that have failed."""
    from specbatch.evals.grid import each_task, evaluations, load_grids, run_grids
    from specbatch.sweeps.run.engine_groups import Failed
    from specbatch.sweeps.run.loading import prefixed
    from specbatch.sweeps.run.process import naming, run_in_process
    from specbatch.sweeps.run.runner import left_of
    from specbatch.sweeps.run.unloaded import check_early

    tasks, label = each_task(options), f"eval {options.task.task}"
    if len(models) == 1:
        [configs] = models.values()
        with progress(label, "requests") as report:
            how: dict[str, Any] = {"left_out": left_out, "cluster": workers, "log": say, "report": report}
            return {"": run_grids(configs, tasks, folder, **how)}, []
    for name, ours in models.items():  # fail before a model has run for hours, not after
        with naming(name, log=say):
            every = evaluations(ours, tasks, folder / name)
            check_early(ours, left_of(ours, every if workers is None else {}), Failed(), log=prefixed(say, name))
    found: dict[str, dict[str, Grid]] = {}
    statuses: list[int] = []
    for name, ours in models.items():
        say(f"{name}:")
        run = partial(run_grids, ours, tasks, left_out=left_out, cluster=workers)
        if status := run_in_process(run, folder / name, log=say, label=label):
            say(f"{name}: failed; the other models go on")
            statuses.append(status)
        if grids := load_grids(tasks, folder / name):
            found[name] = grids
    if len(statuses) == len(models):
        raise typer.Exit(2 if {*statuses} == {2} else 1)
    return found, statuses


def grids_in_modes(
    models: dict[str, dict[str, EngineConfig | Server]],
    left_out: dict[str, str],
    options: GridOptions,
    folder: Path,
    workers: Cluster | None,
) -> ThinkingGrids:
    """Run all points with thinking on, then off, and write the table of both."""
    from specbatch.evals.several import refuse_others
    from specbatch.evals.thinking import ThinkingGrids, in_modes
    from specbatch.records.sweep_plan import PLAN
    from specbatch.sweeps.report.parts import folders_of

    found, paths = {}, folders_of(folder)
    for path in paths.values():
        refuse_others(path, options.task.names, PLAN)
    for mode, asked in in_modes(options.task, folder).items():
        say(f"thinking {mode}:")
        paths[mode].mkdir(exist_ok=True)
        own = replace(options, task=replace(asked, output=None))
        found[mode] = compare(models, left_out, own, paths[mode], workers)[0][""]
    both = ThinkingGrids(found)
    both.save(folder)
    return both


def show_grids(grids: dict[str, dict[str, Grid]], folder: Path, as_json: bool) -> None:
    """The table of each model and task, with headings and keys of what there are several of."""
    parts, result = [], dict[str, Any]()
    for model, own in grids.items():
        for task, grid in own.items():
            title = ", ".join(filter(None, [model, task if len(own) > 1 else ""]))
            parts.append(f"## {title}\n\n{grid.table()}" if title else grid.table())
        tasks = {task: grid.as_dict() for task, grid in own.items()}
        found = {"tasks": tasks} if len(tasks) > 1 else next(iter(tasks.values()))
        result = found if not model else {"models": {**result.get("models", {}), model: found}}
    text = "\n\n".join([*parts, f"results: {folder}"])
    show(text, {**result, "output": str(folder)}, as_json=as_json, kept=str(folder))
