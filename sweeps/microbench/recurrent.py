"""Recurrent layers of Qwen3.5-35B-A3B (gated delta rule) and Nemotron-Nano-9B-v2 (Mamba2), gated norm included.

A verify of N rows reads and writes every state once; a copy of the states does only that. N = 1 is decoding without
speculation. "In place" is a step that overwrites its state and keeps nothing, so that it could not be rolled back: the
difference is what rollback costs. "Deterministic" goes row by row. BF16 with FP32 states; cycles through more layers
than a cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.recurrent.gated_delta import delta_prefill, delta_verify
from specbatch.kernels.recurrent.inputs import DeltaHeads, DeltaInputs, Pending, SsdHeads, SsdInputs, SsdMemory
from specbatch.kernels.recurrent.mamba2 import ssd_prefill, ssd_verify
from specbatch.kernels.recurrent.state_replay import StateReplay
from specbatch.kernels.sampling.tree_verify import ancestor_words
from specbatch.sweeps.microbench.recurrent_in_place import delta_in_place, mamba_in_place
from specbatch.sweeps.microbench.runner import Call, Case, Row, Table

BATCHES = (1, 32, 128)
ROWS = ((1, False), (2, False), (4, False), (8, False), (8, True))  # of a verify; a tree?
PROMPTS = ((1, 1024), (1, 8192), (32, 256))  # spans, tokens of each
LAYERS = 27


class Delta:
    """32 value heads and 16 key heads of 128."""

    keys, values, dim = 16, 32, 128

    def __init__(self, batch: int, tokens: int, rows: int) -> None:
        random = partial(torch.randn, device="cuda")
        width_qkv = 2 * self.keys * self.dim + self.values * self.dim
        norm = torch.ones(self.dim, device="cuda", dtype=torch.bfloat16)
        gates = random(self.values) - 1, random(self.values) - 1
        heads = DeltaHeads(self.keys, self.values, self.dim, self.dim, *gates, norm, 1e-6)
        widths = width_qkv, self.values * self.dim, self.values, self.values
        qkv, z, b, a = (random(tokens, width).bfloat16() for width in widths)
        self.state = random(batch + 1, self.values, self.dim, self.dim)
        self.inputs = DeltaInputs(qkv, z, b, a, heads, self.state)
        shapes = (self.keys, self.dim), (self.values, self.dim), (self.values,)
        self.pending = Pending(*(-torch.rand(batch + 1, rows, *shape, device="cuda") for shape in shapes))

    def verify(self, replay: StateReplay) -> object:
        return delta_verify(self.inputs, self.pending, replay)

    def prefill(self, spans: RaggedBatch) -> object:
        return delta_prefill(self.inputs, spans)

    def in_place(self) -> object:
        return delta_in_place(self.inputs._replace(state=self.state[1:]))


class Mamba:
    """128 heads of 80 in 8 groups, state size 128."""

    count, dim, groups, size = 128, 80, 8, 128

    def __init__(self, batch: int, tokens: int, rows: int) -> None:
        random = partial(torch.randn, device="cuda")
        inner, side = self.count * self.dim, self.groups * self.size
        a_log, d, bias = torch.rand(3, self.count, device="cuda")
        norm = Norm(torch.ones(inner, device="cuda", dtype=torch.bfloat16), 1e-5)
        heads = SsdHeads(self.count, self.dim, self.groups, self.size, 3 * a_log - 2, d, 2 * bias - 3, norm)
        xbc, dt, z = (random(tokens, width).bfloat16() for width in (inner + 2 * side, self.count, inner))
        self.state = random(batch + 1, self.count, self.dim, self.size)
        pending = random(batch + 1, rows, inner + side + self.count).bfloat16()
        self.inputs = SsdInputs(xbc, dt, z, heads, SsdMemory(self.state, pending))

    def verify(self, replay: StateReplay) -> object:
        return ssd_verify(self.inputs, replay)

    def prefill(self, spans: RaggedBatch) -> object:
        return ssd_prefill(self.inputs, spans)

    def in_place(self) -> object:
        memory = self.inputs.memory
        return mamba_in_place(self.inputs._replace(memory=SsdMemory(memory.state[1:], memory.pending[1:])))


Layer = Delta | Mamba


def tables() -> Iterator[Table]:
    yield Table((case for kind in (Delta, Mamba) for case in _verifies(kind)), "Verify", shows=("GB/s",))
    yield Table((case for kind in (Delta, Mamba) for case in _prompts(kind)), "Prompts")


def _verifies(kind: type[Layer]) -> Iterator[Case]:
    for batch in BATCHES:
        rows = torch.arange(1, batch + 1, device="cuda")
        for count, is_tree in ROWS:
            layers = [kind(batch, batch * count, count) for _ in range(2 if batch > 64 else LAYERS)]
            replay = StateReplay(rows, torch.full((batch + 1,), max(1, count - 1), device="cuda"))
            if is_tree:
                parents = torch.arange(count - 1, device="cuda").expand(batch, -1) // 2
                kept = torch.arange(count, device="cuda").expand(batch + 1, -1).contiguous()
                replay = replay._replace(path=kept, ancestors=ancestor_words(parents, count))
            state = layers[0].state[1:]
            copy = torch.empty_like(state)
            calls: dict[str, list[Call]] = {
                "verify": [partial(layer.verify, replay) for layer in layers],
                "deterministic": [_deterministic(partial(layer.verify, replay)) for layer in layers],
                "copy of the states": [partial(copy.copy_, layer.state[1:]) for layer in layers],
            }
            if count == 1:
                calls["in place"] = [layer.in_place for layer in layers]
            labels: Row = {"layer": kind.__name__, "batch": batch, "N": count, "": "tree" if is_tree else "chain"}
            yield Case(labels, calls, bytes=2 * state.nbytes)
            torch.cuda.empty_cache()


def _prompts(kind: type[Layer]) -> Iterator[Case]:
    for count, tokens in PROMPTS:
        table = torch.zeros(count + 1, 1, dtype=torch.int64, device="cuda")
        spans = RaggedBatch([0] * count, [tokens] * count, list(range(1, count + 1)), table, 16)
        layers = [kind(count, count * tokens, 1) for _ in range(3)]
        labels: Row = {"layer": kind.__name__, "prompts": f"{count} x {tokens}"}
        calls = [partial(layer.prefill, spans) for layer in layers]
        yield Case(labels, {"prefill": calls, "deterministic": [_deterministic(call) for call in calls]})


def _deterministic(call: Call) -> Call:
    def run() -> object:
        with use_deterministic():
            return call()

    return run
