"""The `specbatch` command. Each command parses, calls one function, prints.

Nothing heavy is imported before a command runs, so that `specbatch --help` answers at once. A user's mistake
is one line on standard error and exit status 2; Ctrl-C says what was kept and exits with 130.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from specbatch import SpecbatchError, __version__
from specbatch.cli import judge, measure, train
from specbatch.cli.check import check
from specbatch.cli.generate import generate
from specbatch.cli.options import Concurrency, EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, rows_table, say, show
from specbatch.cli.report import report as report_command
from specbatch.errors import refuse
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.evals.run import EvalOptions


class Commands(TyperGroup):
    """Turns what a command raises into a line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecbatchError as error:
            say(f"error: {error}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            say("; ".join(["interrupted", *map(str, stop.args)]))
            raise typer.Exit(130) from stop


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
models = typer.Typer(no_args_is_help=True, help="Bundled models: list them, fetch one.")
app.add_typer(models, name="models")


@app.callback(invoke_without_command=True)
def specbatch(
    version: Annotated[bool, Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Offline batch inference and evaluation for speculative decoding.

    Does it still answer correctly?  specbatch eval one_digit_sums --spec v2

    What do v1 and v2 give me?       specbatch sweep --concurrency 1,8,32,128

    Tables, pictures and one page?   specbatch report out/sweep-20260102-030405

    Are the tokens plain decoding's? specbatch check --spec v2

    What changed, if anything?       specbatch compare out/before out/after

    May this change ship?            specbatch gate out/eval --policy gate.toml --baseline results/eval

    Run these prompts.               specbatch generate in.jsonl -o out.jsonl

    How fast is it on this device?   specbatch bench --model qwen3-8b --load-format dummy

    Make a draft for my model.       specbatch train-draft --algorithm eagle3 --data in.jsonl --out draft

    What runs on this machine?       specbatch doctor
    """
    if version:
        print(f"specbatch {__version__}")
        raise typer.Exit


@app.command("eval")
@takes_engine()
def evaluate(
    task: Annotated[str, Argument(help="one_digit_sums, gsm8k, gsm8k_platinum or another lm-eval task.")],
    engine: EngineOptions,
    limit: Annotated[int | None, Option(help="Only the first N questions.")] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Worked examples before each question. Default: the task's.")
    ] = None,
    data: Annotated[Path | None, Option(help="JSONL of question and answer to be scored.")] = None,
    fewshot_data: Annotated[Path | None, Option(help="JSONL to take the worked examples from.")] = None,
    fewshot_seed: Annotated[int, Option(help="Of the choice of examples; 1234 is lm-eval's own.")] = 1234,
    chat_template: Annotated[bool, Option("--chat-template/--no-chat-template", help="Ask as a chat message.")] = False,
    thinking: Annotated[
        bool | None, Option("--thinking/--no-thinking", help="The chat template's enable_thinking. Default: its own.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option(help="Longest answer. Default: the task's, else 512.")] = None,
    ladder: Annotated[
        bool, Option("--ladder", help="The same with nothing drafted, in v1, v2 and v2+piecewise, side by side.")
    ] = False,
    concurrency: Concurrency = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the results. Default: out/eval-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, score them with lm-eval, and show acceptance and speed beside the score.

    specbatch eval one_digit_sums --limit 40

    specbatch eval gsm8k --data gsm8k_test.jsonl --limit 100 --spec v2

    specbatch eval gsm8k --data gsm8k_test.jsonl --ladder --algorithm eagle3 --draft HEAD

    specbatch eval one_digit_choices

    one_digit_sums and one_digit_choices need no network. Per-question results go to the output folder. What a model
    writes inside <think> is not scored.

    Tasks of type multiple_choice, loglikelihood and loglikelihood_rolling (arc_easy, lambada_openai, wikitext) ask how
    likely given texts are. The model says so alone, without drafts: --algorithm and --ladder are refused for them.
    """
    from specbatch.evals.run import PARTIAL, EvalOptions, prepare

    if ladder and engine.spec is not None:
        raise refuse("spec", engine.spec, "--ladder runs all of them; leave it out")
    config = (replace(engine, spec="v2") if ladder else engine).config(concurrency=concurrency, compares=ladder)
    with fresh_folder(output, "eval") as folder:
        options = EvalOptions(
            task=task,
            limit=limit,
            num_fewshot=num_fewshot,
            data=data,
            fewshot_data=fewshot_data,
            chat_template=chat_template,
            thinking=thinking,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            seed=fewshot_seed,
            output=folder,
        )
        if ladder:
            _climb(config, options, folder, as_json)
            return
        ready = prepare(options)
        if engine.decode_graph == "whole" and not ready.task.generates:
            raise refuse("decode_graph", "whole", f"task {task} ({ready.task.kind}) decodes nothing; leave it out")
        with open_engine(ready.engine_config(config)) as running, progress(f"eval {task}") as report:
            try:
                result = ready.run(running, report)
            except KeyboardInterrupt:
                partial = folder / PARTIAL
                kept = partial.read_text().count("\n") if partial.exists() else 0
                if not kept:
                    partial.unlink(missing_ok=True)
                    raise
                raise KeyboardInterrupt(f"kept {kept} finished answers in {partial}") from None
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json)


def _climb(config: EngineConfig, options: EvalOptions, folder: Path, as_json: bool) -> None:
    from specbatch.engine.builder import find_device
    from specbatch.evals.ablation import run_ladder, rungs

    configs, left_out = rungs(config, find_device(config.device).type == "cuda")
    with progress(f"eval {options.task}") as report:
        found = run_ladder(configs, options, folder, left_out=left_out, log=say, progress=report)
    show(f"{found.table()}\n\nresults: {folder}", {**found.as_dict(), "output": str(folder)}, as_json=as_json)


app.command()(check)
app.command()(measure.sweep)
app.command("report")(report_command)
app.command()(measure.bench)
app.command("trace")(measure.trace_steps)
app.command()(judge.compare)
app.command()(judge.gate)
app.command("train-draft")(train.train_draft)
app.command()(generate)


@app.command("send-one")
@takes_engine()
def send_one(
    engine: EngineOptions,
    prompt: Annotated[str | None, Option(help="Your own prompt. Default: a fixed piece of code.")] = None,
    max_new_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    stream: Annotated[bool, Option("--stream", help="Print the text as it arrives.")] = False,
    as_json: Json = False,
) -> None:
    """Send one prompt, greedy, and show its latency, acceptance and speed.

    specbatch send-one

    specbatch send-one --spec v2 --prompt "def fibonacci(n):" --stream
    """
    from specbatch.core.request import SamplingParams
    from specbatch.jobs.send_one import PROMPT, table
    from specbatch.jobs.send_one import send_one as send

    if prompt == "":
        raise refuse("prompt", prompt, "is empty; write at least one token of text")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    config = engine.config(concurrency=1, prefix_cache=False)
    with open_engine(config) as running:
        result = send(running, prompt or PROMPT, params, write=_write_through if stream else None)
    if stream and as_json:
        print()  # the JSON is a line of its own
    show(f"{'' if stream else result['text']}\n\n{table(result)}", result, as_json=as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show the environment, the devices, and what runs here and what does not, with reasons."""
    from specbatch.cli.doctor import examine, report

    found = examine()
    show(report(found), found, as_json=as_json)


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """Show the bundled models: where each comes from, its size, licence and whether it is here already."""
    from specbatch.weights import bundled

    rows = bundled.rows()
    show(rows_table(rows, without="sha256"), {"models": rows}, as_json=as_json)


@models.command("pull")
def pull_model(name: Annotated[str, Argument(help="For example smollm2-135m.")], as_json: Json = False) -> None:
    """Download a bundled model into the user's cache, checked by its hash.

    specbatch models pull smollm2-135m
    """
    from specbatch.weights import bundled

    path = bundled.pull(name, say)
    show(str(path), {"name": name, "path": str(path)}, as_json=as_json)


def _write_through(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    # Weights are read by several threads, and what they need on the way would leave holes in a GPU's memory, of
    # gigabytes with Qwen3-Next-80B-A3B in float8. To be said before torch is imported.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    app()
