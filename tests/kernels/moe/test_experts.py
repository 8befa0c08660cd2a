"""MoE expert GEMMs match float64, where every expert runs on every token, and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crossed import crossed, first_quick, slow_but
from dtypes import HALVES
from mxfp4_encoding import encoded
from watched_calls import Watch

from specbatch.errors import SpecbatchError
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized import fp8_quantize_triton
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations, use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.fp8_quantize import quantize_fp8, quantize_fp8_ref
from specbatch.kernels.gemm.quantized.int4 import Int4Weight, int4_tiles, pack_int4
from specbatch.kernels.gemm.quantized.mxfp4 import Mxfp4Weight, pack_mxfp4
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.kernels.moe import experts_triton
from specbatch.kernels.moe.expert_weights import Activation, Biases, ExpertWeights
from specbatch.kernels.moe.experts import Experts, experts_ref, slices_of_down, slices_of_up
from specbatch.kernels.moe.experts_triton import Tile, fused_moe, grouped, rows_for, weighted_sum
from specbatch.kernels.moe.routing import Routing, route_ref
from specbatch.kernels.moe.routing_triton import route

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # ||y - expected|| / ||expected||


@pytest.fixture(autouse=True)
def poisoned(watch: Watch) -> None:
    """Uninitialised memory holds NaN, or ids of experts that do not exist."""

    def poison(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        tensor.fill_(torch.nan if tensor.is_floating_point() else min(1 << 28, torch.iinfo(tensor.dtype).max))

    watch(torch, "empty", after=poison)


class Case:
    """An MoE layer with random weights, and its expected output."""

    def __init__(
        self, rule: Routing, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32, *,
        hidden: int = 34, inner: int = 15, activation: Activation = "swiglu", logits: torch.Tensor | None = None,
        biased: bool = False,
    ) -> None:  # fmt: skip
        self.rule, self.activation = rule, activation
        count, rows = rule.experts + rule.shared, (1 if activation == "relu2" else 2) * inner
        kind = {"device": device, "dtype": dtype}
        self.x = torch.randn(tokens, hidden).to(**kind)
        self.residual = torch.randn(tokens, hidden).to(**kind)
        self.logits = (torch.randn(tokens, rule.logits) if logits is None else logits).to(device)
        self.up = torch.randn(count, rows, hidden).div_(hidden**0.5).to(**kind)
        self.down = torch.randn(count, hidden, inner).div_(inner**0.5).to(**kind)
        self.biases = Biases(*(torch.randn(count, n).to(**kind) for n in (rows, hidden))) if biased else Biases()
        self.weights, self.experts = route_ref(self.logits, rule)

    def dense(self) -> torch.Tensor:
        """Every expert on every token, in float64; those not chosen have weight 0."""
        weight = torch.zeros(len(self.x), len(self.up), device=self.x.device, dtype=torch.float64)
        weight.scatter_(1, self.experts.long(), self.weights.double())
        h = torch.einsum("th,eih->tei", self.x.double(), self.up.double())
        if self.biases.up is not None:
            h = h + self.biases.up.double()
        if self.activation == "relu2":
            h = h.relu() ** 2
        else:
            gate, up = h.chunk(2, -1)
            if self.activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                h = (F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
        y = torch.einsum("te,tei,ehi->th", weight, h, self.down.double())
        return y if self.biases.down is None else y + weight @ self.biases.down.double()

    def run(self, residual: torch.Tensor | None = None) -> torch.Tensor:
        return fused_moe(self.x, self.logits, self.rule, self.mlp, residual)

    def reference(self) -> torch.Tensor:
        return experts_ref(self.x, self.weights, self.experts, self.mlp)

    @property
    def mlp(self) -> ExpertWeights:
        return ExpertWeights(Weight(self.up), Weight(self.down), self.activation, self.biases)

    def check_both(self, mlp: ExpertWeights, expected: torch.Tensor) -> None:
        """The reference and the kernels with these weights."""
        check(experts_ref(self.x, self.weights, self.experts, mlp), expected, self.x.dtype)
        check(fused_moe(self.x, self.logits, self.rule, mlp), expected, self.x.dtype)


def check(y: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


RULES = {
    "plain": Routing(6, 2),
    "uneven": Routing(11, 3, normalise=False),
    "one": Routing(5, 1),
    "shared": Routing(7, 2, shared=2, gated=True),
    "sigmoid": Routing(6, 2, "sigmoid", scale=2.5, shared=1),
}


@pytest.mark.parametrize(
    ("name", "tokens", "activation"),
    first_quick(
        5,
        [
            ("uneven", 19, "swiglu"),
            ("one", 1, "relu2"),
            ("plain", 9, "geglu"),
            ("shared", 21, "swiglu"),
            ("sigmoid", 7, "relu2"),
            ("plain", 1, "swiglu"),
            ("plain", 5, "relu2"),
            ("one", 17, "swiglu"),
            ("shared", 1, "swiglu"),
        ],
    ),
)
def test_experts_match_reference(
    name: str, tokens: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(RULES[name], tokens, device, dtype, activation=activation)
    expected = case.dense() + case.residual.double()
    check(case.reference() + case.residual, expected, dtype)
    y = case.run(case.residual)
    check(y, expected, dtype)
    if device.type == "cuda":
        assert torch.equal(case.run(case.residual), y)


@pytest.mark.parametrize("tokens", [1, 19])
def test_biases_and_clamps(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(RULES["plain"], tokens, device, dtype, activation="clamped_swiglu", biased=True)
    case.up *= 6  # so that both clamps and both sides of the second are reached
    expected = case.dense() + case.residual.double()
    check(case.reference() + case.residual, expected, dtype)
    check(case.run(case.residual), expected, dtype)


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "activation"),
    crossed([16, 32, 64, 128], [(64, 32, "swiglu"), (72, 17, "swiglu"), (33, 40, "relu2")]),
)
def test_blocks_of_every_size(
    rows: int, hidden: int, inner: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    """With sizes that are multiples of the tiles and sizes that are not; of 128 rows also blocks that are at most half
    full, and others."""
    if device.type == "cuda":
        hidden, inner = hidden * 4, inner * 8
    case = Case(
        Routing(3, 2, shared=1),
        90 if rows == 128 else 40,
        device,
        dtype,
        hidden=hidden,
        inner=inner,
        activation=activation,
    )
    weights, _, plan = route(case.logits, case.rule, rows)
    h = grouped(case.x, Weight(case.up), plan, case.rule, rows, activation)
    outputs = grouped(h, Weight(case.down), plan, case.rule, rows)
    check(weighted_sum(outputs, weights, None), case.dense(), dtype)


@pytest.mark.parametrize(("rows", "activation"), crossed([32, 128], ["swiglu", "relu2"]))
def test_several_tiles_of_a_program(
    rows: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    """Of both GEMMs, in blocks that are full, more than half full, and less; two programs have the columns of a
    block."""
    tile = Tile(32, 32, 4, 2, 4) if dtype == torch.float32 else Tile(64, 64, 4, 3, 4)
    scale = tile.n // 32
    case = Case(
        Routing(3, 2, shared=1), 190 if rows == 128 else 40, device, dtype,
        hidden=256 * scale, inner=(128 if activation == "swiglu" else 256) * scale, activation=activation, biased=True,
    )  # fmt: skip
    weights, _, plan = route(case.logits, case.rule, rows)
    h = grouped(case.x, Weight(case.up), plan, case.rule, rows, activation, tile, case.biases.up)
    outputs = grouped(h, Weight(case.down), plan, case.rule, rows, None, tile, case.biases.down)
    check(weighted_sum(outputs, weights, None), case.dense(), dtype)


@pytest.mark.parametrize("tokens", [1, 18, 35])
def test_all_tokens_to_one_expert(tokens: int, device: torch.device) -> None:
    """Weights of experts that no token selects are not used."""
    logits = torch.zeros(tokens, 5)
    logits[:, 3] = 8
    case = Case(Routing(5, 1), tokens, device, logits=logits)
    expected = case.dense()
    case.up[[0, 1, 2, 4]] = case.down[[0, 1, 2, 4]] = torch.nan
    check(case.run(), expected, torch.float32)
    check(case.reference(), expected, torch.float32)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "geglu", "relu2"])
def test_nan_propagates(activation: Activation, device: torch.device) -> None:
    """Of a token or of a weight; max(x, 0) would hide it."""
    case = Case(Routing(4, 2), 6, device, activation=activation)
    case.x[3, 5] = torch.nan
    assert case.run().isnan().any(1).tolist() == [row == 3 for row in range(6)]
    assert case.run()[3].isnan().all()
    expert = int(case.experts[0, 0])
    case.x[3, 5], case.up[expert, 1, 0] = 0.0, torch.nan
    hit = (case.experts == expert).any(1)
    assert torch.equal(case.run().isnan().all(1), hit)


def test_rows_do_not_depend_on_batch(
    dtype: torch.dtype, device: torch.device, assert_same: Callable[..., None]
) -> None:
    case = Case(Routing(6, 2, shared=1, gated=True), 9, device, dtype)
    together = case.run()
    case.x, case.logits = case.x.flip(0), case.logits.flip(0)
    assert_same(case.run().flip(0), together)
    case.x, case.logits = case.x[4:7], case.logits[4:7]
    assert_same(case.run().flip(0), together[2:5])


def test_strided_inputs(device: torch.device) -> None:
    case = Case(Routing(6, 2), 5, device)
    expected = case.dense() + case.residual.double()
    unquantized = torch.full((5, 130), torch.inf, device=device)
    case.x, case.residual = unquantized[:, 7:41].copy_(case.x), unquantized[:, 60:94].copy_(case.residual)
    check(case.run(case.residual), expected, torch.float32)


def test_expert_outputs_are_summed_in_float32(device: torch.device) -> None:
    """1024 + 0.25 + ... is 1024 in half precision: one rounding in the end."""
    outputs = torch.tensor([1024.0, *[0.25] * 7], device=device)[:, None].repeat(1, 3).half()
    y = weighted_sum(outputs, torch.ones(1, 8, device=device), torch.full((1, 3), 0.5, device=device).half())
    assert y.tolist() == [[1026.0] * 3]


# FP8 weights


def scaled(case: Case, per: str = "block") -> tuple[Weight, Weight]:
    def quantized(values: torch.Tensor) -> Weight:
        count, outer, inner = values.shape
        shape = (outer, 1) if per == "output" else (-(-outer // 128), -(-inner // 128))
        scales = torch.rand(count, *shape, device=values.device) / 100 + 0.001
        return FP8Weight((values * 100).to(torch.float8_e4m3fn), scales)

    return quantized(case.up), quantized(case.down)


@pytest.mark.parametrize(
    ("tokens", "activation", "per"),
    first_quick(2, [(1, "relu2", "block"), (5, "swiglu", "output"), (5, "swiglu", "block")]),
)
def test_fp8_weights(tokens: int, activation: Activation, per: str, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(Routing(3, 2, shared=1), tokens, device, dtype, hidden=136, inner=130, activation=activation)
    up, down = scaled(case, per)
    case.up, case.down = up.dequantize(torch.float32), down.dequantize(torch.float32)
    expected = case.dense()
    case.check_both(ExpertWeights(up, down, activation), expected)


@pytest.mark.parametrize("tokens", slow_but([5], [1, 5, 19]))
def test_mxfp4_weights(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Widths that are whole numbers of tiles and widths that are not; a scale that is subnormal in float32."""
    case = Case(RULES["plain"], tokens, device, dtype, hidden=160, inner=96, activation="clamped_swiglu", biased=True)
    packed = []
    for matrices in (case.up, case.down):
        blocks, scales = encoded(matrices.cpu())
        scales[:, 0, 0] = 0
        packed.append(Mxfp4Weight(pack_mxfp4(blocks).to(device), scales.to(device)))
    up, down = packed
    case.up, case.down = up.dequantize(torch.float64), down.dequantize(torch.float64)
    expected = case.dense()
    case.check_both(ExpertWeights(up, down, case.activation, case.biases), expected)


