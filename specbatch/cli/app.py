"""The `specbatch` command: registers the commands and turns exceptions into exit statuses.

Each command parses its options, calls one function and prints the result. Nothing heavy is imported before a command
runs, so that `specbatch --help` is fast. A user's mistake is reported in one line on standard error with exit status 2;
Ctrl-C reports what was kept and exits with status 130.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from specbatch import SpecbatchError, __version__
from specbatch.cli.bench import bench
from specbatch.cli.check import check
from specbatch.cli.compare import compare
from specbatch.cli.doctor import doctor
from specbatch.cli.eval import evaluate
from specbatch.cli.gate import gate
from specbatch.cli.generate import generate
from specbatch.cli.models import models
from specbatch.cli.output import say
from specbatch.cli.report import report
from specbatch.cli.send_one import send_one
from specbatch.cli.sweep import sweep
from specbatch.cli.trace import trace
from specbatch.cli.train_draft import train_draft


class Commands(TyperGroup):
    """Turns exceptions of a command into a line on standard error and an exit status."""

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


app.command("eval")(evaluate)
app.command()(check)
app.command()(sweep)
app.command()(report)
app.command()(bench)
app.command()(trace)
app.command()(compare)
app.command()(gate)
app.command("train-draft")(train_draft)
app.command()(generate)
app.command("send-one")(send_one)
app.command()(doctor)
app.add_typer(models, name="models")


def main() -> None:
    # Weights are read by several threads, and what they need on the way would leave holes in a GPU's memory, of
    # gigabytes with Qwen3-Next-80B-A3B in float8. To be said before torch is imported.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    app()
