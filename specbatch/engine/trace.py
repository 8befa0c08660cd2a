"""Traces decode steps: a Chrome trace, the kernels by time, and every source line at which the host waited.

The trace opens in chrome://tracing or ui.perfetto.dev. A wait is a call that blocks the host until the device has
caught up: an event or stream that is synchronised, or an operation that reads a device value (`.item()`,
`.tolist()`, a boolean mask, a copy from pageable memory), as torch's sync debug mode reports them.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import refuse
from specbatch.memory.page_pool import held_at_once

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine

WARM_UP_STEPS = 8
EXCLUSIVE = (
    "us exclusive: without the time in which a kernel that began before it on the same stream was still running. One "
    "that is launched early and waits for another counts as running; only this column adds up to the busy time."
)


@dataclass
class HostWaits:
    """Waits by the source line that caused them: how often, and for how long where known."""

    count: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, place: str, seconds: float | None) -> None:
        self.count[place] = self.count.get(place, 0) + 1
        if seconds is not None:
            self.seconds[place] = self.seconds.get(place, 0.0) + seconds

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """Most frequent first."""
        return [
            {
                "where": place,
                "waits": count,
                "per step": round(count / steps, 2),
                "ms": round(self.seconds[place] * 1000, 3) if place in self.seconds else None,
            }
            for place, count in sorted(self.count.items(), key=lambda item: -item[1])
        ]


@contextmanager
def host_waits(cuda: bool) -> Iterator[HostWaits]:
    """Collect the host's waits while the block runs."""
    waits = HostWaits()
    if not cuda:
        yield waits
        return
    explicit = {
        (owner, "synchronize"): owner.synchronize for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda)
    }

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **settings)
            finally:
                waits.add(_place(), time.perf_counter() - start)

        return run

    def noted(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.add(_place() or f"{filename}:{lineno}", None)
        else:
            shown(message, category, filename, lineno, file, line)

    mode, shown = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        for (owner, name), wait in explicit.items():
            setattr(owner, name, timed(wait))
        try:
            yield waits
        finally:
            for (owner, name), wait in explicit.items():
                setattr(owner, name, wait)
            torch.cuda.set_sync_debug_mode(mode)


def _place() -> str:
    """The innermost source line of this package, outside this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("specbatch.") and module != __name__:
            return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def trace(engine: Engine, prompts: list[list[int]], steps: int, path: Path) -> dict[str, Any]:
    """Decode `prompts`, record `steps` steps after a warm-up to `path`, and sum them up.

    Returns batch, configuration, steps, rows_per_step, step_ms (host time of a step, tracing included), metrics of the
    record, kernels (see `kernel_rows`) and waits (None without a CUDA device). Refused: a batch that the engine cannot
    hold at once.
    """
    # Long enough that no request ends while others still start.
    spare = sum(map(len, prompts)) // engine.caps["prefill_chunk"] + 4
    new_tokens = (WARM_UP_STEPS + steps + spare) * engine.caps["verify_rows"]
    held = held_at_once(engine.caps, [len(prompt) + new_tokens for prompt in prompts])
    if held < len(prompts):
        works = f"the engine holds {held} such requests with {new_tokens} new tokens at once; use shorter ones"
        raise refuse("batch", len(prompts), works)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    cuda = engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    engine.generate(prompts, params)  # compile what is compiled on first use
    events = engine.stream(prompts, params, text=False)
    try:
        started: set[int] = set()
        while len(started) < len(prompts):  # all of them decode
            started.add(next(events).index)
        _advance(engine, events, WARM_UP_STEPS)
        engine.reset_record()
        with profile(activities=activities) as profiler, host_waits(cuda) as waits:
            start = time.perf_counter()
            _advance(engine, events, steps)
            seconds = time.perf_counter() - start
    finally:
        events.close()
    profiler.export_chrome_trace(str(path))
    record = engine.record()
    done = record.counters["iterations"]
    return {
        "batch": len(prompts),
        "configuration": f"{engine.config.speculation}, {engine.config.graphs}",
        "steps": done,
        "rows_per_step": record.counters["iteration_rows"] / done,
        "step_ms": seconds * 1000 / done,
        "metrics": record.metrics,
        "kernels": kernel_rows(profiler.events() or [], done),
        "waits": waits.rows(done) if cuda else None,
    }


def kernel_rows(events: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    """The device's events by name, those with most exclusive time first. An event has `name`, `device_type`,
    `device_resource_id` (its stream) and `time_range` in microseconds, as torch's profiler gives them.

    us exclusive: of events of a stream in order of start, from the later of the start and the latest end so far to the
    end (see `EXCLUSIVE`).
    """
    kernels: dict[str, list[float]] = {}
    ends: dict[int, float] = {}  # of what a stream has run so far, the latest
    on_device = (event for event in events if event.device_type.name == "CUDA")
    for event in sorted(on_device, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        before = ends.get(event.device_resource_id, start)
        entry = kernels.setdefault(event.name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += end - start
        entry[2] += max(end - max(start, before), 0.0)
        ends[event.device_resource_id] = max(before, end)
    return [
        {
            "kernel": name[:70],
            "per step": round(count / steps, 2),
            "us per step": round(total / steps, 1),
            "us exclusive": round(exclusive / steps, 1),
        }
        for name, (count, total, exclusive) in sorted(kernels.items(), key=lambda item: -item[1][2])
    ]


def _advance(engine: Engine, events: Any, steps: int) -> None:
    """Consume events until `steps` more iterations are launched."""
    goal = engine.iterations + steps
    for _ in events:
        if engine.iterations >= goal:
            return


def text(result: dict[str, Any], kernels: int = 15) -> str:
    """The summary as Markdown."""
    from tabulate import tabulate

    def table(rows: list[dict[str, Any]], nothing: str) -> str:
        return tabulate(rows, headers="keys", tablefmt="github") if rows else nothing

    metrics, waits = result["metrics"], result["waits"]
    facts = [
        f"batch {result['batch']}; {result['configuration']}",
        f"{result['steps']} steps of {result['rows_per_step']:.1f} requests, {result['step_ms']:.3f} ms each with "
        "tracing",
    ]
    for name, title, factor, unit in (
        ("device_idle_share", "device idle", 100, "%"),
        ("launch_lead_s", "launch lead", 1000, " ms"),
        ("host_waits_per_step", "host waits with nothing launched after", 1, " per step"),
        ("graph_coverage", "graph coverage", 100, "%"),
    ):
        if metrics[name] is not None:
            facts.append(f"{title}: {metrics[name] * factor:.2f}{unit}")
    parts = ["\n".join(facts), "Where the host waited:"]
    parts.append("not known: no CUDA device" if waits is None else table(waits, "nowhere"))
    parts += ["Kernels:", table(result["kernels"][:kernels], "none: no CUDA device")]
    parts += [EXCLUSIVE] * bool(result["kernels"])
    return "\n\n".join(parts)
