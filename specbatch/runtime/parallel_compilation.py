"""Compiles the Triton kernels of an engine in parallel, before its CUDA graphs are recorded.

Triton compiles a kernel when it is first launched, and the launching thread waits: with an empty cache that takes half
a minute for the hundred or two of an engine. Here what is going to be recorded is rehearsed first: the host does
everything that it does for a pass, except that operations of PyTorch compute nothing (see `rehearsal`) and that
launches only hand their kernel to a pool of threads. Nothing depends on a rehearsal: what it misses, or compiles in
vain, costs time only. Engines that are built at the same time by several threads compile one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import triton
from triton import AsyncCompileMode, JITFunction

from specbatch.kernels.common.rehearsal import rehearse, rehearsing
from specbatch.progress.bars import Report

MOST_THREADS = 32
_compiling = threading.Lock()  # launches are redirected for the whole process


class Compiled(NamedTuple):
    """kernels: names of those that were not in Triton's cache; missed: why programs were not rehearsed to their end, so
    that the rest of their kernels is compiled when it is launched."""

    kernels: Sequence[str] = ()
    missed: Sequence[str] = ()


class Compilation(AsyncCompileMode):  # type: ignore[misc]
    """What `compiling_only` has handed to its threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self.launching = ""  # the kernel that is being launched
        self.compiled: list[str] = []  # kernels that were not in the cache
        self._names: dict[Future[Any], str] = {}
        self._places: list[tuple[Future[Any], Callable[[Any], None]]] = []

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any, *more: Any) -> Any:
        """finalize_fn: writes a kernel to its place among those that are known to Triton."""
        found = super().submit(key, partial(_ready_to_launch, compile_fn), finalize_fn, *more)
        if found.kernel is None:
            self._names.setdefault(found.future, self.launching)
            self._places.append((found.future, finalize_fn))
            finalize_fn(found)  # later launches find it, and need not look for it in the cache on disk again
        return found

    def __len__(self) -> int:
        return len(self._names)

    def is_cold(self) -> bool:
        """Whether a kernel was not in the cache. Returns when that is known."""
        waiting = set(self._names)
        while waiting and not self.compiled:
            _, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        return bool(self.compiled)

    def finish(self, report: Report) -> None:
        """Wait for all kernels. Raises RuntimeError with the name of one that does not compile."""
        for done, future in enumerate(as_completed(self._names), start=1):
            error = future.exception()
            if error is not None:
                name = self._names[future]
                raise RuntimeError(f"the kernel {name} does not compile: {type(error).__name__}: {error}") from error
            report(done, len(self))

    def __exit__(self, exc_type: Any, *error: Any) -> None:
        if exc_type is not None:
            self.executor.shutdown(cancel_futures=True)
        for future, finalize in self._places:  # without a kernel: a later launch compiles it
            finalize(None if future.cancelled() or future.exception() else future.result())
        self.raw_futures: list[Future[Any]] = []
        super().__exit__(exc_type, *error)


def _ready_to_launch(compile_kernel: Callable[[], Any]) -> Any:
    """The kernel, with what launches it: in Triton 3.6 that is a module in C for each signature, which takes a
    compiler of the machine a fifth of a second and is otherwise made by the first launch."""
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def compiling_only() -> Iterator[Compilation]:
    """Within it, launches of Triton kernels by this thread start to compile them and return."""
    launch, heard = JITFunction.run, triton.knobs.compilation.listener
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    own = threading.get_ident()

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != own:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        mode.launching = self.__name__
        return launch(self, *args, grid=grid, warmup=True, **options)

    def listen(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            mode.compiled.append(src.name)
        if heard is not None:
            heard(src=src, cache_hit=cache_hit, **more)

    pool = ThreadPoolExecutor(threads, "compile")
    try:
        with Compilation(pool) as mode:
            JITFunction.run = compile_only
            triton.knobs.compilation.listener = listen
            yield mode
    finally:
        JITFunction.run = launch
        triton.knobs.compilation.listener = heard
        pool.shutdown(cancel_futures=True)


def compile_ahead(
    parts: Sequence[Iterator[object]], passes: Sequence[Callable[[], object]], report: Report
) -> Compiled:
    """Compile what is launched by parts, iterators that run a little of a program per item, and then by passes, if a
    kernel of the first item of a part is not in Triton's cache."""

    def all_of(part: Iterator[object]) -> None:
        for _ in part:
            report(0, len(mode))

    with _compiling, compiling_only() as mode:
        with rehearsing() as missed:
            for part in parts:
                rehearse(partial(next, part, None))
        if mode.is_cold():
            with rehearsing() as more:
                for part in parts:
                    rehearse(partial(all_of, part))
                for program in passes:
                    rehearse(program)
            report(0, len(mode))
            missed += more
        mode.finish(report)
        return Compiled(mode.compiled, missed)
