"""`specbatch eval`: scores a task's answers with lm-eval, those of this engine or of a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.eval_grid import check_grid, compare, grid_asked, grids_in_modes, show_grids
from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, is_given, options_of, takes_engine
from specbatch.cli.output import fresh_folder, open_replicas, say, show
from specbatch.cli.servers import SERVER_PANEL, kind_option, only_server
from specbatch.cli.thinking import CompareThinking, check_compared
from specbatch.config.engine_config import EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.config.values import whole_numbers
from specbatch.errors import refuse
from specbatch.evals.options import EvalOptions, GridOptions
from specbatch.progress.bars import progress
from specbatch.servers.server import CONCURRENCY, Server

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.evals.report import EvalReport
    from specbatch.evals.run import PreparedEval
    from specbatch.evals.several import SeveralReports
    from specbatch.evals.thinking import ThinkingGrids, ThinkingReports
    from specbatch.replicas.cluster import Cluster
    from specbatch.servers.engine import HttpEngine


_GRID = "Comparison"  # a box of --help
_PANELS = {name: option.panel for name, option in SAMPLING_OPTIONS.items() if option.panel}


@takes_engine(
    without=("simulate_accept_length", "simulate_accept"),
    settings=options_of(EvalOptions, panels=_PANELS),
    comparison=options_of(GridOptions, _GRID),
    cluster=CLUSTER_OPTIONS,
    of_server=options_of(Server, SERVER_PANEL, defaults={"send": "chat with --chat-template, else text"}),
)
def evaluate(
    context: typer.Context,
    *,
    tasks: Annotated[
        list[str],
        Argument(
            metavar="TASK",
            help="gsm8k, gsm8k_platinum, one_digit_sums, or other tasks and groups of lm-eval, or FILE.yaml; several "
            "share the model.",
        ),
    ],
    engine: EngineOptions,
    settings: dict[str, Any],
    include_path: Annotated[
        list[Path] | None,
        Option(
            metavar="DIR", help="Folder with your own tasks (YAML files, of which no Python is run). Several times."
        ),
    ] = None,
    fewshot_seed: Annotated[int, Option(help="Seed for drawing the examples; 1234 is lm-eval's default.")] = 1234,
    configs: Annotated[
        str | None,
        Option(
            help="Compare configurations: some of baseline, v1, v2, each also with +piecewise; or a TOML or YAML file "
            "that defines them, as for sweep.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    ablation: Annotated[
        bool,
        Option(
            "--ablation",
            help="Short for --configs baseline,v1,v2, on a CUDA device with baseline+piecewise and v2+piecewise.",
            rich_help_panel=_GRID,
        ),
    ] = False,
    concurrency: Annotated[
        str | None,
        Option(
            metavar="N|N,N,...",
            help="Maximum number of requests in flight; also sets --max-running. With --configs several, separated by "
            "commas.",
        ),
    ] = None,
    comparison: dict[str, Any],
    cluster: dict[str, Any],
    engine_kind: Annotated[str, kind_option("evaluate")] = "specbatch",
    of_server: dict[str, Any],
    compare_thinking: CompareThinking = False,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "--out",
            help="New folder for the results, or that of an interrupted eval to continue. Default: out/eval-TIME.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate tasks with lm-eval, and report acceptance and speed next to the score.

    specbatch eval gsm8k --limit 100 --spec v2

    specbatch eval gsm8k --configs baseline,v1,v2 --concurrency 1,8,32,128 --algorithm eagle3 --draft HEAD

    specbatch eval gsm8k --engine http --base-url http://localhost:8000

    gsm8k, gsm8k_platinum, one_digit_sums and one_digit_choices need no network. Text inside <think> is not scored. To
    continue an interrupted evaluation, run the same command with its folder as --out.

    Details:

    specbatch eval one_digit_sums one_digit_choices --limit 40

    specbatch eval gsm8k --configs grid.toml --concurrency 1,8,32,128 --out out/grid

    specbatch eval gsm8k --temperature 0.6 --top-p 0.95 --seed 3

    specbatch eval gsm8k --data my_questions.jsonl

    specbatch eval my_task --include-path my_tasks

    Answers are sampled as the task says (most tasks are greedy), or with --temperature, --top-p, --top-k and --min-p;
    --seed chooses the random numbers.

    With --configs every configuration answers all questions at every concurrency (--prompts-per-concurrency: the first
    ones, as many for each concurrent request), and one table shows accuracy beside accept length, TTFT, TPOT,
    throughput and speedup, with the paired difference of accuracy from the configuration without speculation. The same
    command with the folder as --out runs the points that are missing or have failed. A table with engine = "http" and
    base-url = "http://localhost:8000" is a server of another engine, asked in the same rounds (docs/any-engine.md).
    Several tasks have a folder and a table each. Different models (model = ..., or --model A,B) run one after the
    other, each in its own process and folder. With --distributed the workers of a Ray cluster measure whole rounds.

    Tasks that compare log-likelihoods of given texts (arc_easy, lambada_openai, wikitext) are computed by the target
    without drafts, so --algorithm and --configs do not apply.

    With --engine http a server of OpenAI's API answers (docs/any-engine.md). Of the options below only --model,
    --tokenizer and --seed apply. Requests that fail are asked again; if some stay without an answer the exit status is
    1, and the same command with the folder as --out asks for these.
    """
    from specbatch.evals.several import has_results
    from specbatch.evals.thinking import ThinkingReports, in_modes
    from specbatch.records.sweep_plan import PLAN
    from specbatch.sweeps.report.parts import folders_of
    from specbatch.sweeps.run.configurations import by_model
    from specbatch.sweeps.run.loading import one_group, refuse_servers

    steps = None if concurrency is None else whole_numbers("concurrency", concurrency)
    if of_server["send"] == "chat":
        settings["chat_template"] = True

    def connected(send: str, mode: bool | None = None, **how: Any) -> HttpEngine | None:
        own, given = {**of_server, "send": send}, partial(is_given, context)
        values = context.params if mode is None else context.params | {"thinking": mode}
        return only_server(engine, own, values, given, seed=engine.seed, prefix_cache=True, **how)

    is_server = connected(of_server["send"] or "text", tokenizer=False, log=None) is not None  # before tasks are read
    if is_server and cluster["distributed"] is not None:
        raise refuse("distributed", cluster["distributed"], "does not apply to a server; leave it out")
    if is_server and ablation:
        raise refuse("ablation", True, "does not apply to a server, which has its own engine settings; leave it out")
    is_grid = ablation or configs is not None
    if is_grid:
        check_grid(engine, configs, ablation)
    elif comparison["prompts_per_concurrency"] is not None:
        works = "goes with --configs; use --limit"
        raise refuse("prompts_per_concurrency", comparison["prompts_per_concurrency"], works)
    elif comparison["repeats"] != 1:
        raise refuse("repeats", comparison["repeats"], "goes with --configs; leave it out")
    elif steps is not None and len(steps) > 1:
        raise refuse("concurrency", concurrency, "one number, or several with --configs")
    settings["include_path"] = tuple(include_path or ())
    options = EvalOptions(",".join(tasks), seed=fewshot_seed, **settings)
    if is_grid:
        engine, workers = clustered(engine, cluster, replicas=False)
        found, steps, left_out = grid_asked(engine, configs, steps, settings["thinking"], elsewhere=workers is not None)
        points, models = GridOptions(options, steps, **comparison), by_model(found)
        if compare_thinking:
            check_compared(options.thinking, models, [one for one in found.values() if isinstance(one, Server)])
        if workers is not None:
            refuse_servers(found)
            one_group(found)
        plans = "*/" * (len(models) > 1 or compare_thinking) + "*/" * (len(options.names) > 1) + PLAN
        resumes = "*" if output is not None and any(output.glob(plans)) else None
        with fresh_folder(output, "eval", resumes=resumes) as folder:
            if compare_thinking:
                both_grids = grids_in_modes(models, left_out, points, folder, workers)
                _show(both_grids, folder, as_json)
                raise typer.Exit(int(any(grid.left_out.keys() - left_out.keys() for grid in both_grids.all)))
            grids, statuses = compare(models, left_out, points, folder, workers)
        show_grids(grids, folder, as_json)
        if statuses or any(grid.left_out.keys() - left_out.keys() for own in grids.values() for grid in own.values()):
            raise typer.Exit(1)
        return
    most = None if steps is None else steps[0]
    if is_server:
        own = replace(options, concurrency=CONCURRENCY if steps is None else steps[0])
        open_server = cast("Callable[..., HttpEngine]", connected)
        evaluated = partial(_evaluate_server, given=of_server["send"], connected=open_server)
    else:
        engine, workers = clustered(engine, cluster)
        own = replace(options, concurrency=most)
        config = engine.config(concurrency=most, elsewhere=workers is not None)
        evaluated = partial(_evaluate, engine=engine, config=config, workers=workers)
    if compare_thinking:
        check_compared(options.thinking, [], [])
        known = output is not None and any(has_results(path, own.names) for path in folders_of(output).values())
        with fresh_folder(output, "eval", resumes="*" if known else None) as folder:
            both = ThinkingReports({mode: evaluated(asked) for mode, asked in in_modes(own, folder).items()})
            both.save(folder)
        _show(both, folder, as_json)
        return
    resumes = "*" if output is not None and has_results(output, options.names) else None
    with fresh_folder(output, "eval", resumes=resumes) as folder:
        result = evaluated(replace(own, output=folder))
    _show(result, folder, as_json)


