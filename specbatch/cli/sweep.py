"""`specbatch sweep`: compares configurations at several concurrencies."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from specbatch.cli import workloads
from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.options import (
    SAMPLING_OPTIONS,
    WITH_DRAFTS,
    EngineOptions,
    Json,
    Wide,
    is_given,
    options_of,
    takes_engine,
)
from specbatch.cli.output import fresh_folder, results, say, show
from specbatch.cli.servers import SERVER_PANEL, configured_with_servers, kind_option, only_server
from specbatch.cli.thinking import CompareThinking, check_compared
from specbatch.config.values import whole_numbers
from specbatch.errors import one_line, refuse
from specbatch.progress.bars import progress
from specbatch.servers.server import Server
from specbatch.sweeps.workload.defaults import CPU, GPU, REPEATS
from specbatch.sweeps.workload.rounds import Rounds
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig


@takes_engine(
    without=("spec",),
    defaults={"prefix_cache": "off; on with --dataset gsp and --replay", "max_running": "the highest --concurrency"}
    | WITH_DRAFTS,
    sampling=SAMPLING_OPTIONS,
    cluster=CLUSTER_OPTIONS,
    workload=options_of(Workload, workloads.PANEL, defaults=workloads.DEFAULTS),
    rounds=options_of(Rounds, defaults=workloads.DEFAULTS),
    of_server=options_of(Server, SERVER_PANEL),
)
def sweep(
    context: typer.Context,
    *,
    engine: EngineOptions,
    sampling: dict[str, Any],
    cluster: dict[str, Any],
    configs: Annotated[
        str,
        Option(
            help="Configurations: some of baseline, v1, v2, each also with +piecewise; or a TOML or YAML file that "
            "defines them."
        ),
    ] = "baseline,v1,v2",
    rounds: dict[str, Any],
    workload: dict[str, Any],
    engine_kind: Annotated[str, kind_option("measure")] = "specbatch",
    of_server: dict[str, Any],
    compare_thinking: CompareThinking = False,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "--out",
            help="New folder for the results, or that of an interrupted sweep to continue. Default: out/sweep-TIME.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would run and estimate how long; load nothing.")
    ] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Compare configurations at several concurrencies, on the same prompts.

    specbatch sweep --concurrency 1,4

    specbatch sweep --draft self:skip=12-15 --draft-tokens 3

    specbatch sweep --configs grid.toml --out out/heads

    specbatch sweep --engine http --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-8B

    baseline does not speculate and runs schedule v2. v1 and v2 speculate with ngram, or with --algorithm and --draft.
    NAME+piecewise also uses piecewise CUDA graphs for prefill. Speedups are relative to the configuration named
    baseline, else to the first one.

    Details:

    specbatch sweep --output-len 256 --until-precise 2%

    specbatch sweep --output-len 256 --repeats 5

    specbatch sweep --dataset gsp --output-len 256 --request-rate 10 --concurrency 128

    specbatch sweep --temperature 0.6 --top-p 0.95

    specbatch sweep --request-rate 10 --slo ttft=0.5,tpot=0.03

    specbatch sweep --request-rate 1,5,inf --num-prompts 256

    specbatch sweep --dataset gsm8k --chat-template --compare-thinking

    Answers are greedy, or sampled with --temperature, each with its own seed (--seed chooses them): the same for all
    configurations and, if it has seeds, a server. For gsp the prefix cache is on, and emptied before each point.

    Each table of a --configs file is one configuration; its keys are options of this command. A list gives one
    configuration per value:

    \\[baseline]
    spec = "off"

    \\[ngram]
    algorithm = "ngram"
    draft-tokens = [3, 7]

    Different models (model = ..., or --model A,B) run one after the other, each in its own process and folder.
    Configurations on another number of devices (tensor-parallel, data-parallel) are loaded one after the other in each
    round.

    A table with engine = "http" and base-url = "http://localhost:8000" is a server of another engine, measured in the
    same rounds and with the same prompts (docs/head-to-head.md).

    With --engine http the same prompts go to a server at the same times (streamed /v1/completions), and all times are
    measured by this client. The server has its own engine settings, so of the options below only --model (one of its
    models), --tokenizer and --seed apply. Its prefix cache is emptied before each point if the server supports that
    (/flush_cache of SGLang, /reset_prefix_cache of vLLM; cache_prompt=false for llama.cpp). Failed requests are counted
    by error message, and make the exit status 1. A request also fails if its answer takes too long (--idle-timeout,
    --request-timeout), is not a valid stream, or has impossible counts, such as more tokens than requested.

    Each point writes record.json and requests.jsonl, from which the summary and report.html, a page with plots, are
    made. Suspicious outputs are reported: truncated answers, reasoning with --no-thinking, chat template tokens in
    plain text. Points of a server with failed requests run again when a sweep continues.

    A configuration that fails (it does not fit into memory, its draft is unknown) does not end the sweep: the summary
    shows the reason, the exit status is 1, and the same command with the folder as --out runs it again. What all
    configurations have in common, or all that speculate, is refused before anything is loaded (exit status 2).
    """
    from specbatch.records.sweep_plan import check_plan, plan_of
    from specbatch.runtime.device import device_type
    from specbatch.sweeps.report.parts import MODES, RATE, THINKING, folders_of, write_parts
    from specbatch.sweeps.run.benchmark import Benchmark, SweepOptions
    from specbatch.sweeps.run.configurations import by_model
    from specbatch.sweeps.run.engine_groups import Failed, engines_of
    from specbatch.sweeps.run.loading import one_group, prefixed, refuse_servers
    from specbatch.sweeps.run.process import naming, run_in_process
    from specbatch.sweeps.run.runner import TOKENIZING, left_of
    from specbatch.sweeps.run.sweep import parts_of, run_parts, run_server, run_sweep
    from specbatch.sweeps.run.unloaded import check_early

    engine, workers = clustered(engine, cluster, replicas=False)
    if workers is not None and engine_kind != "specbatch":
        raise refuse("distributed", cluster["distributed"], "does not apply to a server; leave it out")
    on_cpu = engine_kind == "specbatch" and device_type(engine.device) == "cpu"
    lengths = CPU if on_cpu else GPU
    is_shortened = on_cpu and workload[RATE] is None and None in (
        rounds["concurrency"], workload["output_len"], workload["prompts_per_concurrency"]
    )  # fmt: skip
    uncapped = workload[RATE] is not None and rounds["concurrency"] is None
    axis = workloads.axis_of(workload)
    if compare_thinking:
        if axis is not None:
            raise refuse("compare_thinking", True, f"{axis[0]} has several values; leave one of them out")
        axis = THINKING, list(MODES.values())
    first = {} if axis is None else {axis[0]: min(axis[1]) if axis[0] == "input_len" else axis[1][0]}
    asked = workloads.asked_workload(workload | first, lengths, seed=engine.seed, uncapped=uncapped, **sampling)
    steps = rounds["concurrency"] or whole_numbers("concurrency", lengths.concurrency)
    if uncapped:
        steps = (asked.count(1),)
    repeats = REPEATS if rounds["repeats"] is None else rounds["repeats"]
    precise = rounds["until_precise"]
    if precise is None and is_given(context, "most_repeats"):
        raise refuse(
            "most_repeats", rounds["most_repeats"], "goes with --until-precise; leave it out, or use --repeats"
        )
    if precise is not None and (engine_kind != "specbatch" or workers is not None):
        where = "a server, which has no baseline" if workers is None else "the workers of a cluster"
        raise refuse("until_precise", f"{100 * precise:g}%", f"does not apply to {where}; use --repeats")
    options = SweepOptions(**rounds | {"concurrency": steps, "repeats": repeats}, workload=asked)
    parts = {} if axis is None else parts_of(options, *axis)
    server = only_server(engine, of_server, context.params, lambda name: is_given(context, name))
    engines: dict[str, EngineConfig | Server] = {}
    if server is None:
        cached, elsewhere = asked.is_grouped or asked.replay, workers is not None
        own = {"concurrency": None if uncapped else max(steps), "prefix_cache": cached, "elsewhere": elsewhere}
        engines = configured_with_servers(engine, configs, workload["thinking"], **own)
    models = by_model(engines)
    if compare_thinking:
        servers = [config for config in engines.values() if isinstance(config, Server)]
        check_compared(workload["thinking"], models, servers if server is None else [server.server])
    elif axis is not None and len(models) > 1:
        works = f"takes one value with several models ({', '.join(models)}); run it for each"
        raise refuse(axis[0], ",".join(map(str, axis[1])), works)
    has_servers = server is not None or len(engines_of(engines)) < len(engines)
    if workers is not None:
        refuse_servers(engines)
        one_group(engines)
    if dry_run and not engines_of(engines):
        raise refuse("dry_run", True, "the speed of a server cannot be estimated; leave it out")
    settings = options.described(
        engines if server is None else [server.model],
        shortened=is_shortened,
        varies="" if axis is None else axis[0],
    )
    if axis is not None and not compare_thinking:
        settings += f"; one after the other: {axis[0].replace('_', '-')} {', '.join(parts)}"
    each = {"": (engines, options, "")}  # by what is above its plan: a sweep, and its folder in that of all
    if axis is not None:
        paths = folders_of(Path(), axis[0], tuple(parts))
        each = {f"{axis[0]} {label}": (engines, one, paths[label].name) for label, one in parts.items()}
    elif len(models) > 1:
        each = {f"model {name}": (ours, options, name) for name, ours in models.items()}
    inside = [name for *_, name in each.values() if name]
    if dry_run:
        from specbatch.sweeps.run.estimate import dry_run as planned
        from specbatch.sweeps.run.estimate import in_all

        plans, text = [], ""
        with progress(TOKENIZING, "prompts") as report:
            for title, (ours, one, name) in each.items():
                with naming(title, log=say):
                    plans.append(planned(ours, one, output and output / name, report))
                text += f"{title}:\n\n{plans[-1]}\n" if title else str(plans[-1])
        if len(plans) > 1:
            text += str(in_all(plans))
        say(settings)
        show(text, {"configurations": list(engines)}, as_json=as_json)
        return
    resumes = "*" if output is not None and _continues(output, inside) else None
    with fresh_folder(output, "sweep", resumes=resumes) as folder:
        options.fitted(engines)  # may raise, before the settings are printed
        say(settings)
        swept, statuses = [folder], list[int]()
        if axis is not None:
            swept = [folder / name for name in inside]
            with progress("sweep", "requests") as report:
                summary, rows = run_parts(
                    engines, parts, axis[0], folder, server=server, log=say, report=report, cluster=workers
                )
            reports = [page for path in swept for page in write_reports(path)]
        elif server is not None:
            with progress("sweep", "requests") as report:
                run_server(server, options, folder, log=say, report=report)
            summary, rows = _summary(folder, wide=wide)
            reports = write_reports(folder)
        elif len(models) == 1:
            with progress("sweep", "requests") as report:
                run_sweep(engines, options, folder, log=say, report=report, cluster=workers)
            summary, rows = _summary(folder, wide=wide)
            reports = write_reports(folder)
        else:
            with progress(TOKENIZING, "prompts") as report:
                for name, ours in models.items():  # fail before a model has run for hours, not after
                    with naming(name, log=say):
                        fit = options.fitted(ours)
                        check_plan(folder / name, plan_of(fit, options))
                        left = left_of(fit, {folder / name: Benchmark(options)} if workers is None else {})
                        check_early(fit, left, Failed(), log=prefixed(say, name), report=report)
            summary, rows, reports = "", [], []
            for name, ours in models.items():
                say(f"{name}:")
                run = partial(run_sweep, ours, options, cluster=workers)
                if status := run_in_process(run, folder / name, log=say, label="sweep"):
                    say(f"{name}: failed; the other models go on")
                    statuses.append(status)
                if (folder / name / "summary.md").exists():
                    text, found = _summary(folder / name, wide=wide)
                    summary += f"## {name}\n\n{text}\n"
                    rows += [{"model": name, **row} for row in found]
                    reports += write_reports(folder / name)
            if common := write_parts(folder)[0]:
                summary += f"## all models\n\n{common}"
            if len(statuses) == len(models):
                raise typer.Exit(2 if set(statuses) == {2} else 1)
    lines = "\n".join([results(folder, wide=wide), *(f"plots: {path}" for path in reports)])
    show(
        f"{summary}\n{lines}",
        {"output": str(folder), "reports": reports, "rows": rows},
        as_json=as_json,
        kept=str(folder),
    )
    if statuses or any(row.get("failed") for row in rows) or (has_servers and any(map(_failed, swept))):
        raise typer.Exit(1)


