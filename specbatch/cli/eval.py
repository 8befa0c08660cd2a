"""`specbatch eval`: scores a task's answers with lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from specbatch.cli.cluster import CLUSTER_OPTIONS, clustered
from specbatch.cli.options import SAMPLING_OPTIONS, Concurrency, EngineOptions, Json, options_of, takes_engine
from specbatch.cli.output import fresh_folder, open_replicas, say, show
from specbatch.errors import refuse
from specbatch.evals.options import EvalOptions
from specbatch.extras import needs
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.config import EngineConfig


_PANELS = {name: option.panel for name, option in SAMPLING_OPTIONS.items() if option.panel}


@takes_engine(
    without=("simulate_accept_length", "simulate_accept"),
    settings=options_of(EvalOptions, panels=_PANELS),
    cluster=CLUSTER_OPTIONS,
)
def evaluate(
    *,
    task: Annotated[str, Argument(help="gsm8k, gsm8k_platinum, one_digit_sums or another lm-eval task.")],
    engine: EngineOptions,
    settings: dict[str, Any],
    fewshot_seed: Annotated[int, Option(help="Seed for drawing the examples; 1234 is lm-eval's default.")] = 1234,
    ablation: Annotated[
        bool, Option("--ablation", help="Compare baseline, v1, v2 and v2+piecewise in one run.")
    ] = False,
    concurrency: Concurrency = None,
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

    specbatch eval gsm8k --ablation --algorithm eagle3 --draft HEAD

    specbatch eval gsm8k --data my_questions.jsonl

    specbatch eval one_digit_sums --limit 40

    specbatch eval gsm8k --temperature 0.6 --top-p 0.95 --seed 3

    gsm8k, gsm8k_platinum, one_digit_sums and one_digit_choices need no network. Results for each question go to the
    output folder. Text inside <think> is not scored. To continue an interrupted evaluation, run the same command with
    its folder as --out: only the missing answers are generated.

    Answers are sampled as the task says (most tasks are greedy), or with --temperature, --top-p, --top-k and --min-p;
    --seed chooses the random numbers.

    Tasks of type multiple_choice, loglikelihood and loglikelihood_rolling (arc_easy, lambada_openai, wikitext) compare
    the log-likelihoods of given texts. The target computes them without drafts, so --algorithm and --ablation do not
    apply.
    """
    needs("eval")
    from specbatch.evals.ablation import STARTED
    from specbatch.evals.finished import PARTIAL
    from specbatch.evals.run import prepare

    if ablation and engine.spec is not None:
        raise refuse("spec", engine.spec, "--ablation runs every schedule; leave it out")
    if ablation and cluster["distributed"] is not None:
        raise refuse("distributed", cluster["distributed"], "--ablation runs on one machine; leave one of them out")
    engine, workers = clustered(engine.having(spec="v2") if ablation else engine, cluster)
    config = engine.config(concurrency=concurrency, compares=ablation, elsewhere=workers is not None)
    partial = STARTED if ablation else PARTIAL
    resumes = "*" if output is not None and (output / partial).exists() else None
    with fresh_folder(output, "eval", resumes=resumes) as folder:
        settings |= {"concurrency": concurrency, "seed": fewshot_seed, "overwrite": overwrite}
        options = EvalOptions(task, output=folder, **settings)
        if ablation:
            _compare(config, options, folder, as_json)
            return
        ready = prepare(options)
        if engine.decode_graph == "whole" and not ready.task.generates:
            raise refuse(
                "decode_graph",
                "whole",
                f"task {task} ({ready.task.kind}) scores given texts and decodes nothing; leave it out",
            )
        config = ready.engine_config(config)
        kept = ready.finished(config)
        say(f"data: {ready.task.data_source}")
        if kept is not None and kept.rows:
            say(f"continuing: {len(kept.rows)} {'answers' if ready.task.generates else 'texts'} are finished")
        done = 0 if kept is None else len(kept.rows)
        with open_replicas(config, workers) as running, progress(f"eval {task}", done) as report:
            result = ready.run(running, report, kept)
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json)


def _compare(config: EngineConfig, options: EvalOptions, folder: Path, as_json: bool) -> None:
    from specbatch.evals.ablation import configurations, run_ablation
    from specbatch.runtime.device import find_device

    configs, left_out = configurations(config, find_device(config.device).type == "cuda")
    with progress(f"eval {options.task}") as report:
        found = run_ablation(configs, options, folder, left_out=left_out, log=say, progress=report)
    show(f"{found.table()}\n\nresults: {folder}", {**found.as_dict(), "output": str(folder)}, as_json=as_json)
