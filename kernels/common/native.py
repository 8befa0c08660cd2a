"""Functions for the processor, compiled by LLVM when they are first needed and run on torch's OpenMP threads.

llvmlite brings LLVM, so that no compiler is needed. A function takes the address of its arguments, words of 64 bits,
and runs on all threads at once: they take pieces of work from a counter among the arguments.
"""

from __future__ import annotations

import ctypes
import math
import platform
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbatch.kernels.common.rowwise import EXP, EXP_LEAST, EXP_MOST, LN2_HIGH, LN2_LOW

if TYPE_CHECKING:
    from llvmlite import ir

LANES = 16  # floats of a vector here; LLVM makes two of it where the processor has shorter ones
_OPENMP = ("libgomp", "libiomp", "libomp")


@cache
def missing() -> str | None:
    """Why there are no such functions on this machine; None if there are."""
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed; pip install llvmlite"
    try:
        features = _features()
    except (ImportError, OSError, RuntimeError) as error:
        reason, *_ = str(error).split("\n")
        return f"llvmlite cannot be loaded ({reason})"
    if _openmp() is None:
        return "this build of torch has no OpenMP"
    if platform.machine() == "x86_64" and not features.get("fma"):
        return "this processor has no FMA instructions"
    return None


class Native:
    """A compiled function. Calls may come from several threads."""

    def __init__(self, build: Callable[[Code], None]) -> None:
        self._engine, self._address = _compile(build)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        parallel = _openmp()
        assert parallel is not None
        self._parallel = parallel

    def __call__(self, work: int, *arguments: int) -> None:
        """arguments: sizes, and addresses of tensors, from the second word on; the first counts the work done, up to
        `work`. A single piece runs on the calling thread."""
        words = (ctypes.c_int64 * (1 + len(arguments)))(0, *arguments)
        threads = min(work, torch.get_num_threads())
        if threads > 1:
            self._parallel(self._address, ctypes.addressof(words), threads, 0)
        else:
            self._alone(ctypes.addressof(words))


