"""Equal rows make a GEMM and an iteration faster: three kinds of dummy weights in the same engine.

A GPU at its power limit runs a GEMM faster when the rows are all alike: fewer bits change from one to the next. Other
engines' benchmarks without a checkpoint come close to that. SGLang's simulated acceptance writes one fixed token, and
the random weights of vLLM and SGLang (`initialize_dummy_weights`) are uniform within 1e-3, norms included, with one
seed for all tensors: a layer adds a billionth of an embedding, so that rows of one token stay equal in all layers, and
a DFLASH draft, which has the mask token at every position, drafts one token for all of them. Our dummy weights keep the
size of activations and choose different tokens. Throughput then differs by what was multiplied, not by the engine.

The engine runs, with the same CUDA graphs, with its own random weights; with an embedding in which all tokens have the
first one's row; and with weights as vLLM and SGLang make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, Speculation
from specbatch.memory.kv_cache import KVCache
from specbatch.records.steps import steps_at
from specbatch.sweeps.machine.timing import median_seconds
from specbatch.sweeps.microbench.runner import Row, Table, in_a_row
from specbatch.sweeps.workload.workloads import Workload

BATCH, ROWS, HIDDEN, OUTPUTS = 32, 512, 4096, 24576  # the largest GEMM of a layer of Qwen3-8B
PROMPT, NEW_TOKENS, REPEATS = 512, 288, 3


def tables(
    algorithm: Annotated[str, typer.Option(help="What drafts.")] = "dflash",
    accept_length: Annotated[float, typer.Option(help="Simulated.")] = 6.35,
) -> Iterator[Table]:
    yield Table(_gemms(), f"GEMM of {ROWS} x {HIDDEN} x {OUTPUTS}")
    config = EngineConfig(
        model="qwen3-8b",
        load_format="dummy",
        max_running=BATCH,
        max_model_len=PROMPT + NEW_TOKENS,
        prefix_cache=False,
        prefill_chunk=8192,
        speculation=Speculation(algorithm, "v2", draft="dummy", simulate_accept_length=accept_length),
        graphs=Graphs(decode="whole"),
    )
    with Engine(config) as engine:
        yield Table(_steps(engine, accept_length), f"An iteration that runs all {BATCH} requests")


def _gemms() -> Iterator[Row]:
    """Back to back and not interleaved: the clock must settle at the power limit of each."""
    device = torch.device("cuda")
    weights = [torch.randn(OUTPUTS, HIDDEN, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5 for _ in range(4)]
    different = torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
    equal = different[:1].expand(ROWS, HIDDEN).contiguous()
    for name, x in (("different", different), ("equal", equal)) * 2:
        run = in_a_row([partial(torch.mm, x, weight.t()) for weight in weights] * 10)
        once = median_seconds(run, device, repeats=40) / 40
        yield {"rows": name, "us": f"{once * 1e6:.1f}", "TFLOP/s": f"{2e-12 * ROWS * HIDDEN * OUTPUTS / once:.0f}"}


def _steps(engine: Engine, accept_length: float) -> Iterator[Row]:
    workload = Workload(dataset="random", input_len=PROMPT, output_len=NEW_TOKENS, prompts_per_concurrency=1)
    prompts = workload.prompts(engine.tokenizer, BATCH)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    embedding = engine.parts.model.embedding
    for name in ("own", "own, one embedding for all tokens", "as vLLM and SGLang make them"):
        if name.endswith("all tokens"):
            embedding[:] = embedding[:1].clone()
        if name.startswith("as"):
            for weight in _weights_of(
                (engine.parts.model, engine.parts.worker.decode_step.drafter), engine.parts.model.dtype
            ):
                weight.uniform_(-1e-3, 1e-3, generator=torch.Generator("cuda").manual_seed(1234))
        engine.generate(prompts, params, concurrency=BATCH)
        for repeat in range(1, REPEATS + 1):
            engine.reset_record()
            engine.generate(prompts, params, concurrency=BATCH)
            _, once = steps_at(engine.record(concurrency=BATCH).counters, BATCH)
            assert once is not None
            cells = {"ms per step": f"{once * 1e3:.2f}", "tok/s": f"{BATCH * accept_length / once:.0f}"}
            yield {"weights": name, "repeat": repeat, **cells}


def _weights_of(root: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Every tensor of `dtype` reachable from `root`, once, except rotary tables and the KV cache."""
    seen: set[int] = set()
    left = [root]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.dtype == dtype:
                yield item
        elif isinstance(item, (tuple, list)):
            left += item
        elif type(item).__module__.startswith("specbatch.") and not isinstance(item, KVCache):
            left += [value for name, value in vars(item).items() if name not in ("cos", "sin")]
