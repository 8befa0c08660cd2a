"""`specbatch sweep`: compares configurations at several concurrencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.cli.values import is_given, length, names, whole_number, whole_numbers
from specbatch.config import EngineConfig
from specbatch.errors import refuse
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.sweeps.run.http_engine import HttpEngine

_OF_BOTH = ("model", "tokenizer", "seed")  # options of the engine that mean something for a server, too
_OF_SERVERS = ("base_url", "send", "api_key_env")


@takes_engine(without=("spec",))
def sweep(
    context: typer.Context,
    engine: EngineOptions,
    concurrency: Annotated[str, Option(help="Comma-separated numbers of requests kept unfinished.")] = "1,8,32,128",
    configs: Annotated[
        str, Option(help="Some of baseline, v1, v2, v2+piecewise; or a TOML or YAML file of configurations.")
    ] = "baseline,v1,v2",
    dataset: Annotated[
        str | None,
        Option(
            help="random, gsp, gsm8k, lm-eval:TASK (what that task asks) or FILE.jsonl (lines as for generate, or "
            "turns as in MT-Bench, of which the first is asked: later ones would need the answers before "
            "them). Default: gsm8k; with --input-len random."
        ),
    ] = None,
    data: Annotated[Path | None, Option(help="Other questions for --dataset gsm8k and lm-eval:gsm8k.")] = None,
    input_len: Annotated[
        str, Option(metavar="N|N-M", help="Tokens per random prompt, or fewest and most; with gsp its question.")
    ] = "128",
    output_len: Annotated[
        str | None,
        Option(
            metavar="N|N-M",
            help="Tokens per answer, or fewest and most; for text only the most. Default: 128; 64 on a CPU.",
        ),
    ] = None,
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
        int | None,
        Option(help="A point runs this many times its concurrency (4 at least). Default: 4; 1 on a CPU."),
    ] = None,
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

    specbatch sweep --concurrency 1,4

    specbatch sweep --output-len 256 --repeats 3

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
    from specbatch.engine.builder import find_device
    from specbatch.evals.prompts import task_prompts
    from specbatch.records.sweep_plan import PLAN
    from specbatch.sweeps.run.defaults import CPU, GPU, default_dataset, resolved
    from specbatch.sweeps.run.grid import by_model
    from specbatch.sweeps.run.process import run_in_process
    from specbatch.sweeps.run.runner import SweepOptions, check, fitted, run_server, run_sweep
    from specbatch.sweeps.run.workloads import Workload

    steps = whole_numbers("concurrency", concurrency)
    on_cpu = engine_kind == "specbatch" and find_device(engine.device).type == "cpu"
    lengths = CPU if on_cpu else GPU
    workload = Workload(
        dataset or default_dataset(input_len_given=is_given(context, "input_len")),
        data,
        length("input_len", input_len),
        lengths.output_len if output_len is None else length("output_len", output_len),
        lengths.prompts_per_concurrency if prompts_per_concurrency is None else prompts_per_concurrency,
        engine.seed,
        groups=groups,
        group_prompts=group_prompts,
        shared_len=length("shared_len", shared_len),
        request_rate=request_rate,
        burst=0 if burst == "all" else whole_number("burst", burst, "all"),
        chat_template=chat_template,
        thinking=thinking,
        read_task=task_prompts,
    )
    options = SweepOptions(steps, repeats, workload)
    server = _server(engine, context.params, lambda name: is_given(context, name))
    engines = {}
    if server is None:
        engines = _engines(engine, configs, concurrency=max(steps), prefix_cache=workload.is_grouped)
    if dry_run and server is not None:
        raise refuse("dry_run", True, "how fast a server is nobody knows beforehand; leave it out")
    settings = resolved(
        options,
        engines if server is None else [server.model],
        shortened=on_cpu and None in (output_len, prompts_per_concurrency),
    )
    if dry_run:
        from specbatch.sweeps.run.estimate import dry_run as planned

        text = planned(engines, options, output)
        say(settings)
        show(text, {"configurations": list(engines)}, as_json=as_json)
        return
    resumes = "*" if output is not None and (any(output.glob(PLAN)) or any(output.glob(f"*/{PLAN}"))) else None
    with fresh_folder(output, "sweep", resumes=resumes) as folder:
        fitted(engines, options)  # refused before the settings are printed
        say(settings)
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
                say(f"{name}:")
                if status := run_in_process(ours, options, folder / name, log=say):
                    raise typer.Exit(2 if status == 2 else 1)
                summary += f"## {name}\n\n{(folder / name / 'summary.md').read_text(encoding='utf-8')}\n"
                rows += [{"model": name, **row} for row in _summary_rows(folder / name)]
    show(f"{summary}\nresults: {folder}", {"output": str(folder), "rows": rows}, as_json=as_json)
    if server is not None and _failed(folder):
        raise typer.Exit(1)


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
    from specbatch.jobs.configurations import named
    from specbatch.sweeps.run.grid import SUFFIXES, read_grid

    settings["compares"] = True
    if not configs.endswith(SUFFIXES):
        return named(asked.having(spec="v2").config(**settings), names(configs))
    return {name: asked.updated(changes, name).config(**settings) for name, changes in read_grid(Path(configs)).items()}


def _server(engine: EngineOptions, values: Mapping[str, Any], given: Callable[[str], bool]) -> HttpEngine | None:
    """The server of --engine http; None for our own engine. `values`: of the command's options; `given`: does the user
    say so? Refused: options of the other kind of engine."""
    kind = values["engine_kind"]
    if kind not in ("specbatch", "http"):
        raise refuse("engine", kind, "use specbatch, or http with --base-url")
    if kind == "specbatch":
        for name in filter(given, _OF_SERVERS):
            raise refuse(name, values[name], "is of servers; add --engine http")
        return None
    from specbatch.sweeps.run.http_engine import HttpEngine, Server

    for name in filter(given, ("configs", *ENGINE_OPTIONS)):
        if name not in _OF_BOTH:
            works = "is a setting of our engine; the server has its own, so start it with what you want"
            raise refuse(name, values[name], works)
    model = engine.model if given("model") else None
    key = values["api_key_env"]
    return HttpEngine(Server(values["base_url"] or "", model, engine.tokenizer, values["send"], key), log=say)
