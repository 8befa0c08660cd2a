"""Triton kernels run on the device where there is one, else in Triton's interpreter on the CPU (float32 and float16:
its bfloat16 matmuls are wrong)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import quick_interpreter
import torch

from specbatch.kernels import dispatch
from specbatch.kernels.attention.verify import verify_attention_configs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, what runs on it here counts as a GPU test, too."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent) and "device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")


@pytest.fixture(scope="module", autouse=True)
def _verify_on_one_processor() -> Iterator[None]:
    """In the interpreter a verify has tiles of all sizes, which small inputs get where they fill a device; attention of
    prompts and spans keeps a number with which their keys are split."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(verify_attention_configs, "multiprocessors", lambda device: 1)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


HALF = () if torch.cuda.is_available() else pytest.mark.slow  # the interpreter computes float16 GEMMs in float32


@pytest.fixture(params=[torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=HALF)], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter computes wrong bfloat16 matmuls")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def skinny_up_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`skinny_up_to(most)`: the GEMMs for few rows take so many, of whatever weight."""
    return lambda most: monkeypatch.setattr(
        "specbatch.kernels.gemm.dense.skinny_gemm_triton.is_skinny", lambda rows, weight: rows <= most
    )


@pytest.fixture
def force_kernels() -> Iterator[Callable[..., None]]:
    """force_kernels(True) runs all operations by their kernels, force_kernels(False) by their references."""
    with ExitStack() as stack:
        yield lambda enabled=True: stack.enter_context(dispatch.force_kernels(enabled))


@pytest.fixture(scope="session")
def assert_same(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Bit equality on a CUDA device. Triton's interpreter multiplies matrices with numpy, whose BLAS may add in another
    order for another number of rows, processor or number of threads: there, equality up to a tolerance."""

    def check(y: torch.Tensor, expected: torch.Tensor) -> None:
        exact = {"rtol": 0, "atol": 0} if device.type == "cuda" else {"rtol": 2e-3, "atol": 2e-5}
        torch.testing.assert_close(y, expected, **exact, equal_nan=True)

    return check


if not torch.cuda.is_available() and find_spec("triton"):
    quick_interpreter.hasten()
