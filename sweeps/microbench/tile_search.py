"""Searches a grid of tiles for the fastest ones, and shows them next to the tile that the rules choose."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import astuple, is_dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from specbatch.sweeps.machine.timing import captured, interleaved_seconds
from specbatch.sweeps.microbench.runner import Call, Row, in_a_row

REPEATS, SHOWN = 3, 3
Choice = TypeVar("Choice")


def compile_all(compile_one: Callable[..., object], jobs: Iterable[Sequence[object]]) -> None:
    """Call `compile_one(*job)` for all jobs in several processes, which fills Triton's cache on disk. It must be a
    function of a module, and launch a kernel once."""
    processes, spawn = min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as pool:
        list(pool.map(partial(_compile, compile_one), jobs))


def _compile(compile_one: Callable[..., object], job: Sequence[object]) -> None:
    with suppress(OutOfResources):
        compile_one(*job)
        torch.cuda.synchronize()


def fastest(
    labels: Row,
    launches: Callable[[Choice], Sequence[Call]],
    rule: Choice,
    grid: Iterable[Choice],
    columns: str,
) -> Row:
    """labels, and microseconds of one launch with its tile: of the rule, and of the fastest of the grid. A tile that
    needs more of the device than there is does not count. launches: of a tile, over more data than the L2 cache holds;
    columns: names of a tile's numbers."""

    def time(choice: Choice) -> tuple[float, str]:
        calls = launches(choice)
        run = captured(in_a_row(calls))
        seconds = median(interleaved_seconds({"": run}, torch.device("cuda"), REPEATS, warm_ups=1)[""])
        once = 1e6 * seconds / len(calls)
        return once, ", ".join([f"{once:.1f}", *map(str, _numbers(choice))])

    found = []
    for choice in grid:
        with suppress(OutOfResources):
            found.append(time(choice))
    best = [text for _, text in sorted(found)[:SHOWN]]
    return labels | {f"rule: us, {columns}": time(rule)[1]} | dict(zip(("best", "second", "third"), best, strict=False))


def _numbers(choice: object) -> list[object]:
    if is_dataclass(choice) and not isinstance(choice, type):
        choice = astuple(choice)
    return [number for part in choice for number in _numbers(part)] if isinstance(choice, tuple) else [choice]
