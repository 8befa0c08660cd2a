"""How fast the products of a decode step are on a GPU.

    python -m specbatch.sweeps.microbench.gemm

Each product of Qwen3-8B for 1 to 128 rows beside `torch.nn.functional.linear`, then the chain of whole layers, in which
every product waits for the one before: qkv with its norm, a stand-in for attention (5 us on 32 multiprocessors), o with
its residual, the gated pair, down with its residual. Graph replays over weights that do not fit the L2; microseconds,
medians. The floor is the time to read the weights once at 4.57 TB/s, the most a reading kernel reached on an H200.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from tabulate import tabulate

from specbatch.kernels.gemm import skinny_gemm
from specbatch.sweeps.bench.machine import replay_seconds, require_cuda

READ = 4.57e6  # bytes per microsecond
HIDDEN, QKV, INNER, VOCABULARY, LAYERS = 4096, 6144, 12288, 151936, 36
MEASURED_LAYERS = 8
REPEATS = 15


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    qkv, y, rows, width, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copies the query heads and spins for some 4 us."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, 128)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    query = tl.load(qkv + row * width + column, mask=row < rows)
    tl.store(y + row * HIDDEN + column, query, mask=row < rows)
    tl.inline_asm_elementwise(
        "{ .reg .u64 from, now; .reg .pred more; mov.u64 from, %clock64;\n"
        "spin: mov.u64 now, %clock64; sub.u64 now, now, from; setp.lt.u64 more, now, 8000; @more bra spin;\n"
        "mov.u32 $0, 0; }",
        "=r,r",
        [tl.arange(0, 128)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _attention(qkv: torch.Tensor, pdl: bool) -> torch.Tensor:
    y = qkv.new_empty(qkv.shape[0], HIDDEN)
    _attention_kernel[(32,)](qkv, y, qkv.shape[0], qkv.shape[1], HIDDEN=HIDDEN, BLOCK=128, PDL=pdl, launch_pdl=pdl)
    return y


def _matrix(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)


class Bench:
    """Weights of eight layers and a head, and rows to multiply."""

    def __init__(self) -> None:
        sizes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate+up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = {name: [_matrix(*size) for _ in range(MEASURED_LAYERS)] for name, size in sizes.items()}
        self.weights["head"] = [_matrix(VOCABULARY, HIDDEN) for _ in range(2)]
        self.norm = torch.rand(HIDDEN, device="cuda").add_(0.5).bfloat16()
        self.rows = {width: torch.randn(128, width, device="cuda").bfloat16() for width in (HIDDEN, INNER)}

    def product(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, *, pdl: bool = True
    ) -> torch.Tensor:
        gated, normed = name == "gate+up", name in ("qkv", "gate+up", "head")
        norm, added = self.norm if normed else None, residual if name in ("o", "down") else None
        return skinny_gemm._product(x, weight, None, norm, 1e-6, added, gated=gated, pdl=pdl)

    def chain(self, rows: int, *, pdl: bool = True, attention: bool = True) -> float:
        """Microseconds per layer."""

        def run() -> None:
            x = self.rows[HIDDEN][:rows]
            for qkv, o, gated, down in zip(*list(self.weights.values())[:4], strict=True):
                h = self.product("qkv", x, qkv, x, pdl=pdl)
                h = _attention(h, pdl) if attention else h[:, :HIDDEN]
                x = self.product("o", h, o, x, pdl=pdl)
                h = self.product("gate+up", x, gated, x, pdl=pdl)
                x = self.product("down", h, down, x, pdl=pdl)

        return 1e6 * replay_seconds(run, REPEATS) / MEASURED_LAYERS

    def single(self, name: str, rows: int, *, library: bool) -> float:
        """Microseconds of one product; ours with the norm, residual or gating that the model has there."""
        weights = self.weights[name]
        x, residual = self.rows[weights[0].shape[1]][:rows], self.rows[HIDDEN][:rows]

        def run() -> None:
            for weight in weights:
                if library:
                    F.linear(x, weight)
                else:
                    self.product(name, x, weight, residual)

        return 1e6 * replay_seconds(run, REPEATS) / len(weights)


@torch.inference_mode()
def main() -> None:
    require_cuda()
    skinny_gemm.workspace(torch.device("cuda"))
    bench = Bench()
    table = []
    for name, weights in bench.weights.items():
        for rows in (1, 4, 16, 32, 64, 128):
            ours, library = (bench.single(name, rows, library=flag) for flag in (False, True))
            floor = weights[0].numel() * 2 / READ
            figures = {"floor": floor, "library": library, "specbatch": ours}
            table.append({"product": name, "rows": rows, **{k: f"{v:.1f}" for k, v in figures.items()}})
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, triton {triton.__version__}\n")
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))
    layer = sum(bench.weights[name][0].numel() * 2 for name in ("qkv", "o", "gate+up", "down")) / READ
    table = []
    for rows in (1, 16, 32, 64):
        figures = {
            "no PDL": bench.chain(rows, pdl=False),
            "PDL": bench.chain(rows),
            "PDL, no attention": bench.chain(rows, attention=False),
        }
        step = (LAYERS * figures["PDL"] + bench.single("head", rows, library=False)) / 1000
        cells = {**{k: f"{v:.1f}" for k, v in figures.items()}, f"{LAYERS} layers and head, ms": f"{step:.2f}"}
        table.append({"rows": rows, "floor": f"{layer:.1f}", **cells})
    print("\nMicroseconds per layer of the chain:\n")
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
