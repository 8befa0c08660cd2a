"""The commands that measure: sweep, bench and trace."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from specbatch.cli.load import length, server_of, whole_number
from specbatch.cli.options import EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, say, show
from specbatch.config import EngineConfig
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.sweeps.run.runner import SweepOptions

# What `bench` decides itself, point by point.
BENCH_SETS = (*("spec", "decode_graph", "prefill_graph", "max_running", "max_model_len", "kv_pages", "prefix_cache"),)


@takes_engine(without=("spec",))
def sweep(
    context: typer.Context,
    engine: EngineOptions,
    concurrency: Annotated[str, Option(help="Comma-separated numbers of requests kept unfinished.")] = "1,8,32,128",
    configs: Annotated[
        str, Option(help="Some of baseline, v1, v2, v2+piecewise; or a TOML or YAML file of configurations.")
    ] = "baseline,v1,v2",
    dataset: Annotated[
        str,
        Option(
            help="random, gsp, gsm8k, lm-eval:TASK (what that task asks) or FILE.jsonl (lines as for generate, or "
            "turns as in MT-Bench, of which the first is asked: later ones would need the answers before them)."
        ),
    ] = "random",
    data: Annotated[Path | None, Option(help="The questions, for --dataset gsm8k and lm-eval:gsm8k.")] = None,
    input_len: Annotated[
        str, Option(metavar="N|N-M", help="Tokens per random prompt, or fewest and most; with gsp its question.")
    ] = "128",
    output_len: Annotated[
        str, Option(metavar="N|N-M", help="Tokens per answer, or fewest and most; for text only the most.")
    ] = "128",
    groups: Annotated[int, Option(help="gsp: groups of prompts that begin alike.")] = 32,
    group_prompts: Annotated[int, Option(help="gsp: prompts of each group.")] = 16,
    shared_len: Annotated[
        str,
        Option(
            "--shared-len",
            "--system-len",
            metavar="N|N-M",
            help="gsp: tokens of the system prompt that a group shares.",
        ),
    ] = "2048",
    chat_template: Annotated[
        bool | None,
        Option(
            "--chat-template/--no-chat-template",
            help="Ask texts as messages, rendered by the model's template; or render nothing. Default: messages only.",
        ),
    ] = None,
    thinking: Annotated[
        bool | None, Option("--thinking/--no-thinking", help="The template's enable_thinking. Default: its own.")
    ] = None,
    request_rate: Annotated[
        float, Option(help="Prompts that arrive in a second, at random. inf: one when another one ends.")
    ] = math.inf,
    burst: Annotated[
        str, Option(metavar="N|all", help="Prompts that arrive together, at that rate; all: a point's at once.")
    ] = "1",
    prompts_per_concurrency: Annotated[
        int, Option(help="A point runs this many times its concurrency (4 at least).")
    ] = 4,
    repeats: Annotated[int, Option(help="Rounds over the configurations, A B C A B C.")] = 1,
    engine_kind: Annotated[
        str, Option("--engine", metavar="specbatch|http", help="http: the server at --base-url in place of our engine.")
    ] = "specbatch",
    base_url: Annotated[
        str | None, Option(help="An OpenAI-compatible server (vLLM, SGLang), such as http://localhost:8000.")
    ] = None,
    send: Annotated[
        str, Option(metavar="ids|text", help="http: prompts as token ids, which no server can read differently.")
    ] = "ids",
    api_key_env: Annotated[
        str | None, Option(metavar="NAME", help="http: environment variable that holds the server's key.")
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "--out", help="Folder: a new one, or that of the same sweep cut short. \\[out/sweep-TIME]"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would run and how long; load nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Compare configurations at several concurrencies, in one process, on the same prompts.

    specbatch sweep --concurrency 1,4 --input-len 64 --output-len 32

    specbatch sweep --dataset gsm8k --data gsm8k_test.jsonl --repeats 3

    specbatch sweep --draft self:skip=12-15 --draft-tokens 3

    specbatch sweep --dataset gsp --output-len 256 --request-rate 10 --concurrency 128

    specbatch sweep --configs grid.toml --out sweeps/heads

    baseline drafts nothing (schedule v2); v1 and v2 draft with ngram, or with --draft;
    v2+piecewise also replays prompts in pieces. gsp is random prompts in groups that begin alike, in shuffled order;
    with it the prefix cache is on, and empty at the start of each point.

    In a file each table is a configuration, whose keys are options of this command; a list stands for one of each.

    \\[baseline]
    spec = "off"

    \\[ngram]
    algorithm = "ngram"
    draft-tokens = [3, 7]

    Ratios are over the configuration named baseline. Several models (model = ...) run one after the other, each in a
    process and a folder of its own.

    specbatch sweep --engine http --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-8B --dataset gsm8k

    With --engine http the same prompts go to a server at the same times (/v1/completions, streamed), and the table is
    of the same numbers by this machine's clock. Settings of the engine are the server's own, so that only --model (one
    of its models), --tokenizer and --seed can be given. Its prefix cache is emptied before each point where it can be
    (SGLang's /flush_cache, vLLM's /reset_prefix_cache). Requests that fail are counted by what the server said, and
    make the exit status 1.

    Each point leaves record.json and requests.jsonl; the summary is made from them. Outputs that do not look like what
    was asked (cut off, reasoning where it is off, marks of a template) are told. The same command with the --out of a
    sweep that was cut short runs what is missing.
    """
    from specbatch.records.points import PLAN
    from specbatch.sweeps.run.grid import by_model
    from specbatch.sweeps.run.runner import SweepOptions, check, run_server, run_sweep
    from specbatch.sweeps.run.workloads import Workload

    steps = _whole_numbers("concurrency", concurrency)
    workload = Workload(
        dataset,
        data,
        length("input_len", input_len),
        length("output_len", output_len),
        prompts_per_concurrency,
        engine.seed,
        groups=groups,
        group_prompts=group_prompts,
        shared_len=length("shared_len", shared_len),
        request_rate=request_rate,
        burst=0 if burst == "all" else whole_number("burst", burst, "all"),
        chat_template=chat_template,
        thinking=thinking,
    )
    options = SweepOptions(steps, repeats, workload)
    server = server_of(engine, context.params, lambda name: _given(context, name))
    engines = {}
    if server is None:
        engines = _engines(engine, configs, concurrency=max(steps), prefix_cache=workload.is_grouped)
    if dry_run and server is not None:
        raise refuse("dry_run", True, "how fast a server is nobody knows beforehand; leave it out")
    if dry_run:
        from specbatch.sweeps.run.estimate import dry_run as planned

        show(planned(engines, options, output), {"configurations": list(engines)}, as_json=as_json)
        return
    resumes = "*" if output is not None and (any(output.glob(PLAN)) or any(output.glob(f"*/{PLAN}"))) else None
    with fresh_folder(output, "sweep", resumes=resumes) as folder:
        models = by_model(engines)
        if server is not None:
            with progress("sweep") as report:
                summary, rows = run_server(server, options, folder, log=say, report=report), _summary_rows(folder)
        elif len(models) == 1:
            with progress("sweep") as report:
                summary, rows = run_sweep(engines, options, folder, log=say, report=report), _summary_rows(folder)
        else:
            for ours in models.values():  # what cannot run is not found after another model has run for hours
                check(ours, options)
            summary, rows = "", []
            for name, ours in models.items():
                summary += _in_a_process(name, ours, options, folder / name)
                rows += [{"model": name, **row} for row in _summary_rows(folder / name)]
    show(f"{summary}\nresults: {folder}", {"output": str(folder), "rows": rows}, as_json=as_json)
    if server is not None and _failed(folder):
        raise typer.Exit(1)


