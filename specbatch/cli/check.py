"""`specbatch check`: compares the outputs of an algorithm with the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from specbatch.cli.options import EngineOptions, Json, Output, options_of, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.progress import progress
from specbatch.sweeps.check_options import CheckOptions


@takes_engine(without=("simulate_accept_length", "simulate_accept"), settings=options_of(CheckOptions))
def check(
    *,
    engine: EngineOptions,
    source: Annotated[
        Path | None, Argument(metavar="IN.jsonl", help="Prompts, as for generate. Default: random token ids.")
    ] = None,
    settings: dict[str, Any],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare greedy outputs with speculation and without, token by token.

    specbatch check --spec v2

    specbatch check prompts.jsonl --draft self:skip=12-15 --spec v1

    specbatch check --model qwen3-8b --load-format dummy --dtype bfloat16 --decode-graph whole --margin 0.25

    The default is --spec v2. The other side is always the baseline with schedule v1, without CUDA graphs. --spec off
    therefore checks the overlapped schedule v2 of the baseline and, with --decode-graph whole, its CUDA graphs.

    For each prompt that differs, the table shows the first different token and the gap
    between the logits of the two candidates. In bfloat16 and float16, GEMMs of different shapes round differently, so
    that a near tie (a gap of at most --margin) can go either way. In float32 all outputs should be equal.

    Exit status 1 if an output differs by more than a near tie.
    """
    from specbatch.sweeps.check import run_check

    options = CheckOptions(source, **settings)
    config = engine.having(spec=engine.spec or "v2").config(concurrency=options.concurrency)
    with fresh_folder(output, "check") as folder, progress("check") as report:
        result = run_check(config, options, folder, log=say, report=report)
    show(f"{result.markdown()}\n\nresults: {folder}", {"output": str(folder), **result.as_dict()}, as_json=as_json)
    if result.differs:
        raise typer.Exit(1)
