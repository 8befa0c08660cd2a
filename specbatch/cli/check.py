"""`specbatch check`: compares the outputs of an algorithm with the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from specbatch.cli.options import (
    ENGINE_OPTIONS,
    WITH_DRAFTS,
    EngineOptions,
    Json,
    Output,
    is_given,
    options_of,
    takes_engine,
)
from specbatch.cli.output import fresh_folder, say, show
from specbatch.cli.servers import SERVER_PANEL, kind_option, only_server
from specbatch.errors import refuse
from specbatch.progress.bars import progress
from specbatch.servers.server import Server
from specbatch.sweeps.check.options import CheckOptions, ServerOptions

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.servers.engine import HttpEngine
    from specbatch.sweeps.check.report import CheckReport
    from specbatch.sweeps.check.sampled import SampledReport
    from specbatch.sweeps.check.server_report import ServerReport
    from specbatch.sweeps.check.server_sampled import ServerSampledReport


@takes_engine(
    without=("simulate_accept_length", "simulate_accept"),
    defaults={"spec": "v2"} | WITH_DRAFTS,
    settings=options_of(CheckOptions),
    of_server=options_of(Server, SERVER_PANEL),
    of_check=options_of(ServerOptions, SERVER_PANEL),
)
def check(
    context: typer.Context,
    *,
    engine: EngineOptions,
    source: Annotated[
        Path | None, Argument(metavar="IN.jsonl", help="Prompts, as for generate. Default: 32 texts of the package.")
    ] = None,
    settings: dict[str, Any],
    engine_kind: Annotated[str, kind_option("check")] = "specbatch",
    of_server: dict[str, Any],
    of_check: dict[str, Any],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare the tokens of an engine with the baseline's, or sampled tokens with their exact distribution.

    specbatch check --spec v2

    specbatch check prompts.jsonl --draft self:skip=12-15 --spec v1 --dtype bfloat16

    specbatch check --model qwen3-8b --load-format dummy --random --dtype bfloat16 --decode-graph whole

    specbatch check --sampled --draft self:skip=12-15

    specbatch check --engine http --base-url http://localhost:8000 --baseline-url http://localhost:8001

    The default is --spec v2. The other side is always the baseline with schedule v1, without CUDA graphs. --spec off
    therefore checks the overlapped schedule v2 of the baseline and, with --decode-graph whole, its CUDA graphs.

    In float32 all outputs should be equal. In bfloat16 and float16 kernels for different shapes round differently, so
    that tokens differ where two logits are nearly equal. The referee, the model alone in float32, then judges the
    tokens of both engines. The check passes if the checked engine is no further from the referee than the baseline,
    and if no single token is further than rounding explains.

    With --engine http a server answers each prompt alone, alone again and together with the others, and its answers
    should be those of a second server (--baseline-url), of this engine without drafts (--weights), or its own first
    ones. The referee judges divergences if --weights are given, else the server's log-probabilities. Then its settings
    are probed (--probes): each is honored, ignored, wrong, refused or not tested. Of the options below only --model
    (one of the server's models), --tokenizer and --seed apply, with --weights also those of the engine
    (docs/any-engine.md).

    Exit status 1 if the check fails.
    """
    from specbatch.sweeps.check.run import run_check
    from specbatch.sweeps.check.sampled import run_sampled

    options = CheckOptions(source, **settings)
    result: CheckReport | SampledReport | ServerReport | ServerSampledReport
    if engine_kind != "specbatch" or any(is_given(context, name) for name in (*of_server, *of_check)):
        server, sides = _server(context, engine, of_server, of_check)
        from specbatch.sweeps.check.server import run_server
        from specbatch.sweeps.check.server_sampled import run_server_sampled

        with fresh_folder(output, "check") as folder, progress("check", "answers") as report:
            run_it = run_server_sampled if options.sampled else run_server
            how: dict[str, Any] = {"own": sides[1], "seed": engine.seed, "log": say, "report": report}
            if not options.sampled:
                how["baseline"] = sides[0]
            result = run_it(server, options, ServerOptions(**of_check), folder, **how)
        _finish(result, folder, as_json=as_json)
        return
    config = engine.having(spec=engine.spec or "v2").config(concurrency=options.concurrency)
    unit = "answers" if options.sampled else "answers and verdicts"
    with fresh_folder(output, "check") as folder, progress("check", unit) as report:
        run = run_sampled if options.sampled else run_check
        result = run(config, options, folder, log=say, report=report)
    _finish(result, folder, as_json=as_json)


def _finish(result: Any, folder: Path, *, as_json: bool) -> None:
    show(
        f"{result.markdown()}\n\nresults: {folder}",
        {"output": str(folder), **result.as_dict()},
        as_json=as_json,
        kept=str(folder),
    )
    if result.fails:
        raise typer.Exit(1)


def _server(
    context: typer.Context, engine: EngineOptions, of_server: dict[str, Any], of_check: dict[str, Any]
) -> tuple[HttpEngine, tuple[HttpEngine | None, EngineConfig | None]]:
    """The server, and the other side: a second server, or the configuration of this engine with the same weights."""
    checks = ServerOptions(**of_check)
    known = dict(context.params, configs=None, thinking=None)
    if known["engine_kind"] == "specbatch":
        for name in of_check:
            if is_given(context, name):
                raise refuse(name, known[name], "applies to servers only; add --engine http")

    def given(name: str) -> bool:
        is_of_weights = checks.weights is not None and name in ENGINE_OPTIONS and name not in _OF_BOTH
        return is_given(context, name) and not is_of_weights

    found = only_server(engine, of_server, known, given)
    assert found is not None, "options of a server are refused without --engine http"
    if checks.weights is not None:
        own = engine.having(model=checks.weights, spec="off")
        return found, (None, own.config(concurrency=known["concurrency"]))
    if checks.baseline_url is None:
        return found, (None, None)
    baseline = only_server(engine, {**of_server, "base_url": checks.baseline_url}, known, given)
    return found, (baseline, None)


_OF_BOTH = ("model", "seed")  # options that a server has, too
