"""`specbatch bench`: how fast the engine is on a shape, against the device it runs on.

    folder/<section>/<configuration>/<size>/r<repeat>/record.json, requests.jsonl
    folder/machine/0/r<repeat>/record.json

decode   a step of plain decoding at some batch sizes: two runs of the same prompts that differ in new tokens alone,
         their difference in time over their difference in tokens; prefill, start and tail cancel out
         with an algorithm or a draft: an iteration of a baseline and of engines that draft, the mean of those of one
         run that ran all requests, as requests that accept by themselves do not stay in step
verify   the same for a verify of 16 rows, beside the 1-row step. NGRAM drafts, as that costs next to nothing, and a
         simulated accept length of 1 keeps the requests in step
closed   a closed loop that keeps C requests unfinished: 2C prompts, 3 at C = 1
ttft     requests on their own, one after the other

All engines live side by side on one copy of the weights, each with the KV pages that its points need. Repeats are
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

    `base`: model, device, type, page size, prefill chunk and who drafts; the rest of an engine follows from its points.
    `folder` exists; `peers` is a CSV to show beside. On an error or Ctrl-C the table of what is finished is written
    first. A point that fails leaves a record that says why, and the others go on. Refused: a shape that no engine can
    be made for, a draft that does not fit, and sizes that do not fit the model, if they were asked for or all are.
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
        log("peers: none of the figures is for this model, type and device and one of these points")
    return text


def _points(base: EngineConfig, options: BenchOptions, plan: Plan, log: Log | None) -> Iterator[RunRecord]:
    """The record of every point, in the order of the run."""
    # Before the engines take their memory; kept once they are there.
    measured = [_machine(base, repeat) for repeat in range(1, options.repeats + 1) if "machine" in options.sections]
    errors: dict[str, str] = {}
    products: dict[tuple[int, int], float] = {}
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
                        _add_products(record, engines[name], load, products)
                where = {"section": point.section, "configuration": name, "size": point.size, "repeat": repeat}
                record.workload |= where | {"place": place, "start_s": start_s.get(name)}
                yield record


def _machine(base: EngineConfig, repeat: int) -> RunRecord:
    from specbatch.engine.builder import find_device
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
    """Every engine that can be made, and the seconds that took; the first loads the weights.

    Why the others cannot be made goes into `errors`. Refused: none can.
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
    """What goes wrong inside is the point's fault, not the run's: one line of it is kept."""
    try:
        yield
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        reasons[name] = line if isinstance(error, SpecbatchError) else f"{type(error).__name__}: {line}"


def _warm_up(engine: Engine, load: Load) -> None:
    """The load's own batch, and one request that takes another's place. As prompt passes and iterations take turns,
    each has so many new tokens that the first still runs when the last begins."""
    passes = -(-load.concurrency * load.prompt_tokens // engine.caps["prefill_chunk"])
    enough = max(WARM_UP_TOKENS, (passes + 2) * engine.caps["verify_rows"])
    few = min(load.prompts, load.concurrency + 1)
    _measure(engine, replace(load, prompts=few, new_tokens=(min(enough, load.new_tokens[-1]),)))


def _measure(engine: Engine, load: Load) -> RunRecord:
    """One point. Its record covers the run with the most new tokens, and has what both runs took together."""
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


def _add_products(record: RunRecord, engine: Engine, load: Load, known: dict[tuple[int, int], float]) -> None:
    """The time of the matrix products alone, of a step or of a prompt whose last row alone goes through the head; or
    why it is not measured."""
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
