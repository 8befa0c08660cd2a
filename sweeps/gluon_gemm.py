"""How fast the products of a decode step could be with weights by TMA: a trial that the engine does not use.

    python -m specbatch.sweeps.gluon_gemm

The kernels of `gluon_products` in the chain of layers of `gemm_speed` (qkv, a stand-in for attention, o, gate and up,
down), beside the chain of the engine's kernels in the same process: microseconds per layer. Every variant runs in
processes of its own with a time limit: first all at once, which compiles them and compares them with float64, then one
by one for the time, since a kernel whose programs wait for each other might never end.

Attention: "late" lets the next kernel start when it has waited for the one before, "early" at once, "none" is left
out; "carved" asks for all of the L1 as shared memory, as programs of 224 KiB need it to start beside those of
attention.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import triton
import triton.language as tl
from tabulate import tabulate
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specbatch.kernels import skinny_gemm
from specbatch.sweeps import gemm_speed
from specbatch.sweeps.gemm_speed import HIDDEN, INNER, QKV, _attention_kernel
from specbatch.sweeps.gluon_products import COUNTERS, Plan, Product, layer_kernel, product_kernel

CHECK_LIMIT, TIME_LIMIT = 60, 25  # seconds
ROUNDS = 3
EPS = 1e-6
RESULT = "result: "
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
Attend = Callable[[torch.Tensor], torch.Tensor]
Chain = Callable[[Attend, int], None]


@dataclass(frozen=True)
class Variant:
    """block, stages and ahead as in `Plan`; gated: splits of that product; whole: one kernel from o to the next qkv.

    late: the next kernel starts when the last weights are asked for, else when the first have been used.
    """

    block: int
    stages: int
    ahead: int
    gated: int
    whole: bool
    late: bool = True
    warps: int = 4

    def plan(self, rows: int) -> Plan:
        return Plan(max(16, triton.next_power_of_2(rows)), self.block, self.stages, self.ahead)

    @property
    def products(self) -> dict[str, Product]:
        return {
            "qkv": Product(QKV, HIDDEN, 4, normed=True),
            "o": Product(HIDDEN, HIDDEN, 4, residual=True),
            "gate+up": Product(2 * INNER, HIDDEN, self.gated, gated=True, normed=True),
            "down": Product(HIDDEN, INNER, 8, residual=True),
        }


# A number: the engine's kernels with so many steps brought into the L2 before the wait.
VARIANTS: dict[str, Variant | int] = {
    "engine, 1 step in the L2": 1,
    "engine, 2 steps in the L2": 2,
    "products, early": Variant(128, 4, 0, 4, whole=False, late=False),
    "products": Variant(128, 4, 0, 4, whole=False),
    "products, L2": Variant(128, 4, 8, 4, whole=False),
    "products, 160 KiB ring, L2": Variant(256, 5, 4, 2, whole=False),
    "layer": Variant(256, 5, 0, 2, whole=True),
    "layer, L2": Variant(256, 5, 4, 2, whole=True),
    "layer, L2, 8 warps": Variant(256, 5, 4, 2, whole=True, warps=8),
    "layer, 176 KiB ring, L2": Variant(128, 11, 8, 4, whole=True),
}


@triton.jit  # type: ignore[untyped-decorator]
def _early_attention_kernel(  # type: ignore[no-untyped-def]
    qkv, y, rows, width, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    tl.extra.cuda.gdc_launch_dependents()
    _attention_kernel(qkv, y, rows, width, HIDDEN, BLOCK, True)


def _carve() -> None:
    """Both stand-ins for attention ask for as much shared memory as there is."""
    qkv = torch.zeros(16, QKV, device="cuda", dtype=torch.bfloat16)
    y = qkv.new_empty(16, HIDDEN)
    late = _attention_kernel[(32,)](qkv, y, 16, QKV, HIDDEN=HIDDEN, BLOCK=128, PDL=True, launch_pdl=True)
    early = _early_attention_kernel[(32,)](qkv, y, 16, QKV, HIDDEN=HIDDEN, BLOCK=128, launch_pdl=True)
    for kernel in (late, early):
        status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(kernel.function), CARVEOUT, 100)
        assert status == 0, f"cuFuncSetAttribute: {status}"


def _late(qkv: torch.Tensor) -> torch.Tensor:
    return gemm_speed._attention(qkv, True)


def _early(qkv: torch.Tensor) -> torch.Tensor:
    y = qkv.new_empty(qkv.shape[0], HIDDEN)
    _early_attention_kernel[(32,)](qkv, y, qkv.shape[0], QKV, HIDDEN=HIDDEN, BLOCK=128, launch_pdl=True)
    return y


def _none(qkv: torch.Tensor) -> torch.Tensor:
    """Not attention: some rows of the right size."""
    return qkv.view(-1)[: qkv.shape[0] * HIDDEN].view(-1, HIDDEN)


class Trial:
    """A variant's kernels with their scratch memory."""

    poison = False  # NaN wherever something must be written

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.sums = torch.full((skinny_gemm.WORKSPACE,), float("nan"), device="cuda")
        self.counters = torch.zeros(COUNTERS, device="cuda", dtype=torch.int32)

    def describe(self, name: str, weight: torch.Tensor) -> TensorDescriptor:
        return self.variant.products[name].describe(weight, self.variant.block)

    def product(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        variant, product, plan = self.variant, self.variant.products[name], self.variant.plan(len(x))
        y = x.new_full((len(x), product.outputs), float("nan")) if self.poison else x.new_empty(len(x), product.outputs)
        steps = product.tiles * product.strip // plan.block
        first = 64 * 32 * ["o", "gate+up", "down", "qkv"].index(name)  # counters fit one number of splits only
        product_kernel[(128,)](
            self.describe(name, weight), weight, x, norm, residual, y, self.sums, self.counters[first:], len(x), EPS,
            PRODUCT=product, SIGNAL=steps - plan.stages if variant.late else 0, PLAN=plan,
            num_warps=variant.warps, launch_pdl=True,
        )  # fmt: skip
        return y

    def layer(
        self,
        weights: dict[str, torch.Tensor],  # qkv: the next layer's; absent behind the last
        attention: torch.Tensor,
        x: torch.Tensor,
        norm: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """What every product gives, by name."""
        products, plan = self.variant.products, self.variant.plan(len(x))
        used = [products[name] for name in weights]
        widths = {name: products[name].outputs for name in ("o", "gate+up", "down", "qkv")}
        new = {name: x.new_empty(len(x), width) for name, width in widths.items()}
        if self.poison:
            for tensor in new.values():
                tensor.fill_(float("nan"))
        matrices = [weights.get(name, weights["o"]) for name in widths]
        has_next = "qkv" in weights
        names = ["o", "gate+up", "down", "qkv" if has_next else "o"]
        descriptors = [self.describe(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        layer_kernel[(128,)](
            *descriptors, *matrices, attention, x, *new.values(), norm, norm, self.sums, self.counters, len(x), EPS,
            OUT=products["o"], GATED=products["gate+up"], DOWN=products["down"],
            QKV=products["qkv"] if has_next else None, PIECES=max(product.strip for product in used) // plan.block,
            PLAN=plan, num_warps=self.variant.warps, launch_pdl=True,
        )  # fmt: skip
        return new if has_next else {name: new[name] for name in weights}

    def chain(self, bench: gemm_speed.Bench) -> Chain:
        weights = {name: bench.weights[name] for name in self.variant.products}
        layers = [dict(zip(weights, layer, strict=True)) for layer in zip(*weights.values(), strict=True)]
        norm = bench.norm

        def products(attend: Attend, rows: int) -> None:
            x = bench.rows[HIDDEN][:rows]
            for layer in layers:
                h = self.product("qkv", x, layer["qkv"], norm, x)
                x = self.product("o", attend(h), layer["o"], norm, x)
                h = self.product("gate+up", x, layer["gate+up"], norm, x)
                x = self.product("down", h, layer["down"], norm, x)

        def whole(attend: Attend, rows: int) -> None:
            x = bench.rows[HIDDEN][:rows]
            h = self.product("qkv", x, layers[0]["qkv"], norm, x)
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                rest = {name: layer[name] for name in ("o", "gate+up", "down")}
                given = self.layer(rest if following is None else {**rest, "qkv": following["qkv"]}, attend(h), x, norm)
                x, h = given["down"], given.get("qkv", h)

        return whole if self.variant.whole else products


def _engine_product(
    name: str, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor, ahead: int
) -> torch.Tensor:
    weight_of_norm, added = (None, residual) if name in ("o", "down") else (norm, None)
    gated = name == "gate+up"
    return skinny_gemm._product(x, weight, None, weight_of_norm, EPS, added, gated=gated, ahead=ahead)


def _engine(bench: gemm_speed.Bench, ahead: int) -> Chain:
    def run(attend: Attend, rows: int) -> None:
        x = bench.rows[HIDDEN][:rows]
        for qkv, o, gated, down in zip(*list(bench.weights.values())[:4], strict=True):
            h = attend(_engine_product("qkv", x, qkv, bench.norm, x, ahead))
            x = _engine_product("o", h, o, bench.norm, x, ahead)
            h = _engine_product("gate+up", x, gated, bench.norm, x, ahead)
            x = _engine_product("down", h, down, bench.norm, x, ahead)

    return run


def _check_engine(ahead: int) -> float:
    """The bits must be those without steps ahead."""
    norm = torch.rand(HIDDEN, device="cuda").add_(0.5).bfloat16()
    residual = torch.randn(16, HIDDEN, device="cuda").bfloat16()
    for name, product in Variant(0, 0, 0, 2, whole=False).products.items():
        weight = gemm_speed._matrix(product.n, product.k)
        x = torch.randn(16, product.k, device="cuda").bfloat16()
        for rows in (1, 16):
            old, new = (_engine_product(name, x[:rows], weight, norm, residual[:rows], n) for n in (0, ahead))
            assert torch.equal(old, new), f"{name}, {rows} rows: differs"
    return 0.0


def _reference(product: Product, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor):  # type: ignore[no-untyped-def]
    """In float64, but for x times the norm's weight, which the tensor cores need rounded."""
    if product.normed:
        scaling = torch.rsqrt(x.double().pow(2).mean(1, keepdim=True) + EPS)
        x = (x.float() * norm.float()).bfloat16().double() * scaling
    x = x.double()
    y = x @ weight.double().T
    if product.gated:
        y = torch.nn.functional.silu(y[:, : product.outputs]) * y[:, product.outputs :]
    return y + residual.double() if product.residual else y


def _warm(_: Variant | int) -> None:
    """Compiles what the variants are compared with."""
    skinny_gemm.workspace(torch.device("cuda"))
    chain = _engine(gemm_speed.Bench(), 0)
    for rows in (1, 16):
        for attend in (_late, _early):
            chain(attend, rows)
    torch.cuda.synchronize()


def _check(variant: Variant | int) -> float:
    """Compares every product with float64, twice for the same bits; returns the largest error over the tolerance."""
    if isinstance(variant, int):
        return _check_engine(variant)
    trial, worst = Trial(variant), 0.0
    trial.poison = True
    norm = torch.rand(HIDDEN, device="cuda").add_(0.5).bfloat16()
    weights = {name: gemm_speed._matrix(product.n, product.k) for name, product in variant.products.items()}
    for rows in (1, 3, 16):
        x, attention, inner = (torch.randn(rows, n, device="cuda").bfloat16() for n in (HIDDEN, HIDDEN, INNER))

        def run() -> dict[str, torch.Tensor]:
            given = {
                name: trial.product(name, inner if name == "down" else x, weight, norm, x)  # noqa: B023
                for name, weight in weights.items()
            }
            if variant.whole:
                rest = {name: weights[name] for name in ("o", "gate+up", "down")}
                last = trial.layer(rest, attention, x, norm)  # noqa: B023
                whole = trial.layer({**rest, "qkv": weights["qkv"]}, attention, x, norm)  # noqa: B023
                assert all(torch.equal(last[name], whole[name]) for name in rest), "the last layer differs"
                given |= {f"layer {name}": tensor for name, tensor in whole.items()}
            return given

        given, again = run(), run()
        inputs = {"qkv": (x, x), "o": (x, x), "gate+up": (x, x), "down": (inner, x)}
        if variant.whole:  # each stage from what the kernel gave before it
            o, gated, down = (given[f"layer {name}"] for name in ("o", "gate+up", "down"))
            inputs |= {"layer o": (attention, x), "layer gate+up": (o, o), "layer down": (gated, o)}
            inputs |= {"layer qkv": (down, down)}
        for name, y in given.items():
            assert torch.equal(y, again[name]), f"{name}, {rows} rows: two runs differ"
            product = name.removeprefix("layer ")
            right = _reference(variant.products[product], inputs[name][0], weights[product], norm, inputs[name][1])
            allowed = 0.01 * right.abs() + 0.02 * right.pow(2).mean().sqrt()
            error = ((y - right).abs() / allowed).max().item()
            assert error < 1, f"{name}, {rows} rows: {error:.2f} times the tolerance"  # NaN fails, too
            worst = max(worst, error)
    return worst


def _time(variant: Variant | int) -> dict[str, tuple[float, float]]:
    """Microseconds per layer of the engine's kernels and of the variant, by rows and attention."""
    bench = gemm_speed.Bench()
    skinny_gemm.workspace(torch.device("cuda"))
    mine = _engine(bench, variant) if isinstance(variant, int) else Trial(variant).chain(bench)
    chains = _engine(bench, 0), mine
    figures = {}

    def measure(name: str, attend: Attend, rows: int) -> None:
        rounds = [
            [gemm_speed._microseconds(lambda chain=chain: chain(attend, rows)) for chain in chains]  # type: ignore[misc]
            for _ in range(ROUNDS)
        ]
        figures[name] = tuple(median(times) / gemm_speed.MEASURED_LAYERS for times in zip(*rounds, strict=True))

    measure("1 row", _late, 1)
    measure("16", _late, 16)
    measure("16, early", _early, 16)
    measure("16, none", _none, 16)
    _carve()
    measure("16, carved", _late, 16)
    measure("16, early, carved", _early, 16)
    return figures


def _child(name: str, task: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specbatch.sweeps.gluon_gemm", name, task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _answer(child: subprocess.Popen[str], deadline: float) -> tuple[object, str]:
    """The child's result and "", or None and what went wrong."""
    try:
        output, _ = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        return None, "no end"
    lines = output.strip().splitlines() or [""]
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    return (json.loads(results[-1]), "") if results else (None, lines[-1][:100])


@torch.inference_mode()
def main() -> None:
    if len(sys.argv) == 3:
        name, task = sys.argv[1:]
        tasks: dict[str, Callable[[Variant | int], object]] = {"compile": _warm, "check": _check, "time": _time}
        print(RESULT + json.dumps(tasks[task](VARIANTS[name])), flush=True)
        return
    deadline = time.monotonic() + CHECK_LIMIT
    engine = _child(next(iter(VARIANTS)), "compile")
    children = {name: _child(name, "check") for name in VARIANTS}
    print("engine:", _answer(engine, deadline)[1] or "compiled", flush=True)
    checked = {name: _answer(child, deadline) for name, child in children.items()}
    table = []
    for name, (error, trouble) in checked.items():
        figures, trouble = (None, trouble) if trouble else _answer(_child(name, "time"), time.monotonic() + TIME_LIMIT)
        row = {"variant": name, "error / tolerance": "" if error is None else f"{error:.2f}"}
        if isinstance(figures, dict):
            row |= {column: f"{engine:.1f} / {ours:.1f}" for column, (engine, ours) in figures.items()}
        table.append(row | ({"trouble": trouble} if trouble else {}))
        print(table[-1], flush=True)
    print(f"\nMicroseconds per layer, engine / variant; {torch.cuda.get_device_name()}, triton {triton.__version__}\n")
    print(tabulate(table, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
