"""Times of the kernels of a run: launches, how long each runs, and what it adds to the run.

The profiler times every kernel, also those of CUDA graphs. Two runs of different lengths are profiled, and the
difference is divided by that of their steps, so that what both runs do does not count. A kernel that waits for the one
before it (dependent launch) counts as running while it waits, so "us" adds up to more than the step. "added us" adds up
to the step: it is the time from the end of all earlier kernels to the end of this one, and includes the gap between
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from specbatch.sweeps.microbench.runner import Row


class Kernel(NamedTuple):
    launches: float = 0
    us: float = 0
    added: float = 0  # us

    def plus(self, other: Kernel, times: float = 1) -> Kernel:
        return Kernel(*(mine + times * more for mine, more in zip(self, other, strict=True)))


class Interval(NamedTuple):
    """When a kernel ran, in us."""

    name: str
    start: float
    end: float


def profiled(run: Callable[[], float]) -> tuple[float, dict[str, Kernel]]:
    """What `run` returns, and the times of its kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps = run()
        torch.cuda.synchronize()
    events = (event for event in found.events() if event.device_type.name == "CUDA")
    times = ((event.name, event.time_range) for event in events)
    return steps, totals(Interval(name, time.start, time.end) for name, time in times)


def totals(intervals: Iterable[Interval]) -> dict[str, Kernel]:
    """Of all launches of each kernel. The gap before the first one does not count."""
    found: dict[str, Kernel] = defaultdict(Kernel)
    last: float | None = None
    for name, start, end in sorted(intervals, key=lambda interval: interval.end):
        added = end - (start if last is None else last)
        found[name] = found[name].plus(Kernel(1, end - start, added))
        last = end
    return dict(found)


def per_step(long: Mapping[str, Kernel], short: Mapping[str, Kernel], steps: float) -> dict[str, Kernel]:
    """Of each kernel that the steps launched by which one run is longer than the other."""
    more = {name: kernel.plus(short.get(name, Kernel()), -1) for name, kernel in long.items()}
    return {name: Kernel().plus(kernel, 1 / steps) for name, kernel in more.items() if kernel.launches > 0}


def by_time(kernels: Mapping[str, Kernel], most: int) -> Iterator[Row]:
    """The kernels that add most, the sum of the others, and that of all."""
    ordered = sorted(kernels.items(), key=lambda item: -item[1].added)
    others = [kernel for _, kernel in ordered[most:]]
    shown = [(name[:60], kernel) for name, kernel in ordered[:most]]
    if others:
        shown.append((f"{len(others)} others", _sum(others)))
    total = _sum(kernels.values())
    for name, kernel in [*shown, ("all", total)]:
        yield {
            "kernel": name,
            "launches": f"{kernel.launches:.1f}",
            "us": f"{kernel.us:.1f}",
            "us each": f"{kernel.us / kernel.launches:.2f}" if kernel.launches else "-",
            "added us": f"{kernel.added:.1f}",
            "share (%)": f"{100 * kernel.added / total.added:.1f}" if total.added else "-",
        }


def _sum(kernels: Iterable[Kernel]) -> Kernel:
    return reduce(Kernel.plus, kernels, Kernel())
