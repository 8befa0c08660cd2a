"""Triton's interpreter, made quicker.

Most of its time goes into patching the names of `triton.language` again at each function call, into broadcasts, which
numpy's operations do by themselves, into promotion of operands that have one type, into building shapes and types again
for each result, and into overflow checks, which it reports in its debug mode only.
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
PLAIN = {"fp32", "int1", *WHOLE}  # operands of one of these types have it as the type of the result


def hasten() -> None:
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _compare_quickly(interpreter)
    _keep_types(interpreter)
    _keep_expanded(interpreter)
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


def _compare_quickly(interpreter: Any) -> None:
    """Most of what may be a constant is none, most types are compared with themselves, and the result of an operation
    on numbers of one type has it."""
    core, builder = interpreter.tl.core, interpreter.InterpreterBuilder
    unwrap, equal, binary_op = core._unwrap_if_constexpr, core.dtype.__eq__, builder.binary_op
    cast = interpreter.TritonSemantic.cast
    others = {core.tensor, core.dtype, core.block_type, core.pointer_type, type(None), int, float, bool, str}

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        return value if kind in others else value.value if kind is core.constexpr else unwrap(value)

    def equal_quickly(self: Any, other: Any) -> bool:
        return True if self is other else bool(equal(self, other))

    def cast_quickly(self: Any, value: Any, kind: Any, *options: Any) -> Any:
        return value if value.type.scalar is kind.scalar else cast(self, value, kind, *options)

    def binary_op_quickly(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        kind = lhs.data.dtype
        if kind is rhs.data.dtype and kind.itemsize >= 4:
            return interpreter.TensorHandle(op(lhs.data, rhs.data), lhs.dtype.scalar)
        return binary_op(self, lhs, rhs, op)

    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap_quickly, equal_quickly
    interpreter.TritonSemantic.cast, builder.binary_op = cast_quickly, binary_op_quickly


def _keep_expanded(interpreter: Any) -> None:
    """A block's shape with one dimension more is found once."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    expand_dims = semantic.expand_dims
    shapes: dict[tuple[int, int], Any] = {}

    def expand_quickly(self: Any, block: Any, axis: int) -> Any:
        if not block.type.is_block():
            return expand_dims(self, block, axis)
        key = id(block.type.shape), axis
        if key not in shapes:
            found = expand_dims(self, block, axis)
            shapes[key] = found.type.shape
            return found
        data = block.handle.data[(slice(None),) * axis + (None,)]
        handle = interpreter.TensorHandle(data, block.handle.dtype.scalar)
        return core.tensor(handle, core.block_type(block.dtype, shapes[key]))

    semantic.expand_dims = expand_quickly


def _promote_unless_equal(interpreter: Any) -> None:
    """Operands of one type, whole numbers beside integers, any beside float32, and integers added to pointers take no
    promotion; blocks of one shape take no broadcast, and what two shapes become is found once. Of the operands of an
    operation only the types are broadcast: numpy does so with the data."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast, promote = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
    numbers: dict[tuple[str, int], Any] = {}
    wholes: dict[tuple[int, int], Any] = {}  # identities of the shapes of two types -> that of both

    def whole_of(self: Any, lhs: Any, rhs: Any) -> Any:
        """The shape of both; None: it is not that of either's dimensions."""
        if not lhs.type.is_block() or not rhs.type.is_block():
            return (lhs if lhs.type.is_block() else rhs).type.shape
        key = id(lhs.type.shape), id(rhs.type.shape)
        if key not in wholes:
            found, _ = broadcast(self, lhs, rhs)
            wholes[key] = found.type.shape if len(lhs.shape) == len(rhs.shape) else None
        return wholes[key]

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if (whole := whole_of(self, lhs, rhs)) is None:
            return broadcast(self, lhs, rhs)
        return _broadcast_to(self, lhs, whole), _broadcast_to(self, rhs, whole)

    def _broadcast_to(self: Any, value: Any, shape: Any) -> Any:
        if not value.type.is_block():
            data = np.empty([*shape], value.handle.data.dtype)
            data.fill(value.handle.data.item())
            handle = interpreter.TensorHandle(data, value.handle.dtype)
        elif value.type.shape is shape:
            return value
        else:
            handle = self.builder.create_broadcast(value.handle, [*shape])
        return core.tensor(handle, core.block_type(value.dtype, shape))

    def operands(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if (whole := whole_of(self, lhs, rhs)) is None:
            return broadcast(self, lhs, rhs)
        return _of_shape(lhs, whole), _of_shape(rhs, whole)

    def _of_shape(value: Any, shape: Any) -> Any:
        kind = value.type
        if kind.is_block() and kind.shape is shape:
            return value
        return core.tensor(value.handle, core.block_type(value.dtype, shape))

    def number(self: Any, value: int, dtype: Any) -> Any:
        key = dtype.name, value
        if key not in numbers:
            numbers[key] = self.scalar_constant(value, dtype=dtype)
        return numbers[key]

    def promote_unless_equal(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is core.tensor:
            left = lhs.dtype.name
            if type(rhs) is core.tensor:
                right = rhs.dtype.name
                alike = left == right and left in PLAIN
                if alike or (right in WHOLE and options[:1] == (True,) and lhs.dtype.is_ptr()):
                    return operands(self, lhs, rhs)
                if left in WHOLE and right in WHOLE:
                    return operands(self, self.cast(lhs, core.int64), self.cast(rhs, core.int64))
            elif type(rhs) is int and -LARGEST <= rhs < LARGEST:
                if left in WHOLE:
                    return operands(self, lhs, number(self, rhs, lhs.dtype))
                if options[:1] == (True,) and lhs.dtype.is_ptr():
                    return operands(self, lhs, number(self, rhs, core.int32))
            if left == "fp32" and type(rhs) in (int, float):
                return operands(self, lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        elif type(rhs) is core.tensor:
            right = rhs.dtype.name
            if type(lhs) is int and right in WHOLE and -LARGEST <= lhs < LARGEST:
                return operands(self, number(self, lhs, rhs.dtype), rhs)
            if right == "fp32" and type(lhs) in (int, float):
                return operands(self, self.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return promote(self, lhs, rhs, *options, **named)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
    TritonSemantic.binary_op_type_checking_impl = promote_unless_equal
