"""Triton kernels run on the device where there is one, else in Triton's interpreter on the CPU (float32 and float16:
its bfloat16 matmuls are wrong)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from specbatch.kernels import dispatch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported


def _hasten_the_interpreter() -> None:
    """Half of its time goes into patching the names of `triton.language` again at each function call, and into
    overflow checks, which it reports in its debug mode only."""
    from triton.runtime import interpreter

    plain, met = interpreter.InterpretedFunction.__call__, set()

    def call(function: Any, *arguments: Any, **settings: Any) -> Any:
        if function.fn in met:  # already patched by the calling kernel or permanently
            return function.rewrite()(*arguments, **settings)
        met.add(function.fn)
        return plain(function, *arguments, **settings)

    interpreter.InterpretedFunction.__call__ = call

    @cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch_builtin(package: Any, *rest: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):  # not yet patched
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter computes wrong bfloat16 matmuls")
    return request.param  # type: ignore[no-any-return]


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
    _hasten_the_interpreter()
