"""`specbatch eval`: scores a task's answers with lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.configs import configured
from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, options_of, takes_engine
from specbatch.cli.output import fresh_folder, open_replicas, say, show
from specbatch.cli.values import whole_numbers
from specbatch.errors import refuse
from specbatch.evals.options import EvalOptions
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.evals.grid import GridOptions
    from specbatch.evals.report import EvalReport


_GRID = "Comparison"  # a box of --help
_ABLATION, _ON_CUDA = ("baseline", "v1", "v2"), ("baseline+piecewise", "v2+piecewise")
_PANELS = {name: option.panel for name, option in SAMPLING_OPTIONS.items() if option.panel}


@takes_engine(
    without=("simulate_accept_length", "simulate_accept"),
    settings=options_of(EvalOptions, panels=_PANELS),
    cluster=CLUSTER_OPTIONS,
)
def evaluate(
    *,
    task: Annotated[str, Argument(help="gsm8k, gsm8k_platinum, one_digit_sums, or another task or group of lm-eval.")],
    engine: EngineOptions,
    settings: dict[str, Any],
    fewshot_seed: Annotated[int, Option(help="Seed for drawing the examples; with 1234 they are lm-eval's.")] = 1234,
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
    repeats: Annotated[
        int,
        Option(
            help="With --configs: rounds over the configurations, interleaved: A B C C B A. Speedups have an interval "
            "from 2 on; use 3 or more, because that of 2 is 3.6 times as wide as that of 3.",
            rich_help_panel=_GRID,
        ),
    ] = 1,
    prompts_per_concurrency: Annotated[
        int | None,
        Option(
            help="With --configs: questions of a point, as a multiple of its concurrency, but at least 4; the first "
            "ones. Default: all questions at every concurrency.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    cluster: dict[str, Any],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "--out",
            help="New folder for the results, or that of an interrupted eval to continue. Default: out/eval-TIME.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Start an interrupted eval over instead of continuing it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a task with lm-eval, and report acceptance and speed next to the score.

    specbatch eval gsm8k --limit 100 --spec v2

    specbatch eval gsm8k --configs baseline,v1,v2 --concurrency 1,8,32,128 --algorithm eagle3 --draft HEAD

    specbatch eval gsm8k --data my_questions.jsonl

    specbatch eval one_digit_sums --limit 40

    gsm8k, gsm8k_platinum, one_digit_sums and one_digit_choices need no network. Results for each question go to the
    output folder. Text inside <think> is not scored. To continue an interrupted evaluation, run the same command with
    its folder as --out: only the missing answers are generated.

    Details:

    specbatch eval gsm8k --configs grid.toml --concurrency 1,8,32,128 --out out/grid

    specbatch eval gsm8k --temperature 0.6 --top-p 0.95 --seed 3

    Answers are sampled as the task says (most tasks are greedy), or with --temperature, --top-p, --top-k and --min-p;
    --seed chooses the random numbers.

    With --configs every configuration answers all questions at every concurrency (--prompts-per-concurrency: the first
    ones, as many for each concurrent request), and one table shows accuracy beside
    accept length, TTFT, TPOT, throughput and speedup, with the paired difference of accuracy from the configuration
    without speculation. The same command with the folder as --out runs the points that are missing or have failed.

    Tasks of type multiple_choice, loglikelihood and loglikelihood_rolling (arc_easy, lambada_openai, wikitext) compare
    the log-likelihoods of given texts. The target computes them without drafts, so --algorithm and --configs do not
    apply.
    """
    from specbatch.evals.finished import PARTIAL
    from specbatch.evals.grid import GridOptions
    from specbatch.evals.run import prepare
    from specbatch.records.store import RECORD
    from specbatch.records.sweep_plan import PLAN

    steps = None if concurrency is None else whole_numbers("concurrency", concurrency)
    is_grid = ablation or configs is not None
    if is_grid:
        _check_grid(engine, configs, ablation, cluster["distributed"])
    elif prompts_per_concurrency is not None:
        raise refuse("prompts_per_concurrency", prompts_per_concurrency, "goes with --configs; use --limit")
    elif repeats != 1:
        raise refuse("repeats", repeats, "goes with --configs; leave it out")
    elif steps is not None and len(steps) > 1:
        raise refuse("concurrency", concurrency, "one number, or several with --configs")
    names = (PLAN,) if is_grid else (PARTIAL, RECORD)
    resumes = "*" if output is not None and any((output / name).exists() for name in names) else None
    settings |= {"seed": fewshot_seed, "overwrite": overwrite}
    if is_grid:
        found, steps, left_out = _grid(engine, configs, steps)
        with fresh_folder(output, "eval", resumes=resumes) as folder:
            options = EvalOptions(task, output=folder, **settings)
            points = GridOptions(options, steps, repeats, prompts_per_concurrency)
            _compare(found, left_out, points, folder, as_json)
        return
    engine, workers = clustered(engine, cluster)
    most = None if steps is None else steps[0]
    config = engine.config(concurrency=most, elsewhere=workers is not None)
    with fresh_folder(output, "eval", resumes=resumes) as folder:
        ready = prepare(EvalOptions(task, output=folder, concurrency=most, **settings))
        if engine.decode_graph == "whole" and not ready.task.generates:
            raise refuse(
                "decode_graph",
                "whole",
                f"task {task} ({ready.task.kind}) scores given texts and decodes nothing; leave it out",
            )
        config = ready.engine_config(config)
        ready.check_lengths(config)
        if (result := ready.complete(config)) is not None:
            say(f"{folder} is complete: an earlier run has finished this evaluation")
            _show(result, folder, as_json)
            return
        kept = ready.finished(config)
        say(f"data: {ready.task.data_source}")
        if ready.task.warning:
            say(f"warning: {ready.task.warning}")
        if kept is not None and kept.rows:
            say(f"continuing: {len(kept.rows)} {'answers' if ready.task.generates else 'texts'} are finished")
        done = 0 if kept is None else len(kept.rows)
        with open_replicas(config, workers) as running, progress(f"eval {task}", "requests", done) as report:
            running.on_prefill = report.prefilled
            result = ready.run(running, report, kept)
    _show(result, folder, as_json)


