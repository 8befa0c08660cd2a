"""The command that compares an algorithm with plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from specbatch.cli.options import EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.progress import progress


@takes_engine(without=("simulate_accept_length",))
def check(
    engine: EngineOptions,
    source: Annotated[
        Path | None, Argument(metavar="IN.jsonl", help="Prompts as for generate. Default: random ids.")
    ] = None,
    prompts: Annotated[
        int | None, Option(help="How many prompts. Default: all of the file, or 32 random ones.")
    ] = None,
    input_len: Annotated[int, Option(help="Tokens per random prompt.")] = 64,
    max_new_tokens: Annotated[int, Option(help="Longest answer; random prompts are always answered to the end.")] = 64,
    margin: Annotated[
        float | None,
        Option(help="Largest gap of a near tie, in logits of the plain model. Default: 0.1, and 0.001 in float32."),
    ] = None,
    concurrency: Annotated[int, Option(help="Keep at most this many requests unfinished.")] = 8,
    chat_template: Annotated[
        bool, Option("--chat-template/--no-chat-template", help="Render messages by the model's template.")
    ] = True,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the results. Default: out/check-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare an algorithm with plain decoding, token by token, greedy.

    specbatch check --spec v2

    specbatch check prompts.jsonl --draft self:skip=12-15 --spec v1

    specbatch check --model qwen3-8b --load-format dummy --dtype bfloat16 --decode-graph whole --margin 0.25

    Without --spec it is v2. Each prompt has plain decoding's tokens, or it is shown where they part first and how near
    the two choices were. Other shapes of a product round differently, so that a near tie (a gap of --margin at most)
    may fall either way in bfloat16 and float16; in float32 all prompts should be equal.

    Exit status 1 if a prompt differs by more than a near tie.
    """
    from specbatch.sweeps.check import CheckOptions, run_check

    options = CheckOptions(
        source=source,
        prompts=prompts,
        input_len=input_len,
        max_new_tokens=max_new_tokens,
        margin=margin,
        concurrency=concurrency,
        chat_template=chat_template,
    )
    config = engine.having(spec=engine.spec or "v2").config(concurrency=concurrency)
    with fresh_folder(output, "check") as folder, progress("check") as report:
        result = run_check(config, options, folder, log=say, report=report)
    show(f"{result.markdown()}\n\nresults: {folder}", {"output": str(folder), **result.as_dict()}, as_json=as_json)
    if result.differs:
        raise typer.Exit(1)