def _in_a_process(name: str, engines: dict[str, EngineConfig], options: SweepOptions, folder: Path) -> str:
    """The sweep of one of several models: nothing of it is left behind for the next one."""
    say(f"{name}:")
    folder.mkdir(exist_ok=True)
    process = get_context("spawn").Process(target=_one_model, args=(engines, options, folder))
    process.start()
    stopped = False
    while process.exitcode is None:
        try:
            process.join()
        except KeyboardInterrupt:
            stopped = True
            process.terminate()  # it writes its summary first, unless it is told so twice
    if stopped:
        raise KeyboardInterrupt(f"what is finished is kept in {folder.parent}; the same command goes on")
    if process.exitcode:
        raise typer.Exit(process.exitcode if process.exitcode == 2 else 1)
    return f"## {name}\n\n{(folder / 'summary.md').read_text(encoding='utf-8')}\n"


def _one_model(engines: dict[str, EngineConfig], options: SweepOptions, folder: Path) -> None:
    # A terminal interrupts both processes, anybody else the command alone: this one listens to the command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Thread(target=_end_with_the_command, daemon=True).start()
    try:
        from specbatch.sweeps.run.runner import run_sweep

        with progress("sweep") as report:
            run_sweep(engines, options, folder, log=say, report=report)
    except SpecbatchError as error:
        say(f"error: {error}")
        raise SystemExit(2) from None
    except KeyboardInterrupt as stop:
        for line in stop.args:
            say(line)
        raise SystemExit(130) from None


