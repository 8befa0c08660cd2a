"""Plain decoding on a CPU beside transformers' generate(), on the same work.

    python sweeps/microbench/cpu_decode.py --model smollm2-135m --new-tokens 64 --batches 1,8 --repeats 5

Same weights in float32, same prompts of equal length (no padding), greedy, no end token, same number of new
tokens, same number of threads, one process. A decode time is that of N new tokens less that of 1 new token,
so that neither the prompt nor the call itself counts; a speed is batch x (N - 1) over it. In each repeat
both sides run next to each other, in alternating order, after a warm-up. Shown are medians over repeats
(smallest-largest), and the median of the ratios within a repeat. Both sides must give the same tokens; the
table says whether they did.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.records import environment, metrics
from specbatch.weights.bundled import MODELS, pull

Side = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, new tokens) -> new token ids


def compare(
    model: str,
    batches: list[int],
    *,
    new_tokens: int,
    prompt_tokens: int,
    repeats: int,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row per batch size; speeds in tokens per second, each as [median, smallest, largest]."""
    config = EngineConfig(
        model=model,
        device="cpu",
        dtype="float32",
        max_running=max(batches),
        max_model_len=prompt_tokens + new_tokens,
        prefix_cache=False,
    )
    rows = []
    with Engine(config) as engine:
        sides = {"specbatch": _specbatch(engine), "transformers": _transformers(model)}
        prompts = _prompts(engine, max(batches), prompt_tokens)
        for batch in batches:
            log(f"batch {batch}: warm-up and {repeats} repeats")
            speeds, equal = _measure(sides, prompts[:batch], new_tokens, repeats)
            ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
            rows.append(
                {
                    "batch": batch,
                    **{f"{name} (token/s)": _spread(values) for name, values in speeds.items()},
                    "ratio": _spread(ratios),
                    "same tokens": equal,
                }
            )
    return rows


def _measure(
    sides: dict[str, Side], prompts: list[list[int]], new_tokens: int, repeats: int
) -> tuple[dict[str, list[float]], bool]:
    outputs = {name: run(prompts, new_tokens) for name, run in sides.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            seconds = _seconds(sides[name], prompts, new_tokens) - _seconds(sides[name], prompts, 1)
            speeds[name].append(len(prompts) * (new_tokens - 1) / seconds)
    ours, theirs = outputs.values()
    return speeds, ours == theirs


def _seconds(run: Side, prompts: list[list[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    run(prompts, new_tokens)
    return time.perf_counter() - start


def _spread(values: list[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def _specbatch(engine: Engine) -> Side:
    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(prompts, params)]

    return run


def _transformers(name: str) -> Side:
    """transformers' own model class and its default cache and attention, with the weights as we read them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specbatch.weights import open_checkpoint

    path = pull(name) if name in MODELS else Path(name)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    config = AutoConfig.from_pretrained(path.parent if where else path, **where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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
    """Consecutive pieces of a text that every installation has: the source of `specbatch.records.metrics`."""
    text = engine.tokenizer.encode(Path(metrics.__file__).read_text())
    return [(text * (1 + (place + 1) * length // len(text)))[place * length :][:length] for place in range(count)]


def main(
    model: Annotated[str, typer.Option(help="Bundled name, .gguf file or folder.")] = "smollm2-135m",
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="Of both sides. Default: torch's own choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line instead of the table.")] = False,
) -> None:
    """Measure plain decoding of specbatch and of transformers side by side on a CPU."""
    import torch
    from tabulate import tabulate

    if threads is not None:
        torch.set_num_threads(threads)
    sizes = [int(size) for size in batches.split(",")]
    try:
        rows = compare(
            model,
            sizes,
            new_tokens=new_tokens,
            prompt_tokens=prompt_tokens,
            repeats=repeats,
            log=lambda line: typer.echo(line, err=True),
        )
    except SpecbatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    found = {"versions": environment.versions(), "hardware": environment.hardware(), "rows": rows}
    if as_json:
        print(json.dumps(found))
        return
    hardware = environment.hardware()
    print(f"{hardware['cpu']}, {hardware['torch_threads']} threads, {hardware['cores']} cores")
    print(f"{new_tokens} new tokens after {prompt_tokens}, float32")
    shown = [{key: _cell(value) for key, value in row.items()} for row in rows]
    print(tabulate(shown, headers="keys", tablefmt="github"))


def _cell(value: Any) -> Any:
    return f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})" if isinstance(value, list) else value


if __name__ == "__main__":
    typer.run(main)
