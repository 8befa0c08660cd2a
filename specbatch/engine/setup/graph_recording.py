"""Records the CUDA graphs of an engine at start, after their kernels are compiled in parallel."""

from __future__ import annotations

import time
from typing import Any

from specbatch.config.engine_config import Graphs
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.errors import counted
from specbatch.memory.planner import MemoryPlan, available_memory, size_text
from specbatch.progress.bars import Stages
from specbatch.weights import Log


def record_graphs(worker: DeviceWorker, plan: MemoryPlan, graphs: Graphs, log: Log, progress: Stages) -> dict[str, Any]:
    """Record the graphs, if any, once their kernels are compiled. Returns the time and memory that it took, and the
    largest batch if it is smaller than planned, for the caps."""
    if not worker.recordings():
        return {}
    if graphs.prefill == "piecewise" and plan.prefill_chunk > worker.recorded_tokens:
        most = worker.recorded_tokens
        log(f"prefill passes of more than {most} tokens run without graphs, which would not make them faster")
    start, free = time.perf_counter(), available_memory(worker.batch.device)
    progress.begin("compiling kernels")
    compiled = worker.compile_kernels(progress)
    recording = time.perf_counter()
    if compiled and compiled.kernels:
        log(f"kernels: {len(compiled.kernels)} compiled in {recording - start:.1f} s")
    if compiled and compiled.missed:
        reason = f"they need values, such as for {min(compiled.missed)}"
        log(f"kernels of {counted(len(compiled.missed), 'program')} are compiled one by one: {reason}")
    progress.begin("recording graphs")
    total = worker.record_graphs(progress)
    seconds, taken = time.perf_counter() - recording, max(free - available_memory(worker.batch.device), 0)
    log(f"graphs: {total} buckets recorded in {seconds:.1f} s, {size_text(taken)}")
    found: dict[str, Any] = {"compile_s": recording - start, "capture_s": seconds, "graph_bytes": taken}
    if left_out := sorted({size for item in worker.recordings() for size in item.left_out}):
        works = f"memory_fraction={plan.memory_fraction:g} leaves too little memory for them; use a lower one"
        log(f"graphs of {', '.join(map(str, left_out))} requests or tokens are not recorded: {works}")
    if worker.graphs is not None and (most := worker.graphs.most) < plan.max_running:
        why = f"lowered from {plan.max_running}: there was no memory for the graphs of more"
        log(f"max_running: {most} ({why})")
        found |= {"max_running": most, "reasons": plan.reasons | {"max_running": why}}
    return found