def _evaluate(
    options: EvalOptions, engine: EngineOptions, config: EngineConfig, workers: Cluster | None
) -> EvalReport | SeveralReports:
    """Answer with this engine what is not finished in the output folder."""
    from specbatch.evals.several import prepare_several
    from specbatch.sweeps.run.unloaded import Unloaded

    every = prepare_several(options)
    if engine.decode_graph == "whole" and not any(ready.task.generates for ready in every.values()):
        named = "; ".join(f"task {name} ({ready.task.kind})" for name, ready in every.items())
        raise refuse("decode_graph", "whole", f"{named} scores given texts and decodes nothing; leave it out")
    for ready in every.values():
        config = ready.engine_config(config)

    def opened(left: dict[str, PreparedEval]) -> AbstractContextManager[InferenceEngine]:
        if workers is None and (len(left) > 1 or config.max_model_len):  # else a task checks its questions as it begins
            engine = Unloaded(config)
            for ready in left.values():
                ready.check_lengths(engine)
        counts = [ready.requests for ready in left.values()]  # the tasks run one after the other
        job = JobSize(None if None in counts else max(filter(None, counts)))
        return open_replicas(replace(config, job=job), workers)

    return _answered(options, every, config, opened)


def _evaluate_server(
    options: EvalOptions, given: str | None, connected: Callable[..., HttpEngine]
) -> EvalReport | SeveralReports:
    """Have a server answer what is not finished in the output folder. given: how prompts are sent; connected: a client
    that sends them so."""
    from specbatch.evals.run import asked_of
    from specbatch.evals.server_lm import needs_tokenizer
    from specbatch.evals.several import prepare_several

    every = prepare_several(options)
    scores_texts = any(ready.task.scores_texts for ready in every.values())
    send = given or ("text" if not options.chat_template else "ids" if scores_texts else "chat")
    server = connected(send, options.thinking, tokenizer=needs_tokenizer(send, options, scores_texts=scores_texts))

    def checked(left: dict[str, PreparedEval]) -> AbstractContextManager[HttpEngine]:
        for ready in left.values():
            ready.check(server)
        return nullcontext(server)

    return _answered(options, every, asked_of(server), checked)


