"""What the pieces of a prefill cost on one GPU: attention, elementwise kernels, products of many rows.

    python -m specbatch.sweeps.microbench.prefill

Shapes of Qwen3-8B (32 query and 8 KV heads of 128, hidden 4096, MLP 12288) in bfloat16, random data. Microseconds are
medians of replays of a CUDA graph that holds several calls, each on inputs of its own; TFLOP/s counts the visible half
of the scores only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from tabulate import tabulate

from specbatch.kernels.attention.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.attention.qkv import Heads, split_heads
from specbatch.kernels.attention.ragged_batch import Spans
from specbatch.kernels.elementwise.elementwise_triton import rms_norm, silu_product
from specbatch.sweeps.bench.machine import require_cuda

HEADS, KV, DIM, HIDDEN, MLP, PAGE = 32, 8, 128, 4096, 12288, 16
WIDTH = (HEADS + 2 * KV) * DIM
LAYERS = 36
PRODUCTS = {"qkv": (WIDTH, HIDDEN), "o": (HIDDEN, HEADS * DIM), "gate up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
PROMPTS = {
    **{f"{count}": [(0, count)] for count in (128, 512, 1024, 2048, 8192)},
    "8 x 1024": [(0, 1024)] * 8,
    "128 behind 8192": [(8192, 8320)],
    "1024 behind 8192": [(8192, 9216)],
}
Rows = list[dict[str, object]]


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 5, pause: float = 0.0) -> float:
    """Median time of one of `calls`, which are captured in one graph; `pause` seconds lie between its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compile and create handles before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        time.sleep(pause)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 * median(times[1:]) / len(calls)


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
        self.spans = Spans(starts, ends, rows, table.cuda(), page)
        total = self.spans.offsets[-1]
        shape = (sum(pages) + 1, page, KV, DIM)
        self.k_cache, self.v_cache = (random_(*shape) for _ in range(2))
        self.q, self.k, self.v = random_(total, HEADS, DIM), random_(total, KV, DIM), random_(total, KV, DIM)
        self.flop = 4 * DIM * HEADS * self.spans.scores

    def run(self, backend: PrefillAttention) -> torch.Tensor:
        return backend(self.q, self.k, self.v, self.k_cache, self.v_cache, self.spans)