def _continues(output: Path, inside: Collection[str]) -> bool:
    """Whether `output` holds points of such a sweep: in some of these folders, or itself if there are none. Of a sweep
    of another kind its summary would be overwritten."""
    from specbatch.records.sweep_plan import PLAN

    is_one, begun = (output / PLAN).exists(), {path.parent.name for path in output.glob(f"*/{PLAN}")}
    return not is_one and not begun.isdisjoint(inside) if inside else is_one


def _summary(folder: Path, *, wide: bool) -> tuple[str, list[dict[str, Any]]]:
    """The tables of a sweep in Markdown, and the rows of summary.csv as JSON values, None for cells without a
    measurement."""
    from specbatch.records.sweep_plan import unfinished
    from specbatch.sweeps.report.points import load_records
    from specbatch.sweeps.report.tables import as_json, markdown, table

    records = load_records(folder)
    rows = table(records)
    return markdown(records, rows, unfinished(folder), brief=not wide), as_json(rows)


def write_reports(folder: Path) -> list[str]:
    """Write what `specbatch report` writes; returns the path of the page. The results are complete without plots, so
    that an error is a warning."""
    from specbatch.sweeps.report.report import write_report

    try:
        return [str(write_report(folder)[-1])]
    except Exception as error:
        say(f"warning: no report.html: {one_line(error)}; specbatch report {folder} writes it")
        return []


def _failed(folder: Path) -> bool:
    """Whether a request of the sweep in `folder` failed."""
    from specbatch.sweeps.report.points import load_records

    return any(record.counters.get("errors") for record in load_records(folder))