@pytest.mark.parametrize(("tokens", "group"), slow_but([(5, 32)], [(1, 128), (5, 32), (19, 64)]))
def test_int4_weights(tokens: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(RULES["plain"], tokens, device, dtype, hidden=256, inner=128)
    packed = []
    for matrices in (case.up, case.down):
        *outer, inputs = matrices.shape
        values, zeros = torch.randint(0, 16, (*outer, inputs)), torch.randint(0, 16, (*outer, inputs // group))
        scales = (torch.rand(*outer, inputs // group).half() - 0.5) / 20  # half of them are negative
        parts = (part.to(device) for part in (pack_int4(values.byte()), scales, zeros.byte()))
        packed.append(int4_tiles(Int4Weight(*parts)))
    up, down = packed
    case.up, case.down = up.dequantize(torch.float64), down.dequantize(torch.float64)
    expected = case.dense()
    case.check_both(ExpertWeights(up, down, case.activation), expected)


@pytest.mark.parametrize(
    ("rows", "tile"), [(16, None), (32, Tile(64, 128, 4, 2)), (64, Tile(128, 128, 4, 2)), (128, None)]
)
def test_mxfp4_values_are_unpacked_in_order(
    rows: int, tile: Tile | None, dtype: torch.dtype, device: torch.device
) -> None:
    """The identity as x shows every value and scale, without a sum; of 128 rows in a whole block and in half a one."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16).repeat(1, 5, 1, 1)
    scales = torch.arange(89, 129, dtype=torch.uint8).view(1, 40, 1).repeat(1, 1, 2)
    if dtype == torch.float16:
        scales = scales.clamp(125, 129)  # of which it has all values
    weight, rule = Mxfp4Weight(pack_mxfp4(blocks).to(device), scales.to(device)), Routing(1, 1)
    copies = 3 if rows == 128 else 1
    plan = route(torch.zeros(64 * copies, 1, device=device), rule, rows)[2]
    x = torch.eye(64, device=device, dtype=dtype).repeat(copies, 1)
    expected = weight.dequantize(dtype)[0].T.repeat(copies, 1)
    assert torch.equal(grouped(x, weight, plan, rule, rows, tile=tile), expected)


@pytest.mark.parametrize("stored", ["FP8", "INT4"])
def test_whole_and_half_blocks(stored: str, dtype: torch.dtype, device: torch.device) -> None:
    """192 tokens of one expert in blocks of 128."""
    weight: Weight
    if stored == "FP8":
        weight = FP8Weight(torch.randn(1, 128, 128).to(device, torch.float8_e4m3fn), torch.rand(1, 1, 1, device=device))
    else:
        values, zeros = torch.randint(0, 16, (1, 128, 128)), torch.randint(0, 16, (1, 128, 4))
        scales = (torch.rand(1, 128, 4).half() - 0.5) / 20
        weight = int4_tiles(Int4Weight(*(part.to(device) for part in (pack_int4(values.byte()), scales, zeros.byte()))))
    x, rule = torch.randn(192, 128).to(device, dtype), Routing(1, 1)
    plan = route(torch.zeros(192, 1, device=device), rule, 128)[2]
    check(grouped(x, weight, plan, rule, 128), x.double() @ weight.dequantize(torch.float64)[0].T, dtype)


def test_scales_apply_per_block() -> None:
    values = torch.ones(200, 130).to(torch.float8_e4m3fn)
    unquantized = FP8Weight(values, torch.tensor([[1.0, 2.0], [3.0, 4.0]])).dequantize(torch.float32)
    rows, columns = torch.arange(200)[:, None] // 128, torch.arange(130) // 128
    assert torch.equal(unquantized, 1.0 + 2 * rows + columns)


# FP8 weights and FP8 activations


@pytest.fixture
def rounding(device: torch.device, monkeypatch: pytest.MonkeyPatch, force_kernels: Callable[[bool], None]) -> None:
    """Replaces the cast to FP8, which is wrong in the interpreter and has its own tests."""
    if device.type == "cpu":
        monkeypatch.setattr(fp8_quantize_triton, "quantize_fp8", quantize_fp8_ref)
    force_kernels(True)


def of_rounded(x: FP8Activations, weight: Weight, owner: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Row by row with the expert that each goes to, in float64."""
    h = torch.einsum("pk,pnk->pn", x.dequantize().double(), weight.dequantize(torch.float64)[owner])
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return h if activation is None else h.relu() ** 2


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "activation", "per"),
    first_quick(
        2,
        [
            *((64, 130, "relu2", "block"), (136, 130, "swiglu", "output"), (40, 256, "swiglu", "block")),
            *((136, 128, "swiglu", "block"), (300, 40, "relu2", "block")),
        ],
    ),
)
def test_fp8_activations_match_reference(
    hidden: int, inner: int, activation: Activation, per: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Both GEMMs, each from the kernel's own input: a value next to a tie could round the other way."""
    tokens, rule = (9 if device.type == "cpu" else 500), Routing(3, 2, shared=1)
    case = Case(rule, tokens, device, dtype, hidden=hidden, inner=inner, activation=activation)
    up, down = scaled(case, per)
    rows = rows_for(tokens, rule, quantize=True)
    weights, _, plan = route(case.logits, rule, rows)
    owner = case.experts.flatten().long()
    x = quantize_fp8(case.x)
    h = grouped(x, up, plan, rule, rows, activation)
    pairs = FP8Activations(*(item.repeat_interleave(rule.width, 0) for item in x[:2]), dtype)  # only dequantized
    check(h, of_rounded(pairs, up, owner, activation), dtype)
    outputs = grouped(quantize_fp8(h), down, plan, rule, rows)
    expected = of_rounded(quantize_fp8(h), down, owner, None)
    check(outputs, expected, dtype)
    mlp = ExpertWeights(up, down, activation)
    y = fused_moe(case.x, case.logits, rule, mlp, quantize=True)
    check(y, (expected.unflatten(0, (tokens, -1)) * weights[..., None].double()).sum(1), dtype)
    ours = experts_ref(case.x, case.weights, case.experts, mlp, quantize=True)
    # Of the values quantized between the GEMMs, 1% may round the other way, by an eighth.
    assert (y - ours).double().norm() <= 2e-2 * ours.double().norm()
    unquantized = experts_ref(case.x, case.weights, case.experts, mlp)
    assert (ours - unquantized).double().norm() > 1e-2 * unquantized.double().norm()


@pytest.mark.usefixtures("rounding")
def test_tokens_do_not_depend_on_prefill_chunk(device: torch.device, assert_same: Callable[..., None]) -> None:
    """A NaN stays with its token."""
    tokens = 12 if device.type == "cpu" else 2000
    case = Case(Routing(4, 2, shared=1), tokens, device, torch.float16, hidden=160, inner=128)
    mlp = ExpertWeights(*scaled(case), case.activation)

    def run(first: int, last: int) -> torch.Tensor:
        return fused_moe(case.x[first:last], case.logits[first:last], case.rule, mlp, quantize=True)

    together = run(0, tokens)
    assert_same(run(0, 1), together[:1])
    assert_same(run(3, 10), together[3:10])
    case.x[5, 150] = torch.nan
    y = run(0, tokens)
    assert y[5].isnan().all()
    others = torch.arange(tokens, device=device) != 5
    assert_same(y[others], together[others])


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("kernels", [False, True])
def test_fp8_activations_apply_within_context_only(
    kernels: bool, device: torch.device, force_kernels: Callable[[bool], None]
) -> None:
    force_kernels(kernels)
    case = Case(Routing(3, 2), 5, device, torch.float16, hidden=136, inner=128)
    up, down = scaled(case)
    router = torch.randn(3, 136).to(case.x)
    block, unquantized = (
        Experts(case.rule, router, up, down),
        Experts(case.rule, router, up, Weight(down.dequantize(torch.float16))),
    )
    plain, unscaled = block(case.x), unquantized(case.x)
    with use_fp8_activations(True):
        prompt = block(case.x)
        assert torch.equal(unquantized(case.x), unscaled)
    assert torch.equal(block(case.x), plain)
    assert (prompt - plain).double().norm() > 1e-2 * plain.double().norm()
    narrow = Case(Routing(3, 2), 5, device, torch.float16, hidden=136, inner=130)  # gate and up share a scale block
    block = Experts(narrow.rule, router, *scaled(narrow))
    with use_fp8_activations(True):
        prompt_of_narrow = block(case.x)
    assert torch.equal(prompt_of_narrow, block(case.x))
    weights, experts = route_ref(F.linear(case.x, router), case.rule)
    expected = experts_ref(case.x, weights, experts, ExpertWeights(up, down, "swiglu"), quantize=True)
    # Another order of a sum can move an activation to the next FP8 value.
    error = (prompt - expected).double().norm()
    assert error <= 3e-2 * expected.double().norm()
    assert error < (prompt - plain).double().norm()


# the whole block


@pytest.fixture(params=["reference", "kernels"])
def twin(request: pytest.FixtureRequest, device: torch.device, force_kernels: Callable[[bool], None]) -> None:
    on_cuda = device.type == "cuda"
    if on_cuda and request.param == "reference":
        force_kernels(False)
    if not on_cuda and request.param == "kernels":
        force_kernels(True)


def randomise(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return dict(block.state_dict())


@pytest.mark.usefixtures("twin")
def test_qwen3_moe_matches_transformers(device: torch.device) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    block, norm = Qwen3MoeSparseMoeBlock(config), Qwen3MoeRMSNorm(32, 1e-5)
    weights = {name: value.to(device) for name, value in randomise(block).items()}
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        expected = (x + block(norm(x)))[0].to(device)
    ours = Experts(
        Routing(6, 2), weights["gate.weight"], Weight(weights["experts.gate_up_proj"]),
        Weight(weights["experts.down_proj"]),
    )  # fmt: skip
    x = x[0].to(device)
    torch.testing.assert_close(
        ours(x, norm=Norm(norm.weight.detach().to(device), 1e-5), residual=x), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("twin")
def test_gpt_oss_matches_transformers(device: torch.device) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

    config = GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = GptOssMLP(config)
    weights = {name: value.to(device) for name, value in randomise(block).items()}
    x = 20 * torch.randn(1, 9, 32)  # so that gate and up are clamped
    with torch.no_grad():
        expected = block(x)[0][0].to(device)
    up, up_bias = (
        torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
        for rows in (weights["experts.gate_up_proj"].transpose(1, 2), weights["experts.gate_up_proj_bias"])
    )
    ours = Experts(
        Routing(6, 2), weights["router.weight"], Weight(up),
        Weight(weights["experts.down_proj"].transpose(1, 2).contiguous()), "clamped_swiglu",
        router_bias=weights["router.bias"], biases=Biases(up_bias, weights["experts.down_proj_bias"]),
    )  # fmt: skip
    torch.testing.assert_close(ours(x[0].to(device)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("shared", [24, 40])
def test_qwen3_next_matches_transformers(shared: int, device: torch.device) -> None:
    """The shared expert as one expert, and as two of which the second is filled up."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextSparseMoeBlock

    config = Qwen3NextConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True,
        shared_expert_intermediate_size=shared,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = Qwen3NextSparseMoeBlock(config)
    weights = {name: value.to(device) for name, value in randomise(block).items()}
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        expected = block(x)[0].to(device)
    gate_up = torch.cat([weights["shared_expert.gate_proj.weight"], weights["shared_expert.up_proj.weight"]])
    up = slices_of_up(gate_up, 24, "swiglu")
    down = slices_of_down(weights["shared_expert.down_proj.weight"], 24)
    ours = Experts(
        Routing(5, 3, shared=len(up), gated=True),
        torch.cat([weights["gate.weight"], weights["shared_expert_gate.weight"]]),
        Weight(torch.cat([weights["experts.gate_up_proj"], up])),
        Weight(torch.cat([weights["experts.down_proj"], down])),
    )
    torch.testing.assert_close(ours(x[0].to(device)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("twin")
def test_nemotron_h_matches_transformers(device: torch.device) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMoE

    config = NemotronHConfig(
        hidden_size=32, moe_intermediate_size=24, moe_shared_expert_intermediate_size=48, n_routed_experts=8,
        num_experts_per_tok=3, n_group=2, topk_group=1, routed_scaling_factor=2.5, mlp_hidden_act="relu2",
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = NemotronHMoE(config, 0)
    randomise(block)
    block.gate.e_score_correction_bias.normal_()
    weights = {name: value.to(device) for name, value in block.state_dict().items()}
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        expected = block(x)[0].to(device)
    up = slices_of_up(weights["shared_experts.up_proj.weight"], 24, "relu2")
    down = slices_of_down(weights["shared_experts.down_proj.weight"], 24)
    rule = Routing(
        8, 3, "sigmoid", scale=2.5, bias=weights["gate.e_score_correction_bias"], groups=2, top_groups=1, shared=2
    )
    ours = Experts(
        rule, weights["gate.weight"], Weight(torch.cat([weights["experts.up_proj"], up])),
        Weight(torch.cat([weights["experts.down_proj"], down])), "relu2",
    )  # fmt: skip
    torch.testing.assert_close(ours(x[0].to(device)), expected, rtol=1e-4, atol=1e-5)


def test_unsupported_shapes_are_refused() -> None:
    rule, router = Routing(4, 2, shared=1, gated=True), torch.zeros(5, 8)
    up, down = Weight(torch.zeros(5, 12, 8)), Weight(torch.zeros(5, 8, 6))
    Experts(rule, router, up, down)
    with pytest.raises(SpecbatchError, match="experts=5: use 5 and 1 shared"):
        Experts(replace(rule, experts=5), router, up, down)
    with pytest.raises(SpecbatchError, match=r"up=\(5, 12, 8\): use \(5, 6, 8\), as down and relu2 say"):
        Experts(rule, router, up, down, "relu2")
    with pytest.raises(SpecbatchError, match=r"router=\(4, 8\): use \(5, 8\)"):
        Experts(rule, router[:4], up, down)


def test_blocks_grow_with_the_tokens() -> None:
    rule = Routing(256, 8)
    tokens = (1, 128, 192, 384, 512, 1024, 8192)
    assert [rows_for(count, rule) for count in tokens] == [16, 16, 16, 16, 32, 64, 128]
    assert [rows_for(count, rule, is_stored_whole=True) for count in tokens] == [16, 16, 32, 32, 64, 64, 128]


def test_larger_blocks_are_for_weights_that_are_not_dequantized(device: torch.device, watch: Watch) -> None:
    asked = watch(experts_triton, "rows_for", before=lambda *_, **how: how)
    case = Case(RULES["plain"], 3, device, torch.float16, hidden=128, inner=128)
    case.run()
    up, down = (FP8Weight(x.to(torch.float8_e4m3fn), torch.ones(6, *size, device=device)) for x, size in (
        (case.up, (2, 1)), (case.down, (1, 1))
    ))  # fmt: skip
    fused_moe(case.x, case.logits, case.rule, ExpertWeights(up, down, case.activation))
    assert [how["is_stored_whole"] for how in asked] == [True, False]


def test_programs_with_few_steps_compute_several_tiles() -> None:
    """Those of the second GEMM of Qwen3.5-35B-A3B and 8,192 tokens; with fewer tokens too few programs would be
    left."""

    def tiles(*shape: int, rows: int = 128, pairs: int = 8192 * 9, fp8: bool = False) -> int:
        values = torch.empty(257, *shape, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device="meta")
        weight = FP8Weight(values, torch.empty(257, 16, 4, device="meta")) if fp8 else Weight(values)
        return experts_triton.tile_for(rows, weight, 2, pairs).per_program

    assert [tiles(2048, 512, rows=rows) for rows in experts_triton._TILES] == [1, 1, 1, 4]
    assert tiles(1024, 2048) == 1
    assert tiles(2048, 576) == 1
    assert tiles(2048, 512, pairs=4096 * 9) == 1
    assert tiles(2048, 512, fp8=True) == 1
    assert tiles(2048, 520) == tiles(2048, 480) == 1  # the last step is not whole
    assert tiles(2304, 512) == 1  # nor is the last tile
