"""`specbatch bench`: how fast the engine is on a shape, against the device it runs on.

    folder/<section>/<configuration>/<size>/r<repeat>/record.json, requests.jsonl
    folder/machine/0/r<repeat>/record.json

decode   a step of plain decoding at some batch sizes: two runs of the same prompts that differ in new tokens alone,
         their difference in time over their difference in tokens; prefill, start and tail cancel out
verify   the same for a verify of 16 rows, beside the 1-row step. NGRAM drafts, as that costs next to nothing, and a
         simulated accept length of 1 keeps the requests in step
closed   a closed loop that keeps C requests unfinished: 2C prompts, 3 at C = 1
ttft     requests on their own, one after the other

All engines live side by side on one copy of the weights, each with the KV pages that its points need. Repeats are
interleaved, A B C A B C. Prompts are random ids, the same for all; end tokens are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.memory.pages import pages_for, reach_of
from specbatch.metrics import RunRecord, write_atomic
from specbatch.progress import Report
from specbatch.request import SamplingParams
from specbatch.sweeps.bench_tables import PEERS, POINT, SECTIONS, write_table
from specbatch.sweeps.runner import load_engine
from specbatch.sweeps.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine import Engine
    from specbatch.models.config import ModelConfig

VERIFY_ROWS = 16
VERIFY = f"v2, {VERIFY_ROWS} rows"
# Plain decoding: schedule, and whether prompts go through piecewise graphs.
PLAIN = {"v1": ("v1", "off"), "v2": ("v2", "off"), "v2+piecewise": ("v2", "piecewise")}
TTFT_REQUESTS = 5
TTFT_NEW_TOKENS = 8  # so that the step behind the first token is there to be waited for
WARM_UP_TOKENS = 16
_ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
Log = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What one point sends: `prompts` random prompts, once for each number of new tokens."""

    prompts: int
    prompt_tokens: int
    new_tokens: tuple[int, ...]
    concurrency: int
    alone: bool = False  # each request in a run of its own: nothing of the one before is left on the device

    @property
    def longest(self) -> int:
        """Prompt and output of a request."""
        return self.prompt_tokens + max(self.new_tokens)


@dataclass(frozen=True)
class BenchOptions:
    """Which points are measured, `repeats` times each. None: what the device can."""

    sections: tuple[str, ...] = SECTIONS
    configs: tuple[str, ...] | None = None
    decode_graph: str | None = None
    batch: tuple[int, ...] = (1, 32, 128)
    verify_batch: tuple[int, ...] = (1, 32)
    decode_tokens: int = 512
    new_tokens: tuple[int, ...] = (32, 288)
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    input_len: int = 1024
    output_len: int = 256
    ttft_tokens: tuple[int, ...] = (128, 1024, 8192)
    repeats: int = 3

    def __post_init__(self) -> None:
        for setting, allowed in (("sections", SECTIONS), ("configs", tuple(PLAIN))):
            for name in getattr(self, setting) or ():
                if name not in allowed:
                    raise refuse(setting, name, f"use some of {', '.join(allowed)}")
        for setting in ("sections", "configs", "batch", "verify_batch", "concurrency", "ttft_tokens"):
            values = getattr(self, setting)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise refuse(setting, ",".join(map(str, values)), "name at least one, and each only once")
        for setting in ("batch", "verify_batch", "concurrency", "ttft_tokens", "new_tokens"):
            for number in getattr(self, setting):
                at_least(setting, number, 1)
        for setting in ("decode_tokens", "input_len", "output_len", "repeats"):
            at_least(setting, getattr(self, setting), 1)
        if len(self.new_tokens) != 2 or self.new_tokens[0] >= self.new_tokens[1]:
            raise refuse(
                "new_tokens", ",".join(map(str, self.new_tokens)), "use two numbers, the smaller first: 32,288"
            )

    def sizes(self, section: str) -> tuple[int, ...]:
        """Batch sizes, concurrencies or prompt lengths; none for the machine."""
        return {
            "decode": self.batch,
            "closed": self.concurrency,
            "ttft": self.ttft_tokens,
            "verify": self.verify_batch,
        }.get(section, ())

    def load(self, section: str, size: int) -> Load:
        if section == "closed":
            return Load(2 * size if size > 1 else 3, self.input_len, (self.output_len,), size)
        if section == "ttft":
            return Load(TTFT_REQUESTS, size, (TTFT_NEW_TOKENS,), 1, alone=True)
        return Load(size, self.decode_tokens, self.new_tokens, size)


