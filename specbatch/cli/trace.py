"""`specbatch trace`: records decode steps as a Chrome trace."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from specbatch.cli.options import EngineOptions, Json, Output, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, show
from specbatch.errors import at_least


@takes_engine(without=("data_parallel",), defaults={"prefix_cache": "off", "max_running": "--batch"})
def trace(
    engine: EngineOptions,
    steps: Annotated[int, Option(help="Iterations to record.")] = 20,
    batch: Annotated[int, Option(help="Requests that decode together.")] = 1,
    input_len: Annotated[int, Option(help="Prompt tokens of each request, random.")] = 128,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Record decode steps: a Chrome trace, kernels by time, and every line of code at which the host waited.

    specbatch trace --spec v2 --steps 20

    specbatch trace --model qwen3-8b --load-format dummy --decode-graph whole --batch 32

    Open trace.json in chrome://tracing or ui.perfetto.dev.
    """
    from specbatch.engine.trace import text
    from specbatch.engine.trace import trace as record
    from specbatch.files.atomic_file import write_atomic, write_json
    from specbatch.sweeps.workload.workloads import Workload

    for name, value in (("steps", steps), ("batch", batch), ("input_len", input_len)):
        at_least(name, value, 1)
    config = engine.config(concurrency=batch, prefix_cache=False)
    workload = Workload(input_len=input_len, prompts_per_concurrency=1, seed=engine.seed)
    with fresh_folder(output, "trace") as folder, open_engine(config) as running:
        result = record(running, workload.prompts(running.tokenizer, batch), steps, folder / "trace.json")
        write_atomic(folder / "summary.md", text(result) + "\n")
        write_json(folder / "summary.json", result)
    show(f"{text(result)}\n\nresults: {folder}", {"output": str(folder), **result}, as_json=as_json, kept=str(folder))
