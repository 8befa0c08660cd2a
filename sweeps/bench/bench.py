"""`specbatch bench`: sweeps that compare steps, throughput and TTFT of an engine with the limits of its device.

    folder/machine.json              read bandwidth and GEMM rate of the device
    folder/<section>/                a sweep: sweep.json, <configuration>/c<concurrency>/r<repeat>/record.json
    folder/summary.md, summary.csv   the tables of all sections

All engines stay loaded on one copy of the weights. Prompts are random ids, the same for all; end tokens are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse, reporting
from specbatch.files.atomic_file import write_atomic
from specbatch.progress.bars import NotedReport
from specbatch.records.sweep_plan import PLAN, check_plan, plan_of
from specbatch.sweeps.bench.limits import Limits
from specbatch.sweeps.bench.options import MACHINE, BenchOptions
from specbatch.sweeps.bench.peers import PEERS, differences_from, figures_of
from specbatch.sweeps.bench.sections import KINDS, kind_of, plan_bench
from specbatch.sweeps.bench.tables import MACHINE_FILE, load_sections, read_machine, write_tables
from specbatch.sweeps.report.notes import losses_of
from specbatch.sweeps.run.benchmark import Benchmark
from specbatch.sweeps.run.engine_groups import Failed, LoadedGroup
from specbatch.sweeps.run.loading import Log, loaded, noted
from specbatch.sweeps.run.runner import run_points
from specbatch.sweeps.run.sweep import what_is_kept


def run_bench(
    base: EngineConfig,
    options: BenchOptions,
    folder: Path,
    *,
    peers: str = "",
    log: Log | None = None,
    report: NotedReport | None = None,
) -> str:
    """Run all points that are not finished, and return the Markdown tables.

    `base`: model, device, dtype, page size, prefill chunk, memory and speculation; the sections determine the rest of
    an engine. `folder` exists; points of the same bench that it holds stay as they are. `peers` is a CSV of other
    engines' figures. A point that fails leaves a record with the error, and the others go on. On Ctrl-C the tables of
    the finished points are written first. Refused: see `plan_bench`.
    """
    sections = plan_bench(base, options, log)
    there = sorted(path.parent.name for path in folder.glob(f"*/{PLAN}"))
    now = sorted(section.name for section in sections)
    if not set(there) <= set(now):
        works = f"is of a bench with other sections ({', '.join(there)} there, {', '.join(now)} now); name a new folder"
        raise refuse("output", str(folder), works)
    for section in sections:
        check_plan(folder / section.name, plan_of(section.configs, section.options), f"a bench ({section.name})")
    machine = read_machine(folder) or (_measure_machine(base) if MACHINE in options.sections else {})
    configs = {name: config for section in sections for name, config in section.configs.items()}
    limits, failed = Limits(machine), Failed()

    def kept() -> str:
        return what_is_kept(len(list(folder.glob("*/*/c*/r*/record.json"))), f"the tables in {folder}")

    with reporting(kept):
        try:
            with LoadedGroup(configs, lambda group: loaded(group, log, failed=failed), failed) as engines:
                for section in sections:
                    benchmark = Benchmark(section.options, limits.add)
                    run_points(section.configs, engines, benchmark, folder / section.name, log=log, report=report)
        finally:
            records = load_sections(folder)
            if records or not sections:
                for name, content in ((MACHINE_FILE, json.dumps(machine) if machine else ""), (PEERS, peers)):
                    if content:
                        write_atomic(folder / name, content)
                text = write_tables(folder)
    for name, own in records.items():
        if log is not None and (below := losses_of(own, KINDS[kind_of(name)].view)):
            log(f"{name}: {below.log_text}")
    if peers and log is not None and not figures_of(folder, records):
        log(f"peers: no row matches: {differences_from(folder, records)}")
    return text


def _measure_machine(base: EngineConfig) -> dict[str, Any]:
    """What `measure_machine` finds before the engines take their memory, or why it failed."""
    from specbatch.runtime.device import find_device
    from specbatch.sweeps.machine.limits import measure_machine

    device = find_device(base.device)
    found: dict[str, Any] = {"device": str(device)}
    errors: dict[str, str] = {}
    with noted(errors, "error"):
        found |= measure_machine(device)
    return found | errors
