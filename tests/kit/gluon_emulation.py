"""Runs a warp-specialized Gluon kernel on a CPU: partitions are threads, shared memory and registers are tensors.

Gluon has no interpreter. Here the functions of a kernel run as Python, with a stand-in for each operation that they
call. It shows wrong indices, masks and barriers: a buffer that is overwritten too early gives wrong results, because a
matrix product reads its operands when the kernel waits for it, and a barrier that is never completed is an error. It
does not show wrong layouts, nor missing fences.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

PATIENCE_S = 20.0


class Pointer:
    """To element `at` of a tensor's memory; at: an integer or a tensor of them."""

    def __init__(self, base: torch.Tensor, at: Any = 0) -> None:
        self.base, self.at = base, at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.at + offset)

    @property
    def memory(self) -> torch.Tensor:
        storage = self.base.untyped_storage()
        return torch.empty(0, dtype=self.base.dtype).set_(storage, 0, (len(storage) // self.base.itemsize,))

    @property
    def places(self) -> torch.Tensor:
        return torch.as_tensor(self.at) + self.base.storage_offset()


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def update(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "more arrivals than the barrier expects"
            if not self.pending and not self.bytes:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE_S)
        assert done, f"phase {parity} of a barrier is never completed"


class Memory:
    """Shared memory: a tensor, or barriers."""

    def __init__(self, data: torch.Tensor, barriers: list[Barrier] | None = None) -> None:
        self.data, self.barriers = data, barriers
        self.type = SimpleNamespace(shape=list(data.shape))

    def index(self, place: Any) -> Any:
        return Memory(self.data[int(place)]) if self.barriers is None else self.barriers[int(place)]

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


@dataclass
class Product:
    """A matrix product in flight."""

    a: Any
    b: Memory
    acc: Any
    use_acc: bool

    def finish(self) -> torch.Tensor:
        a = self.a.data if isinstance(self.a, Memory) else self.a
        product = a.float() @ self.b.data.float()
        return product + self.acc if self.use_acc else product


def _wait(outstanding: int, deps: list[Any]) -> Any:
    done = tuple(x.finish() if isinstance(x, Product) else x for x in deps)
    return done[0] if len(done) == 1 else done


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
    places = pointer.places
    if mask is None:
        return pointer.memory[places]
    mask = mask.expand(places.shape)
    return torch.where(mask, pointer.memory[torch.where(mask, places, 0)], other)


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    mask = (torch.ones(()) > 0 if mask is None else mask).expand(value.shape)
    pointer.memory[pointer.places.expand(value.shape)[mask]] = value[mask].to(pointer.base.dtype)


def _copy_tile(descriptor: Any, place: list[Any], barrier: Barrier, result: Memory) -> None:
    row, column = (int(at) for at in place)
    rows, columns = descriptor.block_shape
    assert result.data.shape == (rows, columns)
    tile = torch.zeros(rows, columns, dtype=descriptor.base.dtype)
    found = descriptor.base[max(row, 0) : row + rows, column : column + columns]
    tile[: len(found)] = found
    result.data.copy_(tile)
    barrier.update(0, -tile.nbytes)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
    if dtype == torch.int64:
        return Memory(torch.zeros(shape), [Barrier() for _ in range(shape[0])])
    return Memory(torch.full(shape, float("nan"), dtype=dtype))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _numbers(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: operation(*(torch.as_tensor(x) for x in args))


def _specialize(parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    failures: list[BaseException] = []

    def run(part: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            part(*args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    if hasattr(value, "block_shape"):
        return SimpleNamespace(base=value.base, block_shape=value.block_shape, dtype=value.base.dtype)
    return value


def _layout(*args: Any, **settings: Any) -> None:
    return None


def emulated(kernel: JITFunction[Any]) -> Any:
    """What `kernel[grid](*args, **settings)` launches, on a CPU."""
    language = SimpleNamespace(
        int32=torch.int32, int64=torch.int64, float32=torch.float32,
        load=_load, store=_store, rsqrt=torch.rsqrt, where=torch.where, exp2=torch.exp2, log2=torch.log2,
        minimum=_numbers(torch.minimum), maximum=_numbers(torch.maximum), cdiv=lambda a, b: (a + b - 1) // b,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), static_range=range,
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        convert_layout=lambda x, layout: x, allocate_shared_memory=_allocate, warp_specialize=_specialize,
        NVMMASharedLayout=SimpleNamespace(get_default_for=_layout), NVMMADistributedLayout=_layout,
        SliceLayout=_layout, DotOperandLayout=_layout, BlockedLayout=_layout,
    )  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=_layout,
        init=_init,
        arrive=lambda barrier: barrier.update(1, 0),
        expect=lambda barrier, size: barrier.update(1, size),
        wait=lambda barrier, phase, pred=True: barrier.wait(int(phase)) if pred else None,
    )
    stand_ins: dict[str, Any] = {
        "gl": language, "mbarrier": barriers, "copy_tile": _copy_tile, "fence_async_shared": lambda: None,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=True: Product(a, b, acc, use_acc),
        "warpgroup_mma_wait": _wait, "accumulator_layout": _layout, "memory_layout": _layout,
    }  # fmt: skip
    modules: dict[int, dict[str, Any]] = {}  # names of the modules of the kernel's functions

    def on_cpu(value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return getattr(value, "value", value)
        own = value.fn.__globals__
        if id(own) not in modules:
            names = modules[id(own)] = {}
            names |= {name: on_cpu(each) for name, each in own.items()} | stand_ins
        return FunctionType(value.fn.__code__, modules[id(own)], value.fn.__name__, value.fn.__defaults__)

    function = on_cpu(kernel)

    def launch(grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, num_warps: int, **settings: Any) -> None:
            given = [_argument(x) for x in args]
            settings.pop("launch_pdl", None)
            language.num_programs = lambda axis: grid[axis]
            for program in itertools.product(*map(range, grid)):
                language.program_id = lambda axis, at=program: torch.tensor(at[axis])
                function(*given, **settings)

        return run

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return launch(grid)

    return Launcher()