def _answered(
    options: EvalOptions,
    every: dict[str, PreparedEval],
    config: EngineConfig | Server,
    opened: Callable[[dict[str, PreparedEval]], AbstractContextManager[Any]],
) -> EvalReport | SeveralReports:
    """The reports of tasks, of which those that are not finished run. opened: the engine for them."""
    from specbatch.evals.lm_eval_files import gather_lm_eval_files
    from specbatch.evals.several import SeveralReports, folders_of

    assert options.output is not None
    reports = {}
    for name, ready in every.items():
        if (found := ready.complete(config)) is not None:
            reports[name] = found
            say(f"{ready.options.output} is complete: an earlier run has finished this evaluation")
    left = {name: ready for name, ready in every.items() if name not in reports}
    earlier = {name: ready.finished(config) for name, ready in left.items()}  # refuses other settings
    several = len(every) > 1
    for name, ready in left.items():
        of = f"{name}: " if several else ""
        say(f"{of}data: {ready.task.data_source}")
        if ready.task.warning:
            say(f"{of}warning: {ready.task.warning}")
        for note in ready.notes():
            say(f"{of}note: {note}")
    if left:
        with folders_of(every.values()), opened(left) as running:
            for name, ready in left.items():
                of, kept = f"{name}: " if several else "", earlier[name]
                done = 0 if kept is None else len(kept.rows)
                if done:
                    say(f"{of}continuing: {done} {'answers' if ready.task.generates else 'texts'} are finished")
                with progress(f"eval {name}", "requests", done) as report:
                    if isinstance(config, EngineConfig):
                        running.on_prefill = report.prefilled
                        running.forget_prefixes()
                    reports[name] = ready.run(running, report, kept, say)
    if not several:
        return next(iter(reports.values()))
    result = SeveralReports({name: reports[name] for name in every})
    result.save(options.output)
    gather_lm_eval_files(options.output, [ready.options.output for ready in every.values() if ready.options.output])
    return result


def _show(result: EvalReport | SeveralReports | ThinkingReports | ThinkingGrids, folder: Path, as_json: bool) -> None:
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json, kept=str(folder))
