"""Decoding one request on a CPU: specbatch and llama.cpp, the same GGUF file, prompt and number of threads.

llama.cpp is the package xllamacpp (`pip install xllamacpp`), which is its server in this process. Greedy, no end token.
A time is that of N new tokens less that of 8, over the difference, so that neither the prompt nor the call itself
counts; CPU time is that of all threads of the process. Both sides run next to each other in each repeat, in alternating
order, after a warm-up. A ratio is the median of those within a repeat. llama.cpp quantizes activations to 8 bits,
specbatch does not: the last column shows after how many characters their answers part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import torch
import typer

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.extras import is_installed
from specbatch.sweeps.microbench.runner import Row, Table, counts
from specbatch.weights.known_models import KNOWN_MODELS, pull

Generate = Callable[[int], str]  # new tokens -> their text
_FIRST = 8  # new tokens of the shorter run
_PROMPT = "A language model is a program that"


class _Time(NamedTuple):
    """Seconds of a token."""

    wall: float
    cpu: float


def tables(
    model: Annotated[str, typer.Option(help="Bundled name or .gguf file.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(min=_FIRST + 1)] = 72,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    threads: Annotated[str, typer.Option(help="Numbers of threads, of both sides.")] = "1,2",
) -> Iterator[Table]:
    if not is_installed("xllamacpp"):
        raise SpecbatchError("xllamacpp is not installed; pip install xllamacpp")
    path = pull(model) if model in KNOWN_MODELS else Path(model)
    rows = (_row(path, count, new_tokens, repeats) for count in counts("threads", threads))
    yield Table(rows, f"{path.name}, {new_tokens} new tokens, float32; xllamacpp {version('xllamacpp')}")


def _row(path: Path, threads: int, new_tokens: int, repeats: int) -> Row:
    torch.set_num_threads(threads)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", max_running=1, max_model_len=1024)
    with Engine(config) as engine:
        prompt = engine.tokenizer.encode(_PROMPT)
        sides = {"specbatch": _specbatch(engine, prompt), "llama.cpp": _llama(path, prompt, threads)}
        answers = [run(new_tokens) for run in sides.values()]
        times: dict[str, list[_Time]] = {name: [] for name in sides}
        for repeat in range(repeats):
            for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                short, long = (_seconds(sides[name], count) for count in (_FIRST, new_tokens))
                parts = ((after - before) / (new_tokens - _FIRST) for before, after in zip(short, long, strict=True))
                times[name].append(_Time(*parts))
    row: Row = {"threads": threads}
    for kind, title in enumerate(("", "CPU ")):
        columns = {name: [1e3 * found[kind] for found in each] for name, each in times.items()}
        row |= {f"{name} ({title}ms)": _spread(values) for name, values in columns.items()}
        row[f"{title}ratio"] = _spread([ours / theirs for ours, theirs in zip(*columns.values(), strict=True)])
    return row | {"same text": f"{_common(*answers)} of {len(answers[0])}"}


def _common(first: str, second: str) -> int:
    """How many characters both begin with."""
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), len(first)
    )


def _seconds(run: Generate, new_tokens: int) -> _Time:
    wall, cpu = time.perf_counter(), time.process_time()
    run(new_tokens)
    return _Time(time.perf_counter() - wall, time.process_time() - cpu)


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _specbatch(engine: Engine, prompt: list[int]) -> Generate:
    def run(new_tokens: int) -> str:
        [completion] = engine.generate([prompt], SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        return completion.text

    return run


def _llama(path: Path, prompt: list[int], threads: int) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 1024, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(new_tokens: int) -> str:
        asked = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions(asked | {"cache_prompt": False})
        return str(answer["choices"][0]["text"])

    return run
