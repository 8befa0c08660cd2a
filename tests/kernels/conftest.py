"""Triton kernels run on the device where there is one, else in Triton's interpreter on the CPU (float32 and float16:
its bfloat16 matmuls are wrong)."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from assembly import create_inline_asm

from specbatch.kernels import dispatch
from specbatch.kernels.attention.verify import verify_attention_configs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported


def _hasten_the_interpreter() -> None:
    """Most of its time goes into patching the names of `triton.language` again at each function call, into broadcasts
    between blocks of one shape, into building shapes and types again for each result, and into overflow checks, which
    it reports in its debug mode only."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
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
    broadcast, type_init, np_dtype = (
        TritonSemantic.broadcast_impl_value, core.block_type.__init__, cache(interpreter._get_np_dtype)
    )  # fmt: skip

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and [*lhs.type.shape] == [*rhs.type.shape] else broadcast(self, lhs, rhs)

    @cache
    def shapes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """The shape of a tensor and its number of elements, as Triton holds them."""
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes((*type.shape,) if type.is_block() else ())

    types: dict[Any, Any] = {}

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(core._unwrap_if_constexpr(size) for size in shape)
        if key not in types:
            type_init(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__.update(types[key], element_ty=element_ty)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
    core.tensor.__init__, core.block_type.__init__ = tensor_init, block_type_init
    interpreter._get_np_dtype = lambda kind: np_dtype(core.uint64 if kind.scalar.is_ptr() else kind.scalar)
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm  # it has none of its own
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


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
    _hasten_the_interpreter()
