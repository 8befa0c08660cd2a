"""Synthetic sweep records: made-up requests with the metrics and counters that an engine derives from them."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.records.environment import versions
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import emitted_histogram, summarize, total_acceptance
from specbatch.records.sweep_plan import Point

DRAFTS = 4
_versions = cache(versions)
ORDER = ("baseline", "v1", "v2", "v2+piecewise")  # within a round
CAPS = {"max_running": 8, "max_model_len": 64, "kv_pages": 32, "page_size": 16, "prefill_chunk": 64}


def request(random: Random, index: int, drafts: int) -> Completion:
    """40 verifies after one first token."""
    counts = Acceptance()
    left = []
    for step in range(40):
        right = min(random.randrange(drafts + 1), random.randrange(drafts + 1)) if drafts else 0
        counts.count(context=16 + step, room=99, kept=right + 1, drafted=drafts, accepted=right)
        left.append(right + 1)
    tpot = random.uniform(0.004, 0.02)
    metrics = RequestMetrics(
        prompt_tokens=8,
        output_tokens=1 + sum(left),
        ttft_s=random.uniform(0.01, 0.5),
        tpot_s=tpot,
        e2e_s=0.5 + tpot * sum(left),
        verify_steps=len(left),
        emitted=sum(left),
        drafted=drafts * len(left),
        accepted=sum(left) - len(left),
        emitted_histogram=[left.count(tokens) for tokens in range(drafts + 2)],
        acceptance=counts,
        itl_s=[tpot] * sum(left),
    )
    return Completion(index, [1] * 8, [2] * metrics.output_tokens, "", "length", metrics)


def swept(
    configuration: str,
    concurrency: int = 4,
    repeat: int = 1,
    *,
    device: bool = True,
    simulate: float | None = None,
    seed: int = 0,
    **work: Any,
) -> RunRecord:
    """One point. device: has it device clocks?"""
    made: RunRecord = pickle.loads(_pickled(configuration, concurrency, repeat, device, simulate, seed))
    return replace(made, workload=made.workload | work)


@cache
def _pickled(
    configuration: str, concurrency: int, repeat: int, device: bool, simulate: float | None, seed: int
) -> bytes:
    random = Random(f"{configuration} {concurrency} {repeat} {seed}")
    drafts = 0 if configuration == "baseline" else DRAFTS
    spec = Speculation()
    if drafts:
        spec = Speculation("ngram", "v1", draft_tokens=drafts, simulate_accept_length=simulate)
    done = [request(random, index, drafts) for index in range(2 * concurrency)]
    window = random.uniform(5, 9)
    busy = window * random.uniform(0.5, 0.7)
    metrics = summarize(done, window, concurrency) | {"peak_output_throughput": 99.0, "step_time_s": 0.012}
    counters: dict[str, Any] = {
        "emitted_histogram": emitted_histogram(done),
        "acceptance": total_acceptance(done).as_counters(),
        "iterations": 40,
        "iteration_s": busy,
        "steps_by_rows": {str(concurrency): [40, 0.48]},
    }
    if device:
        counters |= {"device_steps": 40, "device_s": busy, "device_gaps": 39, "device_idle_s": 0.1 * busy}
        metrics |= {"device_step_s": 0.009}
    workload = {
        "dataset": "random", "input_len": 8, "output_len": 160, "ignore_eos": True, "seed": 0, "prompts": len(done),
        "output_sha256": "same", "configuration": configuration, "repeat": repeat,
        "concurrency": concurrency, "request_rate": None, "place": [*ORDER, configuration].index(configuration),
    }  # fmt: skip
    record = RunRecord(
        config=asdict(EngineConfig(speculation=spec, graphs=Graphs(decode="off", prefill="off"))),
        caps=CAPS | {"device": "cuda:0" if device else "cpu", "dtype": "float32"},
        metrics=metrics,
        counters=counters,
        requests=[one.as_row() for one in done],
        workload=workload,
        versions=dict(_versions()),
        created="2026-01-02T03:04:05+00:00",
    )
    return pickle.dumps(record)


def saved(folder: Path, *records: RunRecord) -> Path:
    """The records as a sweep leaves them."""
    for record in records:
        work = record.workload
        point = Point(work["configuration"], 0, work["concurrency"], work["repeat"]).folder(folder)
        point.mkdir(parents=True)
        record.save(point)
    return folder