@dataclass(frozen=True)
class Plan:
    """Engines by name, and the names that each section compares."""

    engines: dict[str, EngineConfig]
    compared: dict[str, list[str]]


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

    `base`: model, device, type, page size and prefill chunk; the rest of an engine follows from its points. `folder`
    exists; `peers` is a CSV to show beside. On an error or Ctrl-C the table of what is finished is written first. A
    point that fails leaves a record that says why, and the others go on. Refused: a shape that no engine can be made
    for.
    """
    plan = plan_engines(base, options)
    total = options.repeats * (
        sum(len(options.sizes(section)) * len(names) for section, names in plan.compared.items())
        + ("machine" in options.sections)
    )
    finished = 0
    text = ""
    try:
        for record in _points(base, options, plan, log):
            work = record.workload
            point = folder.joinpath(*(str(work[key]) for key in POINT if key in work), f"r{work['repeat']}")
            point.mkdir(parents=True)
            record.save(point)
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
    return text


def plan_engines(base: EngineConfig, options: BenchOptions) -> Plan:
    """What the sections need: each engine has the places and pages of its largest point, all have the same length."""
    from specbatch.build import find_device

    on_cuda = find_device(base.device).type == "cuda"
    decode = options.decode_graph or ("whole" if on_cuda else "off")
    plain = options.configs or tuple(name for name, (_, prefill) in PLAIN.items() if on_cuda or prefill == "off")
    compared = {
        "decode": [name for name in plain if PLAIN[name][1] == "off"] or list(plain),
        "closed": list(plain),
        "ttft": list(plain),
        "verify": ["v2", VERIFY],
    }
    compared = {
        section: compared[section] for section in SECTIONS if section in options.sections and section in compared
    }
    loads: dict[str, list[Load]] = {}
    for section, names in compared.items():
        for name in names:
            loads.setdefault(name, []).extend(options.load(section, size) for size in options.sizes(section))
    longest = max((load.longest for some in loads.values() for load in some), default=0)
    engines = {}
    for name, some in loads.items():
        schedule, prefill = PLAIN.get(name, ("v2", "off"))
        drafts = Speculation("ngram", schedule, draft_tokens=VERIFY_ROWS - 1, simulate_accept_length=1.0)
        speculation = drafts if name == VERIFY else Speculation(schedule=schedule)

        def pages(tokens: int, rows: int = speculation.drafted + 1) -> int:
            return pages_for(reach_of(tokens, rows), base.page_size)

        engines[name] = replace(
            base,
            speculation=speculation,
            graphs=Graphs(decode=decode, prefill=prefill),
            max_running=max(load.concurrency for load in some),
            max_model_len=longest,
            kv_pages=max(pages(longest), *(load.concurrency * pages(load.longest) for load in some)),
            prefix_cache=False,
        )
    return Plan(engines, compared)


def _points(base: EngineConfig, options: BenchOptions, plan: Plan, log: Log | None) -> Iterator[RunRecord]:
    """The record of every point, in the order of the run."""
    # Before the engines take their memory; kept once they are there.
    measured = [_machine(base, repeat) for repeat in range(1, options.repeats + 1) if "machine" in options.sections]
    errors: dict[str, str] = {}
    products: dict[tuple[int, int], float] = {}
    with ExitStack() as stack:
        engines, start_s = _engines(plan, stack, log, errors)
        yield from measured
        for section, names in plan.compared.items():
            for size in options.sizes(section):
                load = options.load(section, size)
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
                            if section != "closed":
                                record.metrics |= _products(engines[name], load, products)
                    if record is None:
                        record = RunRecord(plan.engines[name].as_dict(), {}, {}, {}, [], {"error": broken[name]})
                    where = {"section": section, "configuration": name, "size": size, "repeat": repeat, "place": place}
                    record.workload |= where | {"start_s": start_s.get(name)}
                    yield record


def _machine(base: EngineConfig, repeat: int) -> RunRecord:
    from specbatch.build import find_device
    from specbatch.sweeps.machine import measure_machine

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
def _noting(reasons: dict[str, str], name: str) -> Iterator[None]:
    """What goes wrong inside is the point's fault, not the run's: one line of it is kept."""
    try:
        yield
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        reasons[name] = line if isinstance(error, SpecbatchError) else f"{type(error).__name__}: {line}"


def _warm_up(engine: Engine, load: Load) -> None:
    short = replace(load, new_tokens=(min(WARM_UP_TOKENS, *load.new_tokens),))
    _measure(engine, short)


def _measure(engine: Engine, load: Load) -> RunRecord:
    """One point. Its record covers the run with the most new tokens, and has what both runs took together."""
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
    return record


def _products(engine: Engine, load: Load, known: dict[tuple[int, int], float]) -> dict[str, float | None]:
    """The time of the matrix products alone: of a step, or of a prompt whose last row alone goes through the head."""
    import torch

    from specbatch.sweeps.machine import products_seconds

    rows = load.prompt_tokens if load.alone else load.concurrency * engine.caps["verify_rows"]
    head_rows = 1 if load.alone else rows
    if (rows, head_rows) not in known:
        dtype = getattr(torch, engine.caps["dtype"])
        seconds = products_seconds(engine.model_config, rows, dtype, engine.device, head_rows=head_rows)
        known[rows, head_rows] = seconds
    return {"products_s": known[rows, head_rows]}


def step_bytes(engine: Engine, load: Load) -> dict[str, float]:
    """What a step reads: the weights it uses, and keys and values at the mean context of the measured steps."""
    caps = engine.caps
    context = load.prompt_tokens + sum(load.new_tokens) / 2
    kv_token = caps["kv_bytes"] / (caps["kv_pages"] * caps["page_size"])
    weights = used_parameters(engine.model_config) * _ITEM_SIZE[caps["dtype"]]
    return {
        "weight_bytes": weights,
        "kv_token_bytes": kv_token,
        "mean_context": context,
        "step_bytes": weights + load.concurrency * context * kv_token,
    }


def used_parameters(model: ModelConfig) -> int:
    """Parameters that a step reads: an embedding table that is not the head too gives it one row per token only."""
    return model.parameter_count() - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
