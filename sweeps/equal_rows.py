"""What equal rows do to a product and to an iteration: `python -m specbatch.sweeps.equal_rows`.

A GPU at its power limit runs a product faster when the rows are all alike: fewer bits change between one and the next.
Other engines' benchmarks of simulated acceptance write the same token everywhere, ours the model's own choices, so that
figures differ by what was multiplied and not by who multiplied it. Here the same engine runs both ways: with its random
embedding, and with one in which all tokens have the first one's row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, Speculation
from specbatch.metrics import steps_at
from specbatch.sweeps.machine import median_seconds, require_cuda
from specbatch.sweeps.workloads import Workload

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


def steps(engine: Engine, accept_length: float) -> None:
    """The time of an iteration that runs all requests."""
    prompts = Workload(input_len=PROMPT, output_len=NEW_TOKENS, prompts_per_concurrency=1).prompts(
        engine.tokenizer, BATCH
    )
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    print(f"\n| tokens | repeat | ms per step of {BATCH} requests | tok/s |\n|---|---|---|---|")
    for name in ("as chosen", "embedded alike"):
        if name == "embedded alike":
            embedding = engine._model.embedding
            embedding[:] = embedding[:1].clone()
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
