"""Decoding without speculation on a CPU: specbatch and transformers' generate(), the same work.

Same weights in float32, same prompts of equal length (no padding), greedy, no end token, same number of new tokens and
of threads, one process. A decode time is that of N new tokens less that of 1 new token, so that neither the
prompt nor the call itself counts; a speed is batch x (N - 1) over it. Both sides run next to each other in each repeat,
in alternating order, after a warm-up. The ratio is the median of the ratios within a repeat. The last column shows
whether both sides gave the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.records import environment
from specbatch.sweeps.microbench.runner import Row, Table, counts
from specbatch.weights import open_checkpoint
from specbatch.weights.known_models import KNOWN_MODELS, pull

Generate = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, new tokens) -> new token ids


SETS = {"max_model_len": ("prompt_tokens", "new_tokens"), "max_running": ("batches",)}


def tables(
    model: Annotated[str, typer.Option(help="Bundled name, .gguf file or folder.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Of both sides. Default: torch's own choice.")] = None,
) -> Iterator[Table]:
    if threads is not None:
        torch.set_num_threads(threads)
    sizes = counts("batches", batches)
    config = EngineConfig(
        model=model,
        device="cpu",
        dtype="float32",
        max_running=max(sizes),
        max_model_len=prompt_tokens + new_tokens,
        prefix_cache=False,
    )
    with Engine(config) as engine:
        sides = {"specbatch": _specbatch(engine), "transformers": _transformers(model)}
        prompts = _prompts(engine, max(sizes), prompt_tokens)
        rows = (_row(sides, prompts[:batch], new_tokens, repeats) for batch in sizes)
        yield Table(rows, f"{new_tokens} new tokens after {prompt_tokens}, float32")


def _row(sides: dict[str, Generate], prompts: list[list[int]], new_tokens: int, repeats: int) -> Row:
    outputs = {name: run(prompts, new_tokens) for name, run in sides.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            seconds = _seconds(sides[name], prompts, new_tokens) - _seconds(sides[name], prompts, 1)
            speeds[name].append(len(prompts) * (new_tokens - 1) / seconds)
    row: Row = {"batch": len(prompts)} | {f"{name} (tok/s)": _spread(values) for name, values in speeds.items()}
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
    ours, theirs = outputs.values()
    return row | {"ratio": _spread(ratios), "same tokens": ours == theirs}


def _seconds(run: Generate, prompts: list[list[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    run(prompts, new_tokens)
    return time.perf_counter() - start


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _specbatch(engine: Engine) -> Generate:
    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(prompts, params)]

    return run


def _transformers(name: str) -> Generate:
    """transformers' own model class with its default cache and attention, and the weights as specbatch reads them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = pull(name) if name in KNOWN_MODELS else Path(name)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    closed = {"trust_remote_code": False, "local_files_only": True}
    config = AutoConfig.from_pretrained(path.parent if where else path, **where, **closed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    checkpoint = open_checkpoint(name)
    weights = {tensor: checkpoint.tensor(tensor).float() for tensor in checkpoint.names()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # shared with the embedding
    model.tie_weights()
    model.generation_config.eos_token_id = None  # as our ignore_eos: nothing ends early, no token is forbidden
    model.generation_config.pad_token_id = 0

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return [row[len(prompts[0]) :] for row in out.tolist()]

    return run


def _prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Consecutive passages of a text that every installation has: the source of `specbatch.records.environment`."""
    text = engine.tokenizer.encode(Path(environment.__file__).read_text())
    return [(text * (1 + (place + 1) * length // len(text)))[place * length :][:length] for place in range(count)]