def _end_with_the_command() -> None:
    """The command may be killed and started again, and this process would measure beside the new one."""
    command = parent_process()
    assert command is not None
    command.join()
    os._exit(1)


@takes_engine(without=BENCH_SETS)
def bench(
    context: typer.Context,
    engine: EngineOptions,
    sections: Annotated[str, Option(help="Some of machine, decode, closed, ttft, verify.")] = (
        "machine,decode,closed,ttft,verify"
    ),
    configs: Annotated[
        str | None,
        Option(
            help="Some of v1, v2, v2+piecewise, for closed, ttft and (prompts play no part) decode; verify is always "
            "v2. With drafts also baseline, which has none. Default: what the device can."
        ),
    ] = None,
    decode_graph: Annotated[
        str | None, Option(metavar="whole|off", help="Default: whole on a CUDA device, off on a CPU.")
    ] = None,
    batch: Annotated[str, Option(help="Batch sizes of a decode step.")] = "1,32,128",
    verify_batch: Annotated[str, Option(help="Batch sizes of a verify of 16 rows.")] = "1,32",
    decode_tokens: Annotated[int, Option(help="Prompt tokens before a decode or verify step.")] = 512,
    new_tokens: Annotated[
        str, Option(help="Of the two runs whose difference is a step; with drafts the longer alone.")
    ] = "32,288",
    concurrency: Annotated[str, Option(help="Requests that a closed loop keeps unfinished.")] = "1,8,32,128",
    input_len: Annotated[int, Option(help="Prompt tokens in a closed loop.")] = 1024,
    output_len: Annotated[int, Option(help="New tokens in a closed loop.")] = 256,
    ttft_tokens: Annotated[str, Option(help="Prompt tokens of a request alone.")] = "128,1024,8192",
    repeats: Annotated[int, Option(help="Rounds over the configurations, A B C A B C.")] = 3,
    peers: Annotated[Path | None, Option(help="CSV of other engines' figures to show beside ours.")] = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the results. Default: out/bench-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the engine against the device: decode and verify steps, closed loops, time to the first token.

    specbatch bench --model qwen3-8b --load-format dummy

    specbatch bench --model toy --load-format dummy --batch 1,4 --sections decode --repeats 1

    specbatch bench --model qwen3-8b --load-format dummy --algorithm eagle3 --draft dummy --simulate-accept-length 2.4

    With --algorithm or --draft a baseline without drafts is compared with v1, v2 and v2+piecewise, which draft;
    section verify is left out.

    Exit status 1 if a point failed; the table says why. Default sizes too long for the model are left out, others are
    refused.
    """
    from specbatch.sweeps.bench.bench import run_bench
    from specbatch.sweeps.bench.peers import read_peers
    from specbatch.sweeps.bench.plan import LENGTHS, BenchOptions
    from specbatch.sweeps.bench.tables import load_records, table

    options = BenchOptions(
        sections=_names(sections),
        configs=None if configs is None else _names(configs),
        decode_graph=decode_graph,
        batch=_whole_numbers("batch", batch),
        verify_batch=_whole_numbers("verify_batch", verify_batch),
        decode_tokens=decode_tokens,
        new_tokens=_whole_numbers("new_tokens", new_tokens),
        concurrency=_whole_numbers("concurrency", concurrency),
        input_len=input_len,
        output_len=output_len,
        ttft_tokens=_whole_numbers("ttft_tokens", ttft_tokens),
        repeats=repeats,
        asked=frozenset(
            name for names in (*LENGTHS.values(), ("sections",)) for name in names if _given(context, name)
        ),
    )
    beside = read_peers(peers) if peers is not None else ""
    with fresh_folder(output, "bench") as folder, progress("bench") as report:
        text = run_bench(engine.config(compares=True), options, folder, peers=beside, log=say, report=report)
    rows = table(load_records(folder))
    show(f"{text}\nresults: {folder}", {"output": str(folder), "rows": rows}, as_json=as_json)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


@takes_engine()
def trace_steps(
    engine: EngineOptions,
    steps: Annotated[int, Option(help="Iterations to record.")] = 20,
    batch: Annotated[int, Option(help="Requests that decode together.")] = 1,
    input_len: Annotated[int, Option(help="Random prompt tokens of each.")] = 128,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the trace. Default: out/trace-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record some decode steps: a Chrome trace, kernels by time, and every line at which the host waited.

    specbatch trace --spec v2 --steps 20

    specbatch trace --model qwen3-8b --load-format dummy --decode-graph whole --batch 32

    Open trace.json in chrome://tracing or ui.perfetto.dev.
    """
    from specbatch.atomic_file import write_atomic
    from specbatch.engine.trace import text, trace
    from specbatch.sweeps.run.workloads import Workload

    for name, value in (("steps", steps), ("batch", batch), ("input_len", input_len)):
        at_least(name, value, 1)
    config = engine.config(concurrency=batch, prefix_cache=False)
    workload = Workload(input_len=input_len, prompts_per_concurrency=1, seed=engine.seed)
    with fresh_folder(output, "trace") as folder, open_engine(config) as running:
        result = trace(running, workload.prompts(running.tokenizer, batch), steps, folder / "trace.json")
        write_atomic(folder / "summary.md", text(result) + "\n")
        write_atomic(folder / "summary.json", json.dumps(result, indent=2) + "\n")
    show(f"{text(result)}\n\nresults: {folder}", {"output": str(folder), **result}, as_json=as_json)


def _summary_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of summary.csv as JSON values; None where nothing was measured."""
    from specbatch.sweeps.report.tables import as_json, load_records, table

    return as_json(table(load_records(folder)))


def _failed(folder: Path) -> bool:
    """Did a request of the sweep in `folder` fail?"""
    from specbatch.sweeps.report.tables import load_records

    return any(record.counters.get("errors") for record in load_records(folder))


def _engines(asked: EngineOptions, configs: str, **settings: Any) -> dict[str, EngineConfig]:
    """Those of `configs`: names, or a file whose settings count in place of the command's."""
    from specbatch.sweeps.run.grid import SUFFIXES, named, read_grid

    settings["compares"] = True
    if not configs.endswith(SUFFIXES):
        return named(replace(asked, spec="v2").config(**settings), _names(configs))
    return {name: asked.having(changes, name).config(**settings) for name, changes in read_grid(Path(configs)).items()}


def _given(context: typer.Context, name: str) -> bool:
    """Does an option's value come from the user?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _whole_numbers(setting: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise refuse(setting, text, "use whole numbers of at least 1, separated by commas: 1,8,32,128") from None
