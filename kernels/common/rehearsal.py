"""Rehearsals: a program runs on the host only, so that the kernels that it would launch become known.

Within `rehearsing()` an operation of PyTorch returns a tensor of the right shape, type and strides without computing
it, and changes nothing. Views are real, and so are new tensors with given values such as `torch.zeros`: a program may
keep them. Launches of Triton kernels are a matter of `specbatch.runtime.parallel_compilation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_missed: ContextVar[list[str] | None] = ContextVar("missed", default=None)  # of the rehearsal, if there is one
# They read no values of their argument, only its shape, type and device.
_FACTORIES = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
# Operations whose results depend on values in other ways than by them, or that draw random numbers.
_NEEDS_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_MASKS = torch.bool, torch.uint8
_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, strides, type


class ValueNeededError(Exception):
    """What a program does next depends on a value that a rehearsal does not compute."""


def is_rehearsing() -> bool:
    """Whether operations return tensors without values."""
    return _missed.get() is not None


@contextmanager
def rehearsing() -> Iterator[list[str]]:
    """Within this context nothing is computed. Raises ValueNeededError where a value is needed; what `rehearse` could
    not finish for this reason is noted in the list."""
    missed: list[str] = []
    token = _missed.set(missed)
    try:
        with _Rehearsal():
            yield missed
    finally:
        _missed.reset(token)


def rehearse(program: Callable[[], object]) -> None:
    """Run a program in the current rehearsal as far as it needs no values."""
    try:
        program()
    except ValueNeededError as error:
        missed = _missed.get()
        assert missed is not None, "there is no rehearsal"
        missed.append(str(error))


class _Rehearsal(TorchDispatchMode):
    """`known`: what an operation makes of arguments like these, as layers of a model are alike."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[list[_Shape], Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch. To guard against that, it would import a thousand modules."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
        if device.type == "cpu" and torch.cuda.is_available():
            # Tables that are made on the host and copied to the device are real: a program may keep them, too.
            return func(*args, **kwargs)
        kind = _kind(func)
        if any(isinstance(leaf, torch.device) and leaf.type != device.type for leaf in leaves):
            raise ValueNeededError(f"{func}: a copy to the host")
        if kind == "real":
            return func(*args, **kwargs)
        if kind == "write":
            if tensors[0].device != device:
                raise ValueNeededError(f"{func}: a copy to the host")
            return _written(func, args, kwargs)
        like = (_shape(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)
        key = func, str(structure), *like
        if key not in self._known:
            self._known[key] = _made(func, leaves, structure)
        shapes, structure = self._known[key]
        made = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in shapes]
        return tree_unflatten(made, structure)


def _made(func: Any, leaves: list[Any], structure: Any) -> tuple[list[_Shape], Any]:
    """What an operation makes of arguments like these. It is tried once: PyTorch can tell this without a device, but
    would import a thousand modules for it. Whole numbers may be indices and are 0, as theirs are not computed."""
    name = func.overloadpacket.__name__
    if name == "index":  # its shape depends on values if they are a mask
        needs_values = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _MASKS for leaf in leaves)
    elif name == "repeat_interleave":
        needs_values = sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > 1
    else:  # attention draws random numbers for dropout only
        needs_values = "attention" not in name and not _NEEDS_VALUES.isdisjoint(func.tags)
    if needs_values:
        raise ValueNeededError(str(func))
    args, kwargs = tree_unflatten([_zeroed(leaf) for leaf in leaves], structure)
    try:
        made, made_structure = tree_flatten(func(*args, **kwargs))
    except Exception as error:
        raise ValueNeededError(f"{func}: {error}") from error
    if not all(isinstance(leaf, torch.Tensor) for leaf in made):
        raise ValueNeededError(str(func))
    return [_shape(leaf) for leaf in made], made_structure


def _zeroed(leaf: Any) -> Any:
    is_whole = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    return torch.zeros_like(leaf) if is_whole else leaf


@cache
def _kind(func: Any) -> Literal["real", "write", "make"]:
    """Whether an operation only makes views or tensors with given values, writes to its arguments, or makes tensors."""
    schema = func._schema
    if schema.is_mutable:
        return "write"
    if schema.name.split("::")[1] in _FACTORIES:
        return "real"
    is_view = bool(schema.returns) and all(item.alias_info is not None for item in schema.returns)
    return "real" if is_view else "make"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation that writes to its arguments returns: these."""
    given = {item.name: kwargs.get(item.name, args[index] if index < len(args) else None)
             for index, item in enumerate(func._schema.arguments)}  # fmt: skip
    by_alias = {
        name: given[item.name]
        for item in func._schema.arguments
        if item.alias_info is not None
        for name in item.alias_info.before_set
    }
    found = []
    for item in func._schema.returns:
        names = set() if item.alias_info is None else item.alias_info.before_set
        if not names:
            raise ValueNeededError(f"{func}: writes and returns something else")
        found.append(by_alias[next(iter(names))])
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _shape(tensor: torch.Tensor) -> _Shape:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
