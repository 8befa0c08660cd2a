"""What the pieces of a prefill cost on one GPU: attention, elementwise kernels, products of many rows.

    python -m specbatch.sweeps.prefill_speed

Shapes of Qwen3-8B (32 query and 8 KV heads of 128, hidden 4096, MLP 12288) in bfloat16, random data. Microseconds are
medians of replays of a CUDA graph that holds several calls, each on inputs of its own; TFLOP/s counts the visible half
of the scores only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from tabulate import tabulate

from specbatch.kernels.backends import PrefillAttention, prefill_backend
from specbatch.kernels.elementwise import rms_norm, silu_product, split_heads
from specbatch.kernels.heads import Heads
from specbatch.kernels.norm import rms_norm_ref
from specbatch.kernels.spans import Spans

HEADS, KV, DIM, HIDDEN, MLP, PAGE = 32, 8, 128, 4096, 12288, 16
LAYERS = 36
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (24576, 4096), "down": (4096, 12288)}
PROMPTS = {
    **{f"{count}": [(0, count)] for count in (128, 512, 1024, 2048, 8192)},
    "8 x 1024": [(0, 1024)] * 8,
    "128 behind 8192": [(8192, 8320)],
    "1024 behind 8192": [(8192, 9216)],
}
Rows = list[dict[str, object]]


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median time of one of `calls`, which are captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compile and create handles before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
        prompts = [Prompt(spans) for _ in range(4)]
        row: dict[str, object] = {"tokens": title}
        for name in names:
            backend = prefill_backend(name, torch.device("cuda"), torch.bfloat16, DIM)
            time_us = microseconds([lambda p=prompt, b=backend: p.run(b) for prompt in prompts])
            row |= {f"{name} us": round(time_us, 1), f"{name} TFLOP/s": round(prompts[0].flop / time_us / 1e6)}
        rows.append(row)
    return rows


def new_lengths(names: Sequence[str]) -> Rows:
    """What a prompt of a length not seen before costs the host, and one of a length seen: milliseconds."""
    rows: Rows = []
    for name in names:
        backend = prefill_backend(name, torch.device("cuda"), torch.bfloat16, DIM)
        prompts = [Prompt([(0, 517 + 29 * step)]) for step in range(6)]
        first, again = [], []
        for times in (first, again):
            for prompt in prompts:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                prompt.run(backend)
                times.append(1000 * (time.perf_counter() - begin))
        rows.append({"backend": name, "new length ms": median(first[1:]), "seen length ms": median(again)})
    return rows


def elementwise() -> Rows:
    rows: Rows = []
    cos, sin = (random_(16384, DIM) for _ in range(2))
    heads = Heads(HEADS, KV, DIM, random_(DIM), random_(DIM), 1e-6, cos, sin)
    weight = random_(HIDDEN)
    for count in (128, 1024, 8192):
        copies = max(2, math.ceil(2**27 / (count * 2 * MLP * 2)))
        xs = [random_(count, HIDDEN) for _ in range(copies)]
        ups = [random_(count, 2 * MLP) for _ in range(copies)]
        qkvs = [random_(count, (HEADS + 2 * KV) * DIM) for _ in range(copies)]
        caches = [random_(count // PAGE + 1, PAGE, KV, DIM) for _ in range(2)]
        positions = torch.arange(count, device="cuda")
        slots = positions + PAGE
        calls = {
            "rms_norm": ([lambda x=x: rms_norm(x, weight, 1e-6) for x in xs], 2 * xs[0].nbytes),
            "rms_norm_ref": ([lambda x=x: rms_norm_ref(x, weight, 1e-6) for x in xs], 2 * xs[0].nbytes),
            "F.rms_norm": ([lambda x=x: F.rms_norm(x, (HIDDEN,), weight, 1e-6) for x in xs], 2 * xs[0].nbytes),
            "silu_product": ([lambda u=u: silu_product(u) for u in ups], ups[0].nbytes * 3 // 2),
            "split_heads": (
                [lambda x=x: split_heads(x, heads, positions, slots, caches[0], caches[1]) for x in qkvs],
                2 * qkvs[0].nbytes,
            ),
        }
        row: dict[str, object] = {"rows": count}
        for name, (each, size) in calls.items():
            time_us = microseconds(each)
            row |= {f"{name} us": round(time_us, 2), f"{name} GB/s": round(size / time_us / 1e3)}
        rows.append(row)
    return rows


def products() -> Rows:
    """F.linear, with its sum with a residual in a kernel of its own and in the product's epilogue."""
    rows: Rows = []
    for name, (out, inner) in PRODUCTS.items():
        weights = [random_(out, inner) / 64 for _ in range(3)]
        for count in (128, 256, 512, 1024, 2048, 8192):
            x = random_(count, inner)
            time_us = microseconds([lambda w=w: F.linear(x, w) for w in weights * 2])
            row: dict[str, object] = {"product": name, "rows": count, "linear us": round(time_us, 1)}
            row["TFLOP/s"] = round(2 * count * out * inner / time_us / 1e6)
            if out == HIDDEN:
                residual = random_(count, out)
                row["+ residual us"] = round(microseconds([lambda w=w: residual + F.linear(x, w) for w in weights]), 1)
                row["addmm us"] = round(microseconds([lambda w=w: torch.addmm(residual, x, w.t()) for w in weights]), 1)
                row["addmm_ us"] = round(microseconds([lambda w=w: residual.addmm_(x, w.t()) for w in weights]), 1)
                residual.zero_()
            rows.append(row)
    return rows


@torch.inference_mode()
def main() -> None:
    names = ["triton", "torch"]
    sections: dict[str, Callable[[], Rows]] = {
        "Attention": lambda: attention(names),
        "A length not seen before": lambda: new_lengths(names),
        "Elementwise": elementwise,
        "Products": products,
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for title, section in sections.items():
        print(f"\n{title}\n\n{tabulate(section(), headers='keys', tablefmt='github')}", flush=True)


if __name__ == "__main__":
    main()
