"""Compiles the Triton kernels of CUDA graphs in parallel, before the graphs are recorded.

Triton compiles a kernel when it is first launched, and the launching thread waits. With an empty cache that takes half
a minute for the few hundred kernels of an engine. Here every program is first captured without its Triton launches,
each of which only hands its kernel to a pool of threads, and the capture is dropped. Nothing runs on the device, so
nothing depends on values that the kernels would have computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import JITFunction
from triton.runtime._async_compile import AsyncCompileMode

MOST_THREADS = 32


@contextmanager
def compiling_only() -> Iterator[AsyncCompileMode]:
    """Within it, launches of Triton kernels of this process start to compile them and return. Leaving it waits until all
    are compiled; the first error of a compiler is raised."""
    launch = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "compile") as pool, AsyncCompileMode(pool) as mode:
        JITFunction.run = compile_only  # type: ignore[method-assign]
        try:
            yield mode
        finally:
            JITFunction.run = launch  # type: ignore[method-assign]