def random_(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention(names: Sequence[str]) -> Rows:
    rows: Rows = []
    for title, spans in PROMPTS.items():
        row: dict[str, object] = {"tokens": title}
        for name, page in [*((name, PAGE) for name in names), ("triton", 64)]:
            if page != PAGE and not spans[0][0]:
                continue  # pages matter behind a prefix only
            prompts = [Prompt(spans, page) for _ in range(4)]
            backend = prefill_backend(name, torch.device("cuda"), torch.bfloat16, DIM)
            time_us = microseconds([partial(prompt.run, backend) for prompt in prompts])
            label = name if page == PAGE else f"{name}, pages of {page}:"
            row |= {f"{label} us": round(time_us, 1), f"{label} TFLOP/s": round(prompts[0].flop / time_us / 1e6)}
        rows.append(row)
    return rows


def new_lengths(names: Sequence[str]) -> Rows:
    """What a prompt of a length not seen before costs the host, and one of a length seen: milliseconds."""
    rows: Rows = []
    for name in names:
        backend = prefill_backend(name, torch.device("cuda"), torch.bfloat16, DIM)
        prompts = [Prompt([(0, 517 + 29 * step)]) for step in range(6)]
        first: list[float] = []
        again: list[float] = []
        for times in (first, again):
            for prompt in prompts:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                prompt.run(backend)
                times.append(1000 * (time.perf_counter() - begin))
        rows.append({"backend": name, "new length ms": median(first[1:]), "seen length ms": median(again)})
    return rows


def elementwise() -> Rows:
    return [_elementwise(count) for count in (128, 1024, 8192)]


def _elementwise(count: int) -> dict[str, object]:
    copies = max(2, math.ceil(2**27 / (count * 2 * MLP * 2)))
    weight = random_(HIDDEN)
    heads = make_heads()
    k_cache, v_cache = (random_(count // PAGE + 1, PAGE, KV, DIM) for _ in range(2))
    positions = torch.arange(count, device="cuda")
    work: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, float]] = {  # width, bytes moved per byte read
        "rms_norm": (lambda x: rms_norm(x, weight, 1e-6), HIDDEN, 2),
        "F.rms_norm": (lambda x: F.rms_norm(x, (HIDDEN,), weight, 1e-6), HIDDEN, 2),
        "silu_product": (silu_product, 2 * MLP, 1.5),
        "split_heads": (lambda x: split_heads(x, heads, positions, positions + PAGE, k_cache, v_cache)[0], WIDTH, 2),
    }
    row: dict[str, object] = {"rows": count}
    for name, (call, width, moved) in work.items():
        inputs = [random_(count, width) for _ in range(copies)]
        time_us = microseconds([partial(call, x) for x in inputs])
        row |= {f"{name} us": round(time_us, 2), f"{name} GB/s": round(moved * inputs[0].nbytes / time_us / 1e3)}
    return row


def products() -> Rows:
    """F.linear, with its sum with a residual in a kernel of its own and in the product's epilogue."""
    return [_product(name, rows) for name in PRODUCTS for rows in (128, 256, 512, 1024, 2048, 8192)]


def _product(name: str, rows: int) -> dict[str, object]:
    out, inner = PRODUCTS[name]
    weights = [random_(out, inner) / 64 for _ in range(4)]
    x, residual = random_(rows, inner), random_(rows, out)

    def each(call: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return microseconds([partial(call, weight) for weight in weights])

    time_us = each(lambda w: F.linear(x, w))
    row: dict[str, object] = {"product": name, "rows": rows, "linear us": round(time_us, 1)}
    row["TFLOP/s"] = round(2 * rows * out * inner / time_us / 1e6)
    if out == HIDDEN:
        row["linear + residual us"] = round(each(lambda w: residual + F.linear(x, w)), 1)
        row["addmm us"] = round(each(lambda w: torch.addmm(residual, x, w.t())), 1)
        row["addmm_ us"] = round(each(lambda w: residual.addmm_(x, w.t())), 1)
    return row


class Pass:
    """A prompt through all layers, with weights of their own: what TTFT cannot beat with these pieces, but the head."""

    def __init__(self) -> None:
        self.layers = [[random_(*shape) / 64 for shape in PRODUCTS.values()] for _ in range(LAYERS)]
        self.norm = random_(HIDDEN)
        self.heads = make_heads()

    def __call__(self, hidden: torch.Tensor, prompt: Prompt, backend: PrefillAttention) -> None:
        positions, slots = torch.arange(len(hidden), device="cuda"), prompt.spans.key_slots
        caches = prompt.k_cache, prompt.v_cache
        x = hidden.clone()
        for qkv, out, gate_up, down in self.layers:
            split = F.linear(rms_norm(x, self.norm, 1e-6), qkv)
            q, k, v = split_heads(split, self.heads, positions, slots, *caches)
            x.addmm_(backend(q, k, v, *caches, prompt.spans).flatten(1), out.t())
            x.addmm_(silu_product(F.linear(rms_norm(x, self.norm, 1e-6), gate_up)), down.t())


def passes(names: Sequence[str]) -> Rows:
    """Back to back, the card's power limit lowers its clock after some 100 ms; a lone prompt does not get there."""
    run = Pass()
    rows: Rows = []
    for count in (128, 512, 1024, 2048, 8192):
        prompt, hidden = Prompt([(0, count)]), random_(count, HIDDEN)
        row: dict[str, object] = {"tokens": count}
        for name in names:
            call = partial(run, hidden, prompt, prefill_backend(name, torch.device("cuda"), torch.bfloat16, DIM))
            for title, pause in ((name, 0.1), (f"{name}, back to back", 0.0)):
                row[f"{title} ms"] = round(microseconds([call], pause=pause) / 1000, 2)
        rows.append(row)
    return rows


def make_heads() -> Heads:
    cos, sin = (random_(16384, DIM) for _ in range(2))
    return Heads(HEADS, KV, DIM, random_(DIM), random_(DIM), 1e-6, cos, sin)


@torch.inference_mode()
def main() -> None:
    require_cuda()
    names = ["triton", "torch"]
    sections: dict[str, Callable[[], Rows]] = {
        "Attention": lambda: attention(names),
        "A length not seen before": lambda: new_lengths(names),
        "Elementwise": elementwise,
        "Products": products,
        "A whole prefill": lambda: passes(names),
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for title, section in sections.items():
        print(f"\n{title}\n\n{tabulate(section(), headers='keys', tablefmt='github')}", flush=True)


if __name__ == "__main__":
    main()
