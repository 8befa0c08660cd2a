"""GEMMs of weights in groups match float64, for any number of rows, threads and outputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specbatch.kernels.common import native
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.gemm.quantized.grouped import GroupedLinear, GroupedWeight, runs_on
from specbatch.kernels.gemm.quantized.weight import concat_outputs

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
EPS = 1e-5


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(
    out: int, inputs: int, bits: int = 4, group: int = 32, *, half: bool = True, offsets: bool = True
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(out + inputs)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    values = torch.randint(low, high, (out, inputs), dtype=torch.int8, generator=generator)
    scales = numbers(out, inputs // group, seed=1)
    found = scales, numbers(out, inputs // group, seed=2) * 8 * offsets
    return GroupedWeight(values, *(part.half() if half else part for part in found))


def check(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    assert (found.double() - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(
    ("out", "inputs", "more"),
    [
        (64, 64, {}),
        (33, 96, {}),  # an odd number of outputs
        (7, 32, {"bits": 8, "offsets": False}),
        (96, 288, {"bits": 8, "group": 16, "half": False}),  # more inputs than are dequantized at a time
        (160, 256, {"group": 128, "half": False}),
    ],
)
def test_products(out: int, inputs: int, more: dict[str, int]) -> None:
    weight = grouped(out, inputs, **more)  # type: ignore[arg-type]
    whole, bias = weight.dequantize(torch.float32), numbers(out, seed=3)
    layer, plain = weight.linear(bias), weight.linear()
    assert isinstance(layer, GroupedLinear)
    assert torch.equal(layer.weight, whole)
    for rows in (0, 1, 2, 3, 5, 8, 15, 17, 32):
        x, residual = numbers(rows, inputs, seed=rows), numbers(rows, out, seed=9)
        expected = x.double() @ whole.double().t()
        if rows:
            check(layer(x), expected + bias.double())
            check(plain(x, residual=residual.clone()), expected + residual.double())
        into = torch.empty(rows, out)
        assert plain(x, out=into) is into
        assert torch.equal(into, plain(x))


def test_strided_rows_and_other_types() -> None:
    layer = grouped(64, 64).linear()
    x = numbers(6, 128)
    assert torch.equal(layer(x[::2, :64]), layer(x[::2, :64].contiguous()))
    for dtype in (torch.bfloat16, torch.float16):
        found = layer(x[:, :64].to(dtype))
        assert found.dtype == dtype
        check(found, x[:, :64].to(dtype).double() @ layer.weight.double().t(), 1e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_norm_and_activation(rows: int) -> None:
    """96 outputs of two halves of 48 are no whole number of tiles."""
    for out in (128, 96):
        weight = grouped(out, 64)
        x, norm = numbers(rows, 64), Norm(numbers(64, seed=4), EPS)
        unfused = Linear(weight.dequantize(torch.float32))
        check(weight.linear()(x, norm=norm), unfused(x, norm=norm).double())
        check(weight.linear().gated(x, norm), unfused.gated(x, norm).double())


def test_bits_of_a_row_do_not_depend_on_others_in_deterministic_mode() -> None:
    layer, x = grouped(96, 288).linear(), numbers(17, 288)
    with use_deterministic():
        whole = layer(x)
        for rows in range(1, 17):
            assert torch.equal(layer(x[:rows]), whole[:rows])
        before = torch.get_num_threads()
        torch.set_num_threads(3 - before)
        assert torch.equal(layer(x), whole)


def test_long_prompts_are_multiplied_in_parts() -> None:
    """Of 513 rows the last one is a part of its own, with the bits that it has among others."""
    layer, x = grouped(64, 64).linear(), numbers(513, 64)
    assert torch.equal(layer(x)[510:], layer(x[510:]))
    check(layer(x), x.double() @ layer.weight.double().t())


@pytest.mark.parametrize("group", [8, 48, 256])
def test_groups_that_the_gemm_does_not_have(group: int) -> None:
    with pytest.raises(AssertionError, match=f"groups of {group} inputs"):
        grouped(32, 768, group=group).linear()


def test_matrices_with_groups_of_several_sizes_are_joined() -> None:
    parts = grouped(32, 64), grouped(16, 64, 8, 16, half=False)
    whole = concat_outputs(parts)
    assert whole is not None
    assert whole.block == (1, 16)
    assert torch.equal(whole.dequantize(torch.float32), torch.cat([part.dequantize(torch.float32) for part in parts]))


def test_only_a_cpu_has_the_gemm() -> None:
    assert runs_on(torch.device("cpu"))
    assert not runs_on(torch.device("cuda"))
