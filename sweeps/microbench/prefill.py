"""Parts of a prefill in Qwen3-8B's shapes, BF16: attention, elementwise kernels, GEMMs of many rows, all layers.

Random data; TFLOP/s of attention counts only the visible half of the scores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from specbatch.kernels.attention.hopper import Layout
from specbatch.kernels.attention.prefill.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import AttentionInputs, PrefillInputs, QKVLayout
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.elementwise.elementwise_triton import rms_norm, silu_and_mul
from specbatch.sweeps.microbench.runner import Call, Case, Row, Table

HEADS, KV, DIM, HIDDEN, MLP, PAGE = 32, 8, 128, 4096, 12288, 16
WIDTH = (HEADS + 2 * KV) * DIM
LAYERS = 36
GEMMS = {"qkv": (WIDTH, HIDDEN), "o": (HIDDEN, HEADS * DIM), "gate up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
BACKENDS = ("gluon", "triton", "torch")
PROMPTS = {
    **{f"{count}": [(0, count)] for count in (128, 512, 1024, 2048, 8192, 16384, 32768)},
    "8 x 1024": [(0, 1024)] * 8,
    "128 after 8192": [(8192, 8320)],
    "1024 after 8192": [(8192, 9216)],
    "8192 after 8192": [(8192, 16384)],
}


class Prompt:
    """Random queries, keys and values of some spans, all in the cache already."""

    def __init__(self, spans: list[tuple[int, int]], page: int = PAGE) -> None:
        starts, ends = map(list, zip(*spans, strict=True))
        pages = [math.ceil(end / page) for end in ends]
        order = (torch.randperm(sum(pages)) + 1).split(pages)
        table = torch.zeros(len(spans) + 1, max(pages), dtype=torch.int64)
        for row, owned in enumerate(order, 1):
            table[row, : len(owned)] = owned
        rows = list(range(1, len(spans) + 1))
        self.spans = RaggedBatch(starts, ends, rows, table.cuda(), page)
        total = self.spans.offsets[-1]
        shape = (sum(pages) + 1, page, KV, DIM)
        self.k_cache, self.v_cache = (_random(*shape) for _ in range(2))
        self.q, self.k, self.v = _random(total, HEADS, DIM), _random(total, KV, DIM), _random(total, KV, DIM)
        self.flop = 4 * DIM * HEADS * self.spans.scores

    def run(self, backend: PrefillAttention) -> torch.Tensor:
        return backend(PrefillInputs(self.q, self.k, self.v, self.k_cache, self.v_cache, self.spans))


class Model:
    """All layers with weights of their own, without embedding and head."""

    def __init__(self) -> None:
        self.layers = [[_random(*shape) / 64 for shape in GEMMS.values()] for _ in range(LAYERS)]
        self.norm = _random(HIDDEN)
        self.heads = _heads()

    def __call__(self, hidden: torch.Tensor, prompt: Prompt, backend: PrefillAttention) -> None:
        positions, slots = torch.arange(len(hidden), device="cuda"), prompt.spans.key_slots
        caches = prompt.k_cache, prompt.v_cache
        x = hidden.clone()
        for qkv, out, gate_up, down in self.layers:
            split = F.linear(rms_norm(x, self.norm, 1e-6), qkv)
            q, k, v = split_qkv_rope(AttentionInputs(split, self.heads, positions, *caches), slots)
            x.addmm_(backend(PrefillInputs(q, k, v, *caches, prompt.spans)).flatten(1), out.t())
            x.addmm_(silu_and_mul(F.linear(rms_norm(x, self.norm, 1e-6), gate_up)), down.t())


def tables() -> Iterator[Table]:
    yield Table(_attention(), "Attention", shows=("TFLOP/s",))
    yield Table(_new_lengths(), "Host time of a prompt length that is new, and of one seen before")
    yield Table(_elementwise(), "Elementwise", shows=("GB/s",))
    yield Table(
        _gemms(), "GEMMs by torch; residual added separately, in the GEMM's epilogue, in place", shows=("TFLOP/s",)
    )
    yield Table(_passes(), "Whole prefill", unit="ms")


def _attention() -> Iterator[Case]:
    for title, spans in PROMPTS.items():
        variants = {name: (name, PAGE) for name in BACKENDS}
        if spans[0][0]:  # the page size matters only for a cached prefix
            variants |= {f"{name}, pages of 64": (name, 64) for name in ("gluon", "triton")}
        calls: dict[str, list[Call]] = {}
        for label, (name, page) in variants.items():
            prompts = [Prompt(spans, page) for _ in range(4)]
            calls[label] = [partial(prompt.run, _backend(name)) for prompt in prompts]
        if spans == [(0, spans[0][1])]:
            calls["cuDNN"] = [partial(_cudnn, prompt) for prompt in prompts]
        yield Case({"tokens": title}, calls, flop=prompts[0].flop)


def _cudnn(prompt: Prompt) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (prompt.q, prompt.k, prompt.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _new_lengths() -> Iterator[Row]:
    for name in BACKENDS:
        prompts = [Prompt([(0, 517 + 29 * step)]) for step in range(6)]
        first, again = ([_host_ms(partial(prompt.run, _backend(name))) for prompt in prompts] for _ in range(2))
        yield {"backend": name, "new (ms)": f"{median(first[1:]):.3f}", "seen (ms)": f"{median(again):.3f}"}


def _host_ms(run: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def _elementwise() -> Iterator[Case]:
    weight, heads = _random(HIDDEN), _heads()
    for count in (128, 1024, 8192):
        copies = max(2, math.ceil(2**27 / (count * 2 * MLP * 2)))
        caches = [_random(count // PAGE + 1, PAGE, KV, DIM) for _ in range(2)]
        positions = torch.arange(count, device="cuda")
        operations: dict[str, tuple[Callable[[torch.Tensor], object], int, float]] = {  # width, bytes per byte read
            "rms_norm": (partial(rms_norm, weight=weight, eps=1e-6), HIDDEN, 2),
            "F.rms_norm": (partial(F.rms_norm, normalized_shape=(HIDDEN,), weight=weight, eps=1e-6), HIDDEN, 2),
            "silu_and_mul": (silu_and_mul, 2 * MLP, 1.5),
            "split_qkv_rope": (partial(_split, (heads, positions, *caches), positions + PAGE), WIDTH, 2),
        }
        for name, (call, width, moved) in operations.items():
            inputs = [_random(count, width) for _ in range(copies)]
            calls = {"kernel": [partial(call, x) for x in inputs]}
            yield Case({"rows": count, "operation": name}, calls, bytes=moved * inputs[0].nbytes)


def _split(rest: tuple[Any, ...], slots: torch.Tensor, x: torch.Tensor) -> object:
    return split_qkv_rope(AttentionInputs(x, *rest), slots)


def _gemms() -> Iterator[Case]:
    for name, (out, inner) in GEMMS.items():
        for rows in (128, 256, 512, 1024, 2048, 8192):
            weights = [_random(out, inner) / 64 for _ in range(4)]
            x, residual = _random(rows, inner), _random(rows, out)
            calls: dict[str, list[Call]] = {"linear": [partial(F.linear, x, weight) for weight in weights]}
            if out == HIDDEN:
                calls["linear + residual"] = [partial(_added, residual, x, weight) for weight in weights]
                calls["addmm"] = [partial(torch.addmm, residual, x, weight.t()) for weight in weights]
                calls["addmm_"] = [partial(residual.addmm_, x, weight.t()) for weight in weights]
            yield Case({"GEMM": name, "rows": rows}, calls, flop=2 * rows * out * inner)


def _added(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return residual + F.linear(x, weight)


def _passes() -> Iterator[Case]:
    """Back to back, the card's power limit lowers its clock after some 100 ms; a single prompt ends before that."""
    run = Model()
    for count in (128, 512, 1024, 2048, 8192):
        prompt, hidden = Prompt([(0, count)]), _random(count, HIDDEN)
        calls = {name: [partial(run, hidden, prompt, _backend(name))] for name in BACKENDS}
        for label, pause_s in (("0.1 s apart", 0.1), ("back to back", 0.0)):
            yield Case({"tokens": count, "replays": label}, calls, pause_s=pause_s)


def _backend(name: str) -> PrefillAttention:
    return prefill_backend(name, torch.device("cuda"), layout=Layout(torch.bfloat16, DIM, PAGE))


def _heads() -> QKVLayout:
    cos, sin = (_random(16384, DIM) for _ in range(2))
    return QKVLayout(HEADS, KV, DIM, _random(DIM), _random(DIM), 1e-6, cos, sin)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
