"""What equal rows do to a product and to an iteration: `python -m specbatch.sweeps.microbench.equal_rows`.

A GPU at its power limit runs a product faster when the rows are all alike: fewer bits change between one and the next.
What other engines benchmark without a checkpoint is nearly that. SGLang's simulated acceptance writes one fixed token,
and random weights of vLLM and SGLang (`initialize_dummy_weights`) are uniform within 1e-3, norms included, with the
same seed for every tensor: what a layer adds is a billionth of an embedding, so that rows of one token stay the same in
all layers, and a DFLASH draft, which sees the mask token at every place, drafts one token for all of them. Ours keep
the size of activations and choose different tokens. Figures then differ by what was multiplied, not by who multiplied.

Here the same engine, with the same recordings, runs all three ways: with its own random weights; with an embedding in
which all tokens have the first one's row; and with weights as those two make them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, Speculation
from specbatch.memory.kv_cache import KVCache
from specbatch.records.summarize import steps_at
from specbatch.sweeps.bench.machine import median_seconds, require_cuda
from specbatch.sweeps.run.workloads import Workload

BATCH, ROWS, HIDDEN, WIDE = 32, 512, 4096, 24576  # the widest product of Qwen3-8B
PROMPT, NEW_TOKENS, REPEATS = 512, 288, 3


def products() -> None:
    """The product that takes most of a step, over weights that take turns."""
    device = torch.device("cuda")
    weights = [torch.randn(WIDE, HIDDEN, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5 for _ in range(4)]
    different = torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
    equal = different[:1].expand(ROWS, HIDDEN).contiguous()

    def run(x: torch.Tensor) -> Callable[[], None]:
        def every() -> None:
            for _ in range(10):
                for weight in weights:
                    torch.mm(x, weight.t())

        return every

    print(f"| {ROWS} x {HIDDEN} x {WIDE} | us | TFLOP/s |\n|---|---|---|")
    for name, x in (("rows differ", different), ("rows are equal", equal)) * 2:
        once = median_seconds(run(x), device, repeats=40) / 40
        print(f"| {name} | {once * 1e6:.1f} | {2e-12 * ROWS * HIDDEN * WIDE / once:.0f} |", flush=True)


def weights_of(root: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Every tensor of `dtype` that hangs from `root`, once, but for tables of rope and keys and values."""
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


def steps(engine: Engine, accept_length: float) -> None:
    """The time of an iteration that runs all requests."""
    prompts = Workload(input_len=PROMPT, output_len=NEW_TOKENS, prompts_per_concurrency=1).prompts(
        engine.tokenizer, BATCH
    )
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    print(f"\n| weights | repeat | ms per step of {BATCH} requests | tok/s |\n|---|---|---|---|")
    embedding = engine._model.embedding
    for name in ("own, tokens as chosen", "own, tokens embedded alike", "as vLLM and SGLang make them"):
        if name.endswith("alike"):
            embedding[:] = embedding[:1].clone()
        if name.startswith("as"):
            for weight in weights_of((engine._model, engine._runner._iteration._drafter), engine._model.dtype):
                weight.uniform_(-1e-3, 1e-3, generator=torch.Generator("cuda").manual_seed(1234))
        engine.generate(prompts, params, concurrency=BATCH)
        for repeat in range(1, REPEATS + 1):
            engine.reset_record()
            engine.generate(prompts, params, concurrency=BATCH)
            _, once = steps_at(engine.record(concurrency=BATCH).counters, BATCH)
            assert once is not None
            print(f"| {name} | {repeat} | {once * 1e3:.2f} | {BATCH * accept_length / once:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What equal rows do to a product and to an iteration.")
    parser.add_argument("--algorithm", default="dflash")
    parser.add_argument("--accept-length", type=float, default=6.35, help="simulated")
    arguments = parser.parse_args()
    require_cuda()
    products()
    config = EngineConfig(
        model="qwen3-8b",
        load_format="dummy",
        max_running=BATCH,
        max_model_len=PROMPT + NEW_TOKENS,
        prefix_cache=False,
        prefill_chunk=8192,
        speculation=Speculation(
            arguments.algorithm, "v2", draft="dummy", simulate_accept_length=arguments.accept_length
        ),
        graphs=Graphs(decode="whole"),
    )
    with Engine(config) as engine:
        steps(engine, arguments.accept_length)


if __name__ == "__main__":
    main()
