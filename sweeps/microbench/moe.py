"""Mixtures of experts on a GPU, microseconds a block: `python -m specbatch.sweeps.microbench.moe [--fp8]`.

Norm, routing, both grouped products, shared expert and weighted sum, beside the floor: weights of the experts that are
hit over the memory's bandwidth, or the products over the rate of a large one, both measured in the run. Random rows
choose their experts almost evenly. Each number is the median over replays of a CUDA graph in which blocks take turns.
With --fp8 weights are in float8, and in the second half of the table activations, too.
"""

from __future__ import annotations

import argparse

import torch
from tabulate import tabulate

from specbatch.kernels import dispatch
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.weight import Weight
from specbatch.kernels.moe.experts import Experts
from specbatch.kernels.moe.routing import Routing, route_ref
from specbatch.sweeps.bench.machine import GEMM_SIZE, measure_machine, median_seconds, replay_seconds, require_cuda

HIDDEN, TOKENS, BLOCKS, SIDE = 2048, (1, 4, 32, 128, 512, 2048, 8192), 3, 128
SHAPES = {
    "Qwen3.5-35B-A3B": (Routing(256, 8, shared=1, gated=True), 512),
    "Qwen3-Next-80B-A3B": (Routing(512, 10, shared=1, gated=True), 512),
    "Qwen3-30B-A3B": (Routing(128, 8), 768),
}


def weight(shape: tuple[int, int, int], float8: bool) -> Weight:
    if not float8:
        return Weight(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[2] ** -0.5))
    values = torch.randint(0, 0x70, shape, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Weight(values, torch.full((shape[0], shape[1] // SIDE, shape[2] // SIDE), 1e-3, device="cuda"))


def block(rule: Routing, inner: int, float8: bool) -> Experts:
    count = rule.experts + rule.shared
    router = torch.randn(rule.logits, HIDDEN, device="cuda").bfloat16() * HIDDEN**-0.5
    return Experts(rule, router, weight((count, 2 * inner, HIDDEN), float8), weight((count, HIDDEN, inner), float8))


def float8_rate() -> float:
    """FLOP/s of a product of 8192 x 8192 x 8192 in float8, by torch's own."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def run() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return 2 * GEMM_SIZE**3 / median_seconds(run, a.device)


def rows_of(name: str, float8: bool, rounds: bool, read: float, rate: float) -> list[list[object]]:
    rule, inner = SHAPES[name]
    blocks = [block(rule, inner, float8) for _ in range(BLOCKS)]
    norm = Norm(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), 1e-6)
    found: list[list[object]] = []
    for tokens in TOKENS:
        xs = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in blocks]

        def run(xs: list[torch.Tensor] = xs) -> None:
            with dispatch.activations(float8=rounds):
                for one, x in zip(blocks, xs, strict=True):
                    one(x, norm=norm, residual=x)

        run()
        hit = len(route_ref(blocks[0]._router(xs[0])[:, : rule.logits], rule)[1].unique())
        size = 3 * inner * HIDDEN
        floor = max(hit * size * (1 if float8 else 2) / read, 2 * tokens * rule.width * size / rate) * 1e6
        took = 1e6 * replay_seconds(run) / BLOCKS
        found.append([name, "float8" if rounds else "bfloat16", tokens, hit, took, floor, took / floor])
    return found


@torch.inference_mode()
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--fp8", action="store_true", help="weights in float8 with a scale for 128 x 128")
    float8 = arguments.parse_args().fp8
    require_cuda()
    machine = measure_machine(torch.device("cuda"))
    read, rate = machine["read_bytes_s"] or 0.0, machine["gemm_flop_s"] or 0.0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, weights in {'float8' if float8 else 'bfloat16'};"
    )
    rates = f"{rate / 1e12:.0f} TFLOP/s"
    rows = [row for name in SHAPES for row in rows_of(name, float8, False, read, rate)]
    if float8:
        rate = float8_rate()
        rates += f" in bfloat16 and {rate / 1e12:.0f} in float8"
        rows += [row for name in SHAPES for row in rows_of(name, True, True, read, rate)]
    print(f"reads {read / 1e12:.2f} TB/s, multiplies {rates}; microseconds a block\n")
    heads = ["shape", "activations", "tokens", "experts hit", "us", "floor", "times the floor"]
    print(tabulate(rows, headers=heads, tablefmt="github", floatfmt=("", "", "", "", ".1f", ".1f", ".2f")))


if __name__ == "__main__":
    main()
