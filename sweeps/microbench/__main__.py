"""Command line of the benchmarks of single operations: `python -m specbatch.sweeps.microbench --help`.

They are part of a checkout (`pip install --editable .`), not of the wheel.

Each number is a median, with the smallest and largest. Variants of an operation run interleaved, A B C C B A; on a GPU
each is the replay of a CUDA graph over more data than the L2 cache holds. Floors are measured in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from inspect import Parameter, signature
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from tabulate import tabulate

from specbatch.config.flags import InFlags, flags_of
from specbatch.errors import WORDING, SpecbatchError
from specbatch.records.environment import hardware, versions
from specbatch.sweeps.microbench import (
    acceptance,
    all_reduce,
    attention_tiles,
    cache_accuracy,
    cpu_decode,
    cpu_gemm,
    cpu_llama,
    cublas_algorithms,
    deterministic,
    equal_rows,
    gemm,
    gemm_tiles,
    host_step,
    http_client,
    job_memory,
    maskbench,
    moe,
    prefill,
    prefill_kernels,
    recurrent,
    shared_prefixes,
    state_sizes,
    step_kernels,
)
from specbatch.sweeps.microbench.runner import Table

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON line instead of tables.")]


def _add(module: ModuleType, *, needs_cuda: bool, inference: bool = False) -> None:
    """SETS of a module: settings of engines that it takes from options, by setting the options whose sum it is."""

    def run(running: typer.Context, as_json: bool, **settings: Any) -> None:
        flags = flags_of(running.command.params)
        for setting, options in getattr(module, "SETS", {}).items():
            flags[setting] = flags[options[0]]._replace(name=" + ".join(flags[name].name for name in options))
        words = InFlags(flags)
        before = WORDING.set(words)
        try:
            if needs_cuda and not torch.cuda.is_available():
                raise SpecbatchError("needs a CUDA device and torch sees none here")
            with torch.inference_mode(inference):
                _print(module.tables(**settings), as_json)
        except SpecbatchError as error:
            typer.echo(f"error: {words.message(error)}", err=True)
            raise typer.Exit(2) from None
        finally:
            WORDING.reset(before)

    shape = signature(module.tables, eval_str=True)
    running = Parameter("running", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    json_option = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    parameters = [running, *shape.parameters.values(), json_option]
    run.__signature__ = shape.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    app.command(module.__name__.rpartition(".")[2].replace("_", "-"), help=module.__doc__)(run)


def _print(tables: Iterable[Table], as_json: bool) -> None:
    measured = ((table.title, table.measured()) for table in tables)
    if as_json:
        found = [{"title": title, "rows": rows} for title, rows in measured]
        print(json.dumps({"versions": versions(), "hardware": hardware(), "tables": found}))
        return
    for number, (title, rows) in enumerate(measured):
        if not number:
            print(_machine())
        text = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="-")
        print(f"\n{title}\n\n{text}" if title else f"\n{text}", flush=True)


def _machine() -> str:
    found, known = hardware(), versions()
    name = found.get("gpu") or f"{found['cpu']}, {found['torch_threads']} threads, {found['cores']} cores"
    return ", ".join([name, *(f"{library} {known[library]}" for library in ("torch", "triton") if library in known)])


for kernels in (
    attention_tiles,
    cublas_algorithms,
    deterministic,
    gemm,
    gemm_tiles,
    moe,
    prefill,
    recurrent,
    shared_prefixes,
):
    _add(kernels, needs_cuda=True, inference=True)
for alone in (all_reduce, equal_rows, prefill_kernels, step_kernels):
    _add(alone, needs_cuda=True)
_add(cpu_gemm, needs_cuda=False, inference=True)
for engines in (acceptance, cache_accuracy, cpu_decode, cpu_llama, host_step, http_client, job_memory, maskbench):
    _add(engines, needs_cuda=False)
app.command("state-sizes", help=state_sizes.__doc__)(state_sizes.main)

if __name__ == "__main__":
    app(prog_name="python -m specbatch.sweeps.microbench")