def _show(result: EvalReport, folder: Path, as_json: bool) -> None:
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json, kept=str(folder))


def _check_grid(engine: EngineOptions, configs: str | None, ablation: bool, distributed: str | None) -> None:
    option = "--configs" if configs is not None else "--ablation"
    if ablation and configs is not None:
        raise refuse("configs", configs, "--ablation is short for one; leave one of them out")
    if engine.spec is not None:
        raise refuse("spec", engine.spec, f"{option} runs several; leave it out")
    if distributed is not None:
        raise refuse("distributed", distributed, f"{option} runs on one machine; leave one of them out")


def _grid(
    engine: EngineOptions, configs: str | None, steps: tuple[int, ...] | None
) -> tuple[dict[str, EngineConfig], tuple[int, ...], dict[str, str]]:
    """The configurations, the concurrencies (default: what the engine runs at once), and why --ablation leaves some
    configurations out."""
    from specbatch.runtime.device import find_device
    from specbatch.sweeps.run.grid import by_model

    left_out: dict[str, str] = {}
    if configs is None:
        configs = ",".join(_ABLATION)
        if find_device(engine.device).type == "cuda":
            configs = ",".join((*_ABLATION, *_ON_CUDA))
        else:
            left_out = dict.fromkeys(_ON_CUDA, "piecewise prefill graphs need a CUDA device")
    found = configured(engine, configs, concurrency=None if steps is None else max(steps))
    if len(models := by_model(found)) > 1:
        works = f"has several models ({', '.join(models)}); evaluate each by itself, with --model"
        raise refuse("configs", configs, works)
    if steps is None:
        steps = (min(config.max_running * config.data_parallel for config in found.values()),)
    for name, config in found.items():
        if config.max_running * config.data_parallel < max(steps):
            raise refuse("max_running", config.max_running, f"{name} runs at concurrency {max(steps)}; use that")
    return found, steps, left_out


def _compare(
    configs: dict[str, EngineConfig],
    left_out: dict[str, str],
    options: GridOptions,
    folder: Path,
    as_json: bool,
) -> None:
    from specbatch.evals.grid import run_grid
    from specbatch.sweeps.run.loading import check_early, loaded

    failed = dict(left_out)
    check_early(configs, failed, say)
    with progress(f"eval {options.task.task}", "requests") as report:
        found = run_grid(
            configs,
            lambda group: loaded(group, say, None, failed),
            options,
            folder,
            failed=failed,
            log=say,
            progress=report,
        )
    show(
        f"{found.table()}\n\nresults: {folder}",
        {**found.as_dict(), "output": str(folder)},
        as_json=as_json,
        kept=str(folder),
    )
    if failed.keys() - left_out.keys():
        raise typer.Exit(1)
