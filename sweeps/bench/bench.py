"""`specbatch bench`: step times, throughput and TTFT of an engine, compared with the limits of its device.

    folder/<section>/<configuration>/<size>/r<repeat>/record.json, requests.jsonl
    folder/machine/0/r<repeat>/record.json

decode   a step without speculation at some batch sizes: two runs of the same prompts that differ only in new tokens,
         their difference in time over their difference in tokens; prefill, start and tail cancel out
         with an algorithm or a draft: an iteration of a baseline and of engines that draft, the mean over the
         iterations of one run that ran all requests, because requests that draft do not stay in step
verify   the same for a verify of 16 rows, compared with the 1-row step. NGRAM drafts, which costs almost nothing, and
         a simulated accept length of 1 keeps the requests in step
closed   a closed loop that keeps C requests unfinished: 2C prompts, 3 at C = 1
ttft     single requests, one after the other

All engines stay loaded on one copy of the weights, each with the KV pages that its points need. Repeats are
interleaved, A B C A B C. Prompts are random ids, the same for all; end tokens are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic
from specbatch.config import EngineConfig
from specbatch.core.request import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.jobs.configurations import load_engine
from specbatch.progress import Report
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import steps_at
from specbatch.sweeps.bench.columns import LEAST_STEPS
from specbatch.sweeps.bench.peers import PEERS
from specbatch.sweeps.bench.plan import BenchOptions, Load, Log, Plan, plan_engines
from specbatch.sweeps.bench.tables import POINT, load_records, losses_of, peers_of, write_table
from specbatch.sweeps.run.runner import WARM_UP_TOKENS
from specbatch.sweeps.run.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine


def run_bench(
    base: EngineConfig,
    options: BenchOptions,
    folder: Path,
    *,
    peers: str = "",
    log: Log | None = None,
    report: Report | None = None,
) -> str:
    """Measure every point, write its record as soon as it is done, and return the Markdown table.

    `base`: model, device, dtype, page size, prefill chunk and speculation; the points determine the rest of an engine.
    `folder` exists; `peers` is a CSV of other engines' figures. On an error or Ctrl-C the table of the finished points
    is written first. A point that fails leaves a record with the reason, and the others go on. Refused: a shape that
    no engine can be built for, a draft that does not fit, and sizes that do not fit the model, if the user gave them
    or none fits.
    """
    plan = plan_engines(base, options, log)
    total = options.repeats * (sum(len(point.names) for point in plan.points) + ("machine" in options.sections))
    finished = 0
    text = ""
    try:
        for record in _points(base, options, plan, log):
            work = record.workload
            place = folder.joinpath(*(str(work[key]) for key in POINT if key in work), f"r{work['repeat']}")
            place.mkdir(parents=True)
            record.save(place)
            if peers and not finished:
                write_atomic(folder / PEERS, peers)
            finished += 1
            if report is not None:
                report(finished, total)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"kept {finished} finished points and their table in {folder}") from None
    finally:
        if finished:
            text = write_table(folder)
    if log is not None and (below := losses_of(load_records(folder))):
        log(below.log_text)
    if peers and log is not None and not peers_of(folder, load_records(folder)):
        log("peers: no figure matches this model, dtype and device and one of these points")
    return text


def _points(base: EngineConfig, options: BenchOptions, plan: Plan, log: Log | None) -> Iterator[RunRecord]:
    """The records of all points, in the order of the run."""
    # Before the engines take their memory; saved once they are built.
    measured = [_machine(base, repeat) for repeat in range(1, options.repeats + 1) if "machine" in options.sections]
    errors: dict[str, str] = {}
    gemm_times: dict[tuple[int, int], float] = {}
    with ExitStack() as stack:
        engines, start_s = _engines(plan, stack, log, errors)
        yield from measured
        for point in plan.points:
            names, load = point.names, point.load
            broken = {name: errors[name] for name in names if name in errors}
            for name in names:
                if name not in broken:
                    with _noting(broken, name):
                        _warm_up(engines[name], load)
            for repeat, (place, name) in product(range(1, options.repeats + 1), enumerate(names)):
                record = None
                if name not in broken:
                    with _noting(broken, name):
                        record = _measure(engines[name], load)
                if record is None:
                    record = RunRecord(plan.engines[name].as_dict(), {}, {}, {}, [], {"error": broken[name]})
                elif point.section != "closed" and not point.load.full_batch:
                    with _noting(record.workload, "products_error"):
                        _add_gemm_time(record, engines[name], load, gemm_times)
                where = {"section": point.section, "configuration": name, "size": point.size, "repeat": repeat}
                record.workload |= where | {"place": place, "start_s": start_s.get(name)}
                yield record


def _machine(base: EngineConfig, repeat: int) -> RunRecord:
    from specbatch.runtime.device import find_device
    from specbatch.sweeps.machine.limits import measure_machine

    device = find_device(base.device)
    broken: dict[str, str] = {}
    metrics: dict[str, float | None] = {}
    with _noting(broken, "error"):
        metrics = measure_machine(device)
    work = {"section": "machine", "size": 0, "place": 0, "repeat": repeat, **broken}
    return RunRecord(base.as_dict(), {"device": str(device)}, metrics, {}, [], work)


def _engines(
    plan: Plan, stack: ExitStack, log: Log | None, errors: dict[str, str]
) -> tuple[dict[str, Engine], dict[str, float]]:
    """Every engine that can be built, and the seconds that took; the first loads the weights.

    The reasons why others cannot go into `errors`. Refused: none can be built.
    """
    engines: dict[str, Engine] = {}
    seconds: dict[str, float] = {}
    for name, config in plan.engines.items():
        first = next(iter(engines.values()), None)
        start = time.perf_counter()
        with _noting(errors, name):
            engines[name] = stack.enter_context(load_engine(name, config, log, weights_of=first))
            seconds[name] = time.perf_counter() - start
        if log is not None and name in errors:
            log(f"{name}: {errors[name]}")
    if errors and not engines:
        raise SpecbatchError(next(iter(errors.values())))
    return engines, seconds


@contextmanager
def _noting(reasons: dict[str, Any], name: str) -> Iterator[None]:
    """Keep the first line of an exception, so that a failed point does not end the run."""
    try:
        yield
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        reasons[name] = line if isinstance(error, SpecbatchError) else f"{type(error).__name__}: {line}"


def _warm_up(engine: Engine, load: Load) -> None:
    """Run the load's batch, and one request that takes another's slot. Prompt passes alternate with iterations, so each
    request has enough new tokens that the first one still runs when the last one begins."""
    passes = -(-load.concurrency * load.prompt_tokens // engine.caps["prefill_chunk"])
    enough = max(WARM_UP_TOKENS, (passes + 2) * engine.caps["verify_rows"])
    few = min(load.prompts, load.concurrency + 1)
    _measure(engine, replace(load, prompts=few, new_tokens=(min(enough, load.new_tokens[-1]),)))


def _measure(engine: Engine, load: Load) -> RunRecord:
    """Measure one point. Its record covers the run with the most new tokens, and holds the times of both runs."""
    from specbatch.sweeps.bench.traffic import step_bytes

    seed = engine.config.seed
    longest = load.new_tokens[-1]
    workload = Workload(input_len=load.prompt_tokens, output_len=longest, prompts_per_concurrency=1, seed=seed)
    prompts = workload.prompts(engine.tokenizer, load.prompts)
    calls = [[prompt] for prompt in prompts] if load.alone else [prompts]
    seconds, iterations = [], []
    for new_tokens in load.new_tokens:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        engine.reset_record()
        start = time.perf_counter()
        for call in calls:
            engine.generate(call, params, concurrency=load.concurrency)
        seconds.append(time.perf_counter() - start)
        record = engine.record(concurrency=load.concurrency)
        iterations.append(record.counters["iterations"])
    record.workload = workload.describe(prompts) | {"concurrency": load.concurrency, "new_tokens": load.new_tokens}
    if len(load.new_tokens) == 2:
        more = longest - load.new_tokens[0]
        record.metrics |= {"short_s": seconds[0], "long_s": seconds[1], "step_s": (seconds[1] - seconds[0]) / more}
        record.workload |= {"steps": more, "iterations": iterations[1] - iterations[0]}
        record.workload |= step_bytes(engine, load)
    if load.full_batch:
        steps, step_s = steps_at(record.counters, load.concurrency)
        record.workload["full_batch_steps"] = steps
        record.metrics["step_s"] = step_s if steps >= LEAST_STEPS else None
    return record


def _add_gemm_time(record: RunRecord, engine: Engine, load: Load, known: dict[tuple[int, int], float]) -> None:
    """Add the time of only the GEMMs of a step, or of a prompt of which only the last row goes through the head; or
    the reason why it is not measured."""
    import torch

    from specbatch.sweeps.bench.traffic import without_products
    from specbatch.sweeps.machine.limits import gemm_seconds

    if why := without_products(engine.model_config):
        record.workload["no_products"] = why
        return
    rows = load.prompt_tokens if load.alone else load.concurrency * engine.caps["verify_rows"]
    head_rows = 1 if load.alone else rows
    if (rows, head_rows) not in known:
        dtype = getattr(torch, engine.caps["dtype"])
        seconds = gemm_seconds(engine.model_config, rows, dtype, engine.device, head_rows=head_rows)
        known[rows, head_rows] = seconds
    record.metrics["products_s"] = known[rows, head_rows]
