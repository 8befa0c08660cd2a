"""Triton's interpreter, made quicker.

Most of its time goes into patching the names of `triton.language` again at each function call, into broadcasts between
blocks of one shape, into promotion of operands that have one type, into building shapes and types again for each
result, and into overflow checks, which it reports in its debug mode only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from assembly import create_inline_asm

LARGEST = 1 << 31
WHOLE = {"int32", "int64"}
PLAIN = {"fp32", *WHOLE}  # operands of one of these types have it as the type of the result


def hasten() -> None:
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _keep_types(interpreter)
    _promote_unless_equal(interpreter)
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm  # it has none of its own
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """Names of `triton.language` are patched by kernels, not by each function that these call, and a patched name is
    one call."""
    plain, met = interpreter.InterpretedFunction.__call__, set()

    def call(function: Any, *arguments: Any, **settings: Any) -> Any:
        if function.fn in met:  # already patched by the calling kernel or permanently
            return function.rewrite()(*arguments, **settings)
        met.add(function.fn)
        return plain(function, *arguments, **settings)

    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    @cache
    def patched(member: Any) -> Callable[..., Any]:
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def run(*arguments: Any, **settings: Any) -> Any:
            settings["_semantic"] = semantic
            return function(*arguments, **settings)

        return run

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        set_attr = scope[0].set_attr if scope else setattr
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):  # not yet patched
                set_attr(package, name, patched(member))

    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_builtin = patch_builtin


def _keep_types(interpreter: Any) -> None:
    """Blocks of one shape share it: `shape` of their types is one object, and so is `shape` of the blocks."""
    core = interpreter.tl.core
    type_init, np_dtype = core.block_type.__init__, cache(interpreter._get_np_dtype)

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """The shape of a tensor and its number of elements, as Triton holds them."""
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    scalar = sizes(())
    made: dict[Any, Any] = {}  # element and sizes -> attributes
    shapes: dict[Any, Any] = {}
    known: dict[Any, Any] = {}  # element and identity of one of `shapes` -> attributes

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        name = element_ty.name
        found = known.get((name, id(shape)))
        if found is None:
            of = tuple(core._unwrap_if_constexpr(size) for size in shape)
            if (name, of) not in made:
                type_init(self, element_ty, shape)
                self.shape, self.sizes = shapes.setdefault(of, self.shape), sizes(of)
                made[name, of] = vars(self)
            found = made[name, of]
            if shape is found["shape"]:
                known[name, id(shape)] = found
        self.__dict__.update(found)
        self.element_ty = element_ty

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = getattr(type, "sizes", scalar)

    def handle_init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    core.tensor.__init__, core.block_type.__init__ = tensor_init, block_type_init
    interpreter.TensorHandle.__init__ = handle_init
    interpreter._get_np_dtype = lambda kind: np_dtype(core.uint64 if kind.scalar.is_ptr() else kind.scalar)


def _promote_unless_equal(interpreter: Any) -> None:
    """Operands of one type, whole numbers beside integers, any beside float32, and integers added to pointers take no
    promotion; blocks of one shape take no broadcast, and what two shapes become is found once."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast, promote = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
    numbers: dict[tuple[str, int], Any] = {}
    wholes: dict[tuple[int, int], Any] = {}  # identities of the shapes of two types -> that of both

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not lhs.type.is_block():
            return _filled(lhs, rhs), rhs
        if not rhs.type.is_block():
            return lhs, _filled(rhs, lhs)
        key = id(lhs.type.shape), id(rhs.type.shape)
        if key not in wholes:
            found, _ = broadcast(self, lhs, rhs)
            wholes[key] = found.type.shape if len(lhs.shape) == len(rhs.shape) else None
        if (whole := wholes[key]) is None:
            return broadcast(self, lhs, rhs)
        return _stretched(self, lhs, whole), _stretched(self, rhs, whole)

    def _filled(scalar: Any, block: Any) -> Any:
        """A block of the shape of another one, all of whose elements are a scalar."""
        data, shape = np.empty(block.handle.data.shape, scalar.handle.data.dtype), block.type.shape
        data.fill(scalar.handle.data.item())
        return core.tensor(interpreter.TensorHandle(data, scalar.handle.dtype), core.block_type(scalar.dtype, shape))

    def _stretched(self: Any, block: Any, shape: Any) -> Any:
        if block.type.shape is shape:
            return block
        handle = self.builder.create_broadcast(block.handle, [*shape])
        return core.tensor(handle, core.block_type(block.dtype, shape))

    def promote_unless_equal(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is core.tensor:
            left = lhs.dtype.name
            if type(rhs) is core.tensor:
                right = rhs.dtype.name
                alike = left == right and left in PLAIN
                if alike or (right in WHOLE and options[:1] == (True,) and lhs.dtype.is_ptr()):
                    return broadcast_unless_equal(self, lhs, rhs)
            elif type(rhs) is int and left in WHOLE and -LARGEST <= rhs < LARGEST:
                if (left, rhs) not in numbers:
                    numbers[left, rhs] = self.scalar_constant(rhs, dtype=lhs.dtype)
                return broadcast_unless_equal(self, lhs, numbers[left, rhs])
            elif left == "fp32" and type(rhs) in (int, float):
                return broadcast_unless_equal(self, lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        return promote(self, lhs, rhs, *options, **named)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
    TritonSemantic.binary_op_type_checking_impl = promote_unless_equal
