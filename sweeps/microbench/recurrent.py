"""Recurrent layers on a GPU, microseconds a layer: `python -m specbatch.sweeps.microbench.recurrent`.

A verify of N rows reads and writes every state once; beside it stands a copy of the states, which does nothing else.
N = 1 is plain decoding. What it costs that a verify can be taken back is shown by a step that writes its state at once
and keeps nothing, so it could not draft. Then prompts. Each number is the median over replays of a CUDA graph in which
more layers than a cache holds take turns; bfloat16 with states in float32, layers of Qwen3.5-35B-A3B (gated delta rule)
and Nemotron-Nano-9B-v2 (Mamba2), the gated norm included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from tabulate import tabulate

from specbatch.kernels.attention.ragged_batch import Spans
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.recurrent.gated_delta import DeltaHeads, Pending, delta_prefill, delta_verify
from specbatch.kernels.recurrent.mamba2 import SsdHeads, SsdMemory, ssd_prefill, ssd_verify
from specbatch.kernels.recurrent.state_replay import Fold
from specbatch.kernels.sampling.tree import ancestors_of
from specbatch.sweeps.bench.machine import replay_seconds, require_cuda
from specbatch.sweeps.microbench.plain_states import plain_delta, plain_mamba

BATCHES = (1, 32, 128)
ROWS = ((1, False), (2, False), (4, False), (8, False), (8, True))  # of a verify; a tree?
PROMPTS = ((1, 1024), (1, 8192), (32, 256))  # spans, tokens of each
LAYERS = 27


class Delta:
    """32 value heads of 128, 16 of keys."""

    keys, values, dim = 16, 32, 128

    def __init__(self, batch: int, tokens: int, rows: int) -> None:
        given = partial(torch.randn, device="cuda")
        wide = 2 * self.keys * self.dim + self.values * self.dim
        norm = torch.ones(self.dim, device="cuda", dtype=torch.bfloat16)
        gates = given(self.values) - 1, given(self.values) - 1
        self.heads = DeltaHeads(self.keys, self.values, self.dim, self.dim, *gates, norm, 1e-6)
        self.inputs = [
            given(tokens, width).bfloat16() for width in (wide, self.values * self.dim, self.values, self.values)
        ]
        self.state = given(batch + 1, self.values, self.dim, self.dim)
        shapes = (self.keys, self.dim), (self.values, self.dim), (self.values,)
        self.pending = Pending(*(-torch.rand(batch + 1, rows, *shape, device="cuda") for shape in shapes))

    def verify(self, fold: Fold) -> object:
        qkv, z, b, a = self.inputs
        return delta_verify(qkv, z, b, a, self.heads, self.state, self.pending, fold)

    def prefill(self, spans: Spans) -> object:
        qkv, z, b, a = self.inputs
        return delta_prefill(qkv, z, b, a, self.heads, self.state, spans)

    def plain(self) -> object:
        qkv, z, b, a = self.inputs
        return plain_delta(qkv, z, b, a, self.heads, self.state[1:])


class Mamba:
    """128 heads of 80 in 8 groups, 128 numbers a row."""

    count, dim, groups, size = 128, 80, 8, 128

    def __init__(self, batch: int, tokens: int, rows: int) -> None:
        given = partial(torch.randn, device="cuda")
        inner, side = self.count * self.dim, self.groups * self.size
        a_log, d, bias = torch.rand(3, self.count, device="cuda")
        norm = Norm(torch.ones(inner, device="cuda", dtype=torch.bfloat16), 1e-5)
        self.heads = SsdHeads(self.count, self.dim, self.groups, self.size, 3 * a_log - 2, d, 2 * bias - 3, norm)
        self.inputs = [given(tokens, width).bfloat16() for width in (inner + 2 * side, self.count, inner)]
        self.state = given(batch + 1, self.count, self.dim, self.size)
        pending = given(batch + 1, rows, inner + side + self.count).bfloat16()
        self.memory = SsdMemory(self.state, pending)

    def verify(self, fold: Fold) -> object:
        xbc, dt, z = self.inputs
        return ssd_verify(xbc, dt, z, self.heads, self.memory, fold)

    def prefill(self, spans: Spans) -> object:
        xbc, dt, z = self.inputs
        return ssd_prefill(xbc, dt, z, self.heads, self.memory, spans)

    def plain(self) -> object:
        xbc, dt, z = self.inputs
        return plain_mamba(xbc, dt, z, self.heads, self.state[1:])


Layer = Delta | Mamba


def timed(layers: Sequence[Layer], run: Callable[[Layer], object]) -> float:
    """Microseconds of one layer of those that take turns."""

    def every() -> None:
        for layer in layers:
            run(layer)

    return 1e6 * replay_seconds(every) / len(layers)


def _verified(fold: Fold, layer: Layer) -> object:
    return layer.verify(fold)


def _prefilled(spans: Spans, layer: Layer) -> object:
    return layer.prefill(spans)


def _copied(into: torch.Tensor, layer: Layer) -> object:
    return into.copy_(layer.state[1:])


def verifies(kind: type[Layer]) -> Iterator[list[object]]:
    for batch in BATCHES:
        rows = torch.arange(1, batch + 1, device="cuda")
        layers = [kind(batch, batch, 1) for _ in range(2 if batch > 64 else LAYERS)]
        state = layers[0].state[1:]
        copies = torch.empty_like(state)
        whole = 2 * state.numel() * state.element_size()
        bare = timed(layers, lambda layer: layer.plain())
        copy = timed(layers, partial(_copied, copies))
        del copies
        for count, is_tree in ROWS:
            layers = [kind(batch, batch * count, count) for _ in layers]
            fold = Fold(rows, torch.full((batch + 1,), max(1, count - 1), device="cuda"))
            if is_tree:
                parents = torch.arange(count - 1, device="cuda").expand(batch, -1) // 2
                kept = torch.arange(count, device="cuda").expand(batch + 1, -1).contiguous()
                fold = fold._replace(kept=kept, ancestors=ancestors_of(parents, count))
            took = timed(layers, partial(_verified, fold))
            name, alone = "tree" if is_tree else "chain", bare if count == 1 else None
            yield [kind.__name__, batch, count, name, took, whole / took / 1e3, copy, alone]
        del layers
        torch.cuda.empty_cache()


def prompts(kind: type[Layer]) -> Iterator[list[object]]:
    for count, tokens in PROMPTS:
        table = torch.zeros(count + 1, 1, dtype=torch.int64, device="cuda")
        spans = Spans([0] * count, [tokens] * count, list(range(1, count + 1)), table, 16)
        layers = [kind(count, count * tokens, 1) for _ in range(3)]
        yield [kind.__name__, f"{count} x {tokens}", timed(layers, partial(_prefilled, spans))]


@torch.inference_mode()
def main() -> None:
    require_cuda()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a layer\n")
    heads = ["layer", "batch", "N", "", "verify", "GB/s of states", "a copy of them", "cannot go back"]
    rows = [row for kind in (Delta, Mamba) for row in verifies(kind)]
    print(tabulate(rows, headers=heads, tablefmt="github", floatfmt=".1f", missingval="-"), flush=True)
    rows = [row for kind in (Delta, Mamba) for row in prompts(kind)]
    print("\n" + tabulate(rows, headers=["layer", "prompts", "us"], tablefmt="github", floatfmt=".1f"))


if __name__ == "__main__":
    main()
