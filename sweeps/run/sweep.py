"""Runs a sweep into a folder: all points, on this machine or the workers of a cluster, and the summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.errors import counted, reporting
from specbatch.progress.bars import NotedReport
from specbatch.records.sweep_plan import begin, check_plan, plan_of, points
from specbatch.sweeps.report.notes import losses_of
from specbatch.sweeps.report.parts import folders_of, label_of, write_parts
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.tables import write_summary
from specbatch.sweeps.run.benchmark import Benchmark, OnMeasured, SweepOptions
from specbatch.sweeps.run.engine_groups import Failed, LoadedGroup, engines_of
from specbatch.sweeps.run.loading import Configs, Log, one_group
from specbatch.sweeps.run.runner import PointWorkload, left_of, run_points
from specbatch.sweeps.run.unloaded import check_early

if TYPE_CHECKING:
    from specbatch.replicas.cluster import Cluster
    from specbatch.servers.engine import HttpEngine


def run_sweep(
    configs: Configs,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
    cluster: Cluster | None = None,
    measured: OnMeasured | None = None,
) -> None:
    """Run every point that is not finished, write its record as soon as it is done, and at the end the summary.

    `folder` exists; where it holds points of the same sweep, they stay as they are, except for failed ones, which run
    again. On an error or Ctrl-C the summary of what is finished is written first. A configuration that fails (it does
    not fit, its draft is unknown) leaves records with the error, and the others go on. Refused: what concerns all of
    them, or all that speculate (`sweeps.run.unloaded`).

    cluster: its workers measure the points; None: this process does
    measured: see `Benchmark`
    """
    fit = options.fitted(configs)
    with _summarized(fit, {folder: options}, f"the summary in {folder}", log):
        run_workloads(fit, {folder: Benchmark(options, measured)}, cluster=cluster, log=log, report=report)


def run_workloads(
    configs: Configs,
    workloads: Mapping[Path, PointWorkload],
    *,
    failed: Failed | None = None,
    load: PointWorkload | None = None,
    cluster: Cluster | None = None,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> None:
    """Run the points that are not finished of one workload after the other, in this process, where they share the
    engines, or on the workers of `cluster`.

    workloads   by the folder of their results
    failed      gets the reasons why engines cannot be built in this process
    load        the workload that loads the engines, whose lengths an error names. Default: the first one
    """
    if cluster is not None:
        from specbatch.sweeps.run.blocks import run_blocks

        one_group(configs)
        for folder, workload in workloads.items():
            run_blocks(cluster, engines_of(configs), workload, folder, log=log, report=report)
        return
    failed = Failed() if failed is None else failed
    loads = load or next(iter(workloads.values()))
    left = left_of(configs, workloads)
    others = check_early(configs, left, failed, lengths_of=loads, log=log, report=report)
    with LoadedGroup(configs, lambda group: loads.load(group, log, failed), failed, others) as loaded:
        for folder, workload in workloads.items():
            run_points(configs, loaded, workload, folder, log=log, report=report)


def parts_of(options: SweepOptions, axis: str, values: Iterable[Any]) -> dict[str, SweepOptions]:
    """The options of each value of a field of the workload, by its label. Long texts of all lengths end alike."""
    works = {label_of(value): {axis: value} for value in values}
    if axis == "input_len" and options.workload.long_text is not None:
        longest = max(options.workload.window, *(own[axis] for own in works.values()))
        works = {label: own | {"window": longest} for label, own in works.items()}
    return {label: replace(options, workload=options.workload.varied(**own)) for label, own in works.items()}


def run_parts(
    configs: Configs,
    options: Mapping[str, SweepOptions],
    axis: str,
    folder: Path,
    *,
    server: HttpEngine | None = None,
    log: Log | None = None,
    report: NotedReport | None = None,
    cluster: Cluster | None = None,
) -> tuple[str, list[dict[str, Any]]]:
    """Run sweeps that differ in one field of the workload, one after the other into folders of `folder`, with the same
    engines; return the Markdown of all in one table, and its rows. What fails does so as in `run_sweep`.

    options: by the label of each part. axis: the field. server: the only configuration, in place of `configs`; its
    client renders the prompts
    """
    paths = folders_of(folder, axis, tuple(options))
    each = {paths[label]: replace(one, section=f"{axis.replace('_', ' ')} {label}") for label, one in options.items()}
    longest = max(each.values(), key=lambda one: one.workload.max_model_len or 0)
    fit = longest.fitted(configs if server is None else {server.model: server.config})
    for path, one in each.items():  # fail before a part has run for hours, not after
        check_plan(path, plan_of(fit, one))
    try:
        with _summarized(fit, each, f"the summaries in {folder}", log):
            if server is None:
                load = Benchmark(longest)
                workloads = {path: replace(load, options=one) for path, one in each.items()}
                run_workloads(fit, workloads, load=load, cluster=cluster, log=log, report=report)
            else:
                _ask(server, fit, each, log, report)
    finally:
        found = write_parts(folder, axis=axis)
    return found


def run_server(
    server: HttpEngine,
    options: SweepOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> None:
    """Run a sweep with a server as the only configuration, named by its model. A point whose requests all fail leaves a
    record with the error, and the others go on."""
    fit = options.fitted({server.model: server.config})
    with _summarized(fit, {folder: options}, f"the summary in {folder}", log):
        _ask(server, fit, {folder: options}, log, report)


def _ask(
    server: HttpEngine, fit: Configs, each: Mapping[Path, SweepOptions], log: Log | None, report: NotedReport | None
) -> None:
    """Run the points of sweeps with a server as the only configuration."""
    with LoadedGroup(fit, lambda _: nullcontext({server.model: server}), None) as loaded:
        for path, one in each.items():
            run_points(fit, loaded, Benchmark(one), path, log=log, report=report)


@contextmanager
def _summarized(fit: Configs, each: Mapping[Path, SweepOptions], tables: str, log: Log | None) -> Iterator[None]:
    """Write the summaries of sweeps that have points, also if the block is interrupted or fails, and the plans of the
    others, which are then named as unfinished. each: by their folders; tables: what is written, and where."""

    def kept() -> str:
        finished = sum(point.is_finished(path) for path, one in each.items() for point in points(fit, one, path))
        return what_is_kept(finished, tables)

    with reporting(kept):
        try:
            yield
        finally:
            begun = [path for path, one in each.items() if any(point.is_finished(path) for point in points(fit, one))]
            for path in begun:
                write_summary(path)
            for path in each.keys() - begun if begun else ():
                begin(path, plan_of(fit, each[path]))
    for path, one in each.items():
        if log is not None and (below := losses_of(load_records(path))):
            log(f"{f'{one.section}: ' if one.section else ''}{below.log_text}")


def what_is_kept(finished: int, tables: str) -> str:
    """How many points are finished, for an interruption or a failure. tables: which are written, and where."""
    if not finished:
        return "no point was finished"
    return f"kept {counted(finished, 'finished point')} and {tables}; the same command with this --out continues"
