"""`specbatch check`: compares the outputs of an algorithm with the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from specbatch.cli.options import WITH_DRAFTS, EngineOptions, Json, Output, options_of, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.progress.bars import progress
from specbatch.sweeps.check.options import CheckOptions

if TYPE_CHECKING:
    from specbatch.sweeps.check.report import CheckReport
    from specbatch.sweeps.check.sampled import SampledReport


@takes_engine(
    without=("simulate_accept_length", "simulate_accept"),
    defaults={"spec": "v2"} | WITH_DRAFTS,
    settings=options_of(CheckOptions),
)
def check(
    *,
    engine: EngineOptions,
    source: Annotated[
        Path | None, Argument(metavar="IN.jsonl", help="Prompts, as for generate. Default: 32 texts of the package.")
    ] = None,
    settings: dict[str, Any],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare the tokens of an engine with the baseline's, or sampled tokens with their exact distribution.

    specbatch check --spec v2

    specbatch check prompts.jsonl --draft self:skip=12-15 --spec v1 --dtype bfloat16

    specbatch check --model qwen3-8b --load-format dummy --random --dtype bfloat16 --decode-graph whole

    specbatch check --sampled --draft self:skip=12-15

    The default is --spec v2. The other side is always the baseline with schedule v1, without CUDA graphs. --spec off
    therefore checks the overlapped schedule v2 of the baseline and, with --decode-graph whole, its CUDA graphs.

    In float32 all outputs should be equal. In bfloat16 and float16 kernels for different shapes round differently, so
    that tokens differ where two logits are nearly equal. The referee, the model alone in float32, then judges the
    tokens of both engines. The check passes if the checked engine is no further from the referee than the baseline,
    and if no single token is further than rounding explains.

    Exit status 1 if the check fails.
    """
    from specbatch.sweeps.check.run import run_check
    from specbatch.sweeps.check.sampled import run_sampled

    options = CheckOptions(source, **settings)
    config = engine.having(spec=engine.spec or "v2").config(concurrency=options.concurrency)
    unit = "answers" if options.sampled else "answers and verdicts"
    with fresh_folder(output, "check") as folder, progress("check", unit) as report:
        run = run_sampled if options.sampled else run_check
        result: CheckReport | SampledReport = run(config, options, folder, log=say, report=report)
    show(
        f"{result.markdown()}\n\nresults: {folder}",
        {"output": str(folder), **result.as_dict()},
        as_json=as_json,
        kept=str(folder),
    )
    if result.fails:
        raise typer.Exit(1)