class Code:
    """The function under construction: an `ir.IRBuilder` and what its users need of LLVM's types."""

    def __init__(self, function: ir.Function) -> None:
        from llvmlite import ir

        self.function = function
        self._variables = ir.IRBuilder(function.append_basic_block())
        self._start = function.append_basic_block()
        self.at = ir.IRBuilder(self._start)
        self.word, self.float, self.byte = ir.IntType(64), ir.FloatType(), ir.IntType(8)
        self.vector = ir.VectorType(self.float, LANES)
        self._fma = ir.Function(function.module, ir.FunctionType(self.vector, [self.vector] * 3), "llvm.fma.v16f32")
        unary = ir.FunctionType(self.vector, [self.vector])
        self._round = ir.Function(function.module, unary, "llvm.rint.v16f32")
        self._sqrt = ir.Function(function.module, ir.FunctionType(self.float, [self.float]), "llvm.sqrt.f32")
        kind = ir.FunctionType(self.float, [self.vector])
        self._largest = ir.Function(function.module, kind, "llvm.vector.reduce.fmax.v16f32")
        kind = ir.FunctionType(self.float, [self.float, self.vector])
        self._sum = ir.Function(function.module, kind, "llvm.vector.reduce.fadd.v16f32")

    def end(self) -> None:
        self.at.ret_void()
        self._variables.branch(self._start)

    def argument(self, place: int) -> ir.Value:
        """A size among the arguments."""
        return self.at.load(self.at.gep(self.function.args[0], [self.word(place)]))

    def pointer(self, place: int, item: ir.Type) -> ir.Value:
        """The address of a tensor among the arguments."""
        return self.at.inttoptr(self.argument(place), item.as_pointer())

    def next_piece(self) -> ir.Value:
        """The number of a piece of work that no thread has taken."""
        return self.at.atomic_rmw("add", self.function.args[0], self.word(1), "monotonic")

    def variable(self, kind: ir.Type, first: ir.Value | None = None) -> ir.Value:
        """A place for a value, which LLVM keeps in a register."""
        place = self._variables.alloca(kind)
        if first is not None:
            self.at.store(first, place)
        return place

    def at_offset(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        return self.at.gep(pointer, [offset])

    def load(self, pointer: ir.Value, kind: ir.Type, offset: ir.Value) -> ir.Value:
        """A vector from `offset` items after `pointer`, however aligned."""
        found = self.at.load(self.at.bitcast(self.at.gep(pointer, [offset]), kind.as_pointer()))
        found.align = 1
        return found

    def store(self, vector: ir.Value, pointer: ir.Value, offset: ir.Value) -> None:
        place = self.at.bitcast(self.at.gep(pointer, [offset]), vector.type.as_pointer())
        self.at.store(vector, place).align = 1

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A vector of one value."""
        from llvmlite import ir

        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.at.insert_element(nothing, scalar, ir.IntType(32)(0))
        return self.at.shuffle_vector(first, nothing, ir.VectorType(ir.IntType(32), LANES)([0] * LANES))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        return self.at.call(self._fma, [a, b, c])

    def sqrt(self, scalar: ir.Value) -> ir.Value:
        return self.at.call(self._sqrt, [scalar])

    def exp(self, vector: ir.Value) -> ir.Value:
        """e^x within 2 units in the last place; 0 below e^-86. See `rowwise.exp` for the algorithm."""
        from llvmlite import ir

        at, integers = self.at, ir.VectorType(ir.IntType(32), LANES)
        every = self.every
        clamped = at.select(at.fcmp_ordered("<", vector, every(EXP_LEAST)), every(EXP_LEAST), vector)
        clamped = at.select(at.fcmp_ordered(">", clamped, every(EXP_MOST)), every(EXP_MOST), clamped)
        n = at.call(self._round, [at.fmul(clamped, every(1 / math.log(2)))])
        r = self.fma(n, every(-LN2_LOW), self.fma(n, every(-LN2_HIGH), clamped))
        p = every(EXP[0])
        for coefficient in EXP[1:]:
            p = self.fma(p, r, every(coefficient))
        p = at.fadd(self.fma(at.fmul(r, r), p, r), self.ones)
        # 2^n in two factors: 2^128 is no float32.
        power = at.shl(at.add(at.fptosi(n, integers), integers([126] * LANES)), integers([23] * LANES))
        found = at.fmul(at.fmul(p, at.bitcast(power, self.vector)), every(2.0))
        return at.select(at.fcmp_ordered("<", vector, every(EXP_LEAST)), self.zeros, found)

    def every(self, number: float) -> ir.Constant:
        """A constant vector."""
        return self.vector([self.float(_single(number))] * LANES)

    @property
    def zeros(self) -> ir.Constant:
        return self.every(0.0)

    @property
    def ones(self) -> ir.Constant:
        return self.every(1.0)

    def sum(self, vector: ir.Value) -> ir.Value:
        """Of the elements of a vector."""
        return self.at.call(self._sum, [self.float(0.0), vector], fastmath=("reassoc",))

    def largest(self, vector: ir.Value) -> ir.Value:
        """Of the elements of a vector."""
        return self.at.call(self._largest, [vector])

    @contextmanager
    def loop(self, first: ir.Value, end: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """The body of `for index in range(first, end, step)`."""
        place = self.variable(self.word, first)
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.at.branch(head)
        self.at.position_at_end(head)
        index = self.at.load(place)
        self.at.cbranch(self.at.icmp_signed("<", index, end), body, after)
        self.at.position_at_end(body)
        yield index
        self.at.store(self.at.add(index, self.word(step)), place)
        self.at.branch(head)
        self.at.position_at_end(after)

    @contextmanager
    def pieces(self, end: ir.Value) -> Iterator[ir.Value]:
        """The body of a loop over the pieces of work that this thread takes."""
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.at.branch(head)
        self.at.position_at_end(head)
        piece = self.next_piece()
        self.at.cbranch(self.at.icmp_signed("<", piece, end), body, after)
        self.at.position_at_end(body)
        yield piece
        self.at.branch(head)
        self.at.position_at_end(after)


def has_wide_vectors() -> bool:
    """Whether the processor, as torch uses it, has 32 registers of 16 floats."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _compile(build: Callable[[Code], None]) -> tuple[Any, int]:
    import llvmlite.binding as llvm
    from llvmlite import ir

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64).as_pointer()])
    code = Code(ir.Function(module, kind, "run"))
    build(code)
    code.end()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    features = dict(_features())
    if not has_wide_vectors():
        features |= {name: False for name in features if name.startswith(("avx512", "avx10"))}
    flags = ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items())
    machine = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), flags, opt=2)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine, engine.get_function_address("run")


def _single(number: float) -> float:
    """Rounded to float32."""
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


@cache
def _features() -> dict[str, bool]:
    """What the processor has, by LLVM's names."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


@cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded: runs a function on all of its threads."""
    maps = Path("/proc/self/maps")
    for path in openmp_libraries(maps.read_text() if maps.exists() else ""):
        run: Any = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
        if run is not None:
            run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            found: Callable[[int, int, int, int], None] = run
            return found
    return None


def openmp_libraries(maps: str) -> list[Path]:
    """Those that a process has loaded, torch's own first, as other packages may bring theirs. maps: /proc/self/maps."""
    mapped = {Path(line[line.index("/") :]) for line in maps.splitlines() if "/" in line}  # paths may have spaces
    own = Path(torch.__file__).resolve().parent
    found = [path for path in mapped if path.name.startswith(_OPENMP)]
    return sorted(found, key=lambda path: (not path.is_relative_to(own), path))
