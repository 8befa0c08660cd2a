"""What `specbatch bench` measures: its sections, each a sweep of random prompts, and the engines that they share.

    decode  steps at full batch
    verify  the same for a verify of 16 rows next to one of 1 row. NGRAM drafts, which costs almost nothing, and a
            simulated accept length of 1 keeps the requests in step
    closed  closed loops
    ttft    single requests, one after the other; a sweep for each prompt length
    onebatch  one batch of prompts that arrive together, and no others (`one_batch`); a sweep for each batch size

A section that the user's lengths make too long for the model is refused; one that is too long by defaults is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbatch.algorithms import NO_SPECULATION
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError, refuse
from specbatch.memory.page_pool import pages_for, reserved_length
from specbatch.records.bases import BASELINE
from specbatch.records.steps import MIN_FULL_STEPS
from specbatch.sweeps.bench.options import COMPARED, LENGTHS, MACHINE, BenchOptions
from specbatch.sweeps.report.points import View
from specbatch.sweeps.run.benchmark import SweepOptions
from specbatch.sweeps.run.configurations import CONFIGURATIONS
from specbatch.sweeps.run.loading import Log
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine.setup.prepare import Prepared

VERIFY_ROWS = 16
VERIFY = f"v2, {VERIFY_ROWS} rows"
TTFT_REQUESTS = 5
TTFT_NEW_TOKENS = 8  # so that there is a step after the first token to wait for

_HOST = ("launch_lead_s", "late_launch_share", "host_waits_per_step", "host_step_s", "device_idle_share")
_REPLAYS = ("decode_replays", "target_prefill_replays", "draft_prefill_replays")
_COUNTERS = (*_REPLAYS, "graph_fallbacks", "graph_padding", "graph_coverage", *_HOST)
_BANDWIDTH = ("step_bytes", "step_bandwidth", "sheet_share", "read_share", "floor_s")
_GEMMS = ("gemm_s", "times_gemms")
_LOOP = ("output_throughput", "mean_tpot_s", "mean_ttft_s", "accept_length")
_STEP = (
    *("step_s", "decode_throughput", "full_batch_steps", *_BANDWIDTH, *_GEMMS, "accept_length"),
    *_COUNTERS,
)


@dataclass(frozen=True)
class Kind:
    """How Markdown shows a section. size: its first column; peers: columns with figures of other engines."""

    title: str
    view: View
    peers: tuple[str, ...] = ()
    size: str = "concurrency"


KINDS = {
    "decode": Kind(
        "Decode step",
        View(_STEP, "decode_throughput", "full", ("step_s", "decode_throughput", "accept_length")),
        ("step_s", "decode_throughput"),
    ),
    "closed": Kind(
        "Closed loop",
        View((*_LOOP, *_COUNTERS), brief=_LOOP),
        ("output_throughput",),
    ),
    "ttft": Kind(
        "First token of one request",
        View(("median_ttft_s", *_GEMMS, *_COUNTERS), "median_ttft_s", None, ("median_ttft_s", "times_gemms")),
        ("median_ttft_s",),
        "prompt_tokens",
    ),
    "verify": Kind(
        "Verify step",
        View(_STEP, "step_s", "full", ("step_s", "read_share"), judges=False),
        ("step_s",),
    ),
    "onebatch": Kind(
        "One batch",
        View(
            ("total_throughput", "max_ttft_s", "median_itl_s", "duration_s", "accept_length", *_COUNTERS),
            ratio="total_throughput",
            break_even=None,
            brief=("total_throughput", "max_ttft_s", "median_itl_s", "accept_length"),
        ),
    ),
}


def sweeps_of(kind: str, options: BenchOptions, seed: int) -> Iterator[SweepOptions]:
    """The sweeps of a section, most of them of one."""
    drawn = options.sampling
    if kind == "ttft":
        for tokens in options.ttft_tokens:
            one = Workload("random", None, tokens, TTFT_NEW_TOKENS, TTFT_REQUESTS, seed, sequential=True, **drawn)
            yield SweepOptions((1,), options.repeats, one, f"ttft-{tokens}")
    elif kind == "onebatch":
        for size in options.batch:
            together = Workload(
                "random", None, options.input_len, options.output_len, seed=seed, num_prompts=size, burst=0, **drawn
            )
            yield SweepOptions((size,), options.repeats, together, f"onebatch-{size}")
    elif kind == "closed":
        loop = Workload("random", None, options.input_len, options.output_len, 2, seed, **drawn)
        yield SweepOptions(options.concurrency, options.repeats, loop, kind)
    else:
        steps = Workload("random", None, options.decode_tokens, options.new_tokens, 1, seed, **drawn)
        yield SweepOptions(options.batch if kind == "decode" else options.verify_batch, options.repeats, steps, kind)


@dataclass(frozen=True)
class Section:
    """A sweep of a bench."""

    options: SweepOptions
    configs: dict[str, EngineConfig]

    @property
    def name(self) -> str:
        return self.options.section


def kind_of(section: str) -> str:
    """The key in `KINDS` of the name of a section, such as ttft-128."""
    return section.partition("-")[0]


def plan_bench(base: EngineConfig, options: BenchOptions, log: Log | None = None) -> list[Section]:
    """The sections in the order of the run. Engines have the slots and pages of their largest point, and all are as
    long as the longest request.

    `log` gets a line about sections that are left out. Refused: nothing is left, engines that cannot run, and lengths
    that the user gave and that the model cannot hold.
    """
    from specbatch.engine.setup.prepare import prepare
    from specbatch.runtime.device import find_device

    if {"decode", "verify"} & set(options.sections) and 1 <= options.new_tokens <= MIN_FULL_STEPS:
        works = f"a step time needs {MIN_FULL_STEPS} steps of a full batch; use at least {MIN_FULL_STEPS + 1}"
        raise refuse("new_tokens", options.new_tokens, works)
    if MACHINE in options.sections and "sections" in options.given and find_device(base.device).type != "cuda":
        raise refuse("sections", MACHINE, "needs a CUDA device; leave it out")
    compared = _compared(base, options, log)
    names = dict.fromkeys(name for names in compared.values() for name in names)
    prepared = {name: prepare(_configured(base, name), lambda line: None) for name in names}
    most = min((side.config.max_position for one in prepared.values() for side in (one.target, one.draft)), default=0)
    kept: list[tuple[SweepOptions, tuple[str, ...]]] = []
    left_out: list[str] = []
    for kind, ours in compared.items():
        for sweep in sweeps_of(kind, options, base.seed):
            if _length(sweep) <= most:
                kept.append((sweep, ours))
            else:
                left_out.append(_too_long(kind, sweep, most, options))
    if left_out:
        line = f"left out: {'; '.join(dict.fromkeys(left_out))}"
        if not kept and MACHINE not in options.sections:
            raise SpecbatchError(f"nothing to measure: {line}")
        if log is not None:
            log(line)
    longest = max((_length(sweep) for sweep, _ in kept), default=0)
    configs = {
        name: _sized(one, [sweep for sweep, ours in kept if name in ours], longest) for name, one in prepared.items()
    }
    return [Section(sweep, {name: configs[name] for name in ours}) for sweep, ours in kept]


def _sized(prepared: Prepared, sweeps: list[SweepOptions], longest: int) -> EngineConfig:
    """An engine with slots and pages for these sweeps, and for one request of `longest` tokens."""
    config = prepared.config
    slots = prepared.draft.kv_slots_per_step(config.speculation.num_drafts)

    def pages(tokens: int) -> int:
        return pages_for(reserved_length(tokens, slots), config.page_size)

    running = [max(sweep.concurrency) for sweep in sweeps]
    needed = (count * pages(_length(sweep)) for count, sweep in zip(running, sweeps, strict=True))
    return replace(
        config,
        max_running=max(running, default=1),
        max_model_len=longest or None,
        kv_pages=max(2, pages(longest), *needed),  # an engine takes two pages or more
    )


def _length(sweep: SweepOptions) -> int:
    """Prompt and output tokens of a request."""
    return sweep.workload.max_model_len or 0


def _too_long(kind: str, sweep: SweepOptions, most: int, options: BenchOptions) -> str:
    """Why a section is left out. Refused if the user gave its lengths."""
    lengths, work = LENGTHS[kind], sweep.workload
    works = f"with {work.output_len} new tokens that is more than the model's {most}"
    error = refuse(lengths[0], work.input_len, works)
    if options.given & set(lengths):
        lower = " or ".join(f"--{name.replace('_', '-')}" for name in lengths)
        raise SpecbatchError(f"{error}; lower {lower}")
    return str(error)


def _compared(base: EngineConfig, options: BenchOptions, log: Log | None) -> dict[str, tuple[str, ...]]:
    """The configurations of each section that is run."""
    from specbatch.runtime.device import find_device

    drafting = base.speculation.algorithm != NO_SPECULATION
    known = [name for name in COMPARED if name != BASELINE or drafting]
    if find_device(base.device).type != "cuda":
        known.remove("v2+piecewise")
    names = options.configs or tuple(known)
    if drafting and names == (BASELINE,):
        raise refuse("configs", BASELINE, "add one that drafts: v1, v2, v2+piecewise")
    if not drafting and BASELINE in names:
        works = "nothing drafts without an algorithm or a draft; use some of v1, v2, v2+piecewise"
        raise refuse("configs", BASELINE, works)
    found = dict.fromkeys(("decode", "closed", "ttft", "onebatch"), names)
    if not drafting:  # prefill graphs do not change a step
        found["decode"] = tuple(name for name in names if name != "v2+piecewise") or names
        found["verify"] = ("v2", VERIFY)
    elif "verify" in options.sections and "sections" in options.given:
        works = "it has its own drafts and is measured without algorithm='NAME' and draft='NAME'"
        if set(options.sections) <= {MACHINE, "verify"}:
            raise refuse("sections", "verify", f"{works}; use some of {', '.join(found)}")
        if log is not None:
            log(f"left out: section verify: {works}")
    return {kind: names for kind, names in found.items() if kind in options.sections}


def _configured(base: EngineConfig, name: str) -> EngineConfig:
    if name == VERIFY:
        drafts = Speculation("ngram", "v2", draft_tokens=VERIFY_ROWS - 1, simulate_accept_length=1.0)
        return replace(base, speculation=drafts)
    return CONFIGURATIONS[name](base)
