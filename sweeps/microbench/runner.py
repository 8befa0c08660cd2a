"""Times the cases of an operation, interleaved, and makes Markdown rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

import torch

from specbatch.config.values import whole_numbers
from specbatch.errors import at_least
from specbatch.sweeps.machine.limits import gemm_rate, read_bandwidth
from specbatch.sweeps.machine.timing import captured, interleaved_seconds

Call = Callable[[], object]
Row = dict[str, object]
Shown = Literal["GB/s", "TFLOP/s", "floor"]
REPEATS = 9


def counts(setting: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers of at least 1."""
    found = whole_numbers(setting, text)
    for number in found:
        at_least(setting, number, 1)
    return found


@dataclass(frozen=True)
class Case:
    """One row: variants of an operation that are timed side by side.

    labels  cells that name the row
    calls   by the title of its column, what is captured in one CUDA graph (run in a row on a CPU); a time is that of
            one call, or of one of the `count` operations of a call
    bytes   memory that an operation must move
    flop    floating-point operations; with `fp8` their floor is the FP8 GEMM rate
    pause_s idle seconds before each run
    """

    labels: Mapping[str, object]
    calls: Mapping[str, Sequence[Call]]
    count: int = 1
    bytes: float = 0.0
    flop: float = 0.0
    fp8: bool = False
    pause_s: float = 0.0


@dataclass(frozen=True)
class Table:
    """Cases to time, or rows that are ready. `shows`: rates of each variant; the floor of the first one."""

    rows: Iterable[Case | Row]
    title: str = ""
    shows: tuple[Shown, ...] = ()
    unit: Literal["us", "ms"] = "us"
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    repeats: int = REPEATS

    def measured(self) -> list[Row]:
        return [self._measure(row) if isinstance(row, Case) else row for row in self.rows]

    def _measure(self, case: Case) -> Row:
        on_cuda = self.device.type == "cuda"
        runs = {name: in_a_row(calls) for name, calls in case.calls.items()}
        if on_cuda:
            runs = {name: captured(run) for name, run in runs.items()}
        warm_ups = 3 if on_cuda else 1
        found = interleaved_seconds(runs, self.device, self.repeats, warm_ups=warm_ups, pause_s=case.pause_s)
        seconds = {
            name: [time / (len(case.calls[name]) * case.count) for time in times] for name, times in found.items()
        }
        row = dict(case.labels)
        for name, times in seconds.items():
            row[f"{name} ({self.unit})"] = self._spread(times)
            if "GB/s" in self.shows:
                row[f"{name} (GB/s)"] = f"{case.bytes / median(times) / 1e9:.0f}"
            if "TFLOP/s" in self.shows:
                row[f"{name} (TFLOP/s)"] = f"{case.flop / median(times) / 1e12:.0f}"
        if "floor" in self.shows:
            floor = max(case.bytes / read_limit(self.device), case.flop and case.flop / gemm_limit(case.fp8))
            first = next(iter(seconds))
            row[f"floor ({self.unit})"] = self._spread([floor])
            row[f"{first} / floor"] = f"{median(seconds[first]) / floor:.2f}"
        return row

    def _spread(self, seconds: list[float]) -> str:
        """Median, and smallest and largest of several."""
        factor = {"us": 1e6, "ms": 1e3}[self.unit]
        middle, low, high = (f"{factor * value:.{1 if self.unit == 'us' else 2}f}" for value in _bounds(seconds))
        return middle if low == high else f"{middle} ({low}-{high})"


@cache
def read_limit(device: torch.device) -> float:
    """Bytes per second."""
    return read_bandwidth(device)


@cache
def gemm_limit(fp8: bool) -> float:
    """FLOP per second."""
    return gemm_rate(torch.device("cuda"), fp8=fp8)


def _bounds(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def in_a_row(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run
