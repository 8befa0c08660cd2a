"""`specbatch check`: compares the outputs of an algorithm with the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from specbatch.cli.options import ChatTemplate, EngineOptions, Json, Output, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.progress import progress


@takes_engine(without=("simulate_accept_length",))
def check(
    engine: EngineOptions,
    source: Annotated[
        Path | None, Argument(metavar="IN.jsonl", help="Prompts, as for generate. Default: random token ids.")
    ] = None,
    prompts: Annotated[
        int | None, Option(help="Number of prompts. Default: all of the file, or 32 random ones.")
    ] = None,
    input_len: Annotated[int, Option(help="Tokens per random prompt.")] = 64,
    max_new_tokens: Annotated[
        int, Option(help="Maximum number of tokens per answer; for random prompts, exactly that many.")
    ] = 64,
    margin: Annotated[
        float | None,
        Option(
            help="Largest gap between the baseline's logits that counts as a near tie. Default: 0.1; 0.001 in float32."
        ),
    ] = None,
    concurrency: Annotated[int, Option(help="Keep at most this many requests unfinished.")] = 8,
    chat_template: ChatTemplate = True,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare greedy outputs with speculation and without, token by token.

    specbatch check --spec v2

    specbatch check prompts.jsonl --draft self:skip=12-15 --spec v1

    specbatch check --model qwen3-8b --load-format dummy --dtype bfloat16 --decode-graph whole --margin 0.25

    The default is --spec v2. For each prompt that differs, the table shows the first different token and the gap
    between the logits of the two candidates. In bfloat16 and float16, GEMMs of different shapes round differently, so
    that a near tie (a gap of at most --margin) can go either way. In float32 all outputs should be equal.

    Exit status 1 if an output differs by more than a near tie.
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
