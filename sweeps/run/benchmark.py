"""The benchmark of a sweep: requests with prompts, lengths and arrivals of a `Workload`, the same for every engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.requests.prompt_reader import check_size
from specbatch.errors import about, counted, refuse
from specbatch.memory.page_pool import held_at_once
from specbatch.progress.bars import Report
from specbatch.records.run_record import RunRecord
from specbatch.records.store import RECORD, load_record
from specbatch.records.sweep_plan import SWEEP, Described, Point, plan_of, round_of, rounds_at
from specbatch.sweeps.report.point_notes import failures
from specbatch.sweeps.report.points import load_records, precision_of
from specbatch.sweeps.run.conversations import ask, label, longest
from specbatch.sweeps.run.engine_groups import Engines, Failed, engines_of
from specbatch.sweeps.run.loading import Configs, Log, clients_of, connected, with_concurrency
from specbatch.sweeps.run.runner import Measured, save_measured, without_numbers
from specbatch.sweeps.run.sanity_checks import add_digests, retokenized, warnings, whole_text
from specbatch.sweeps.workload.defaults import LONG_RUN
from specbatch.sweeps.workload.description import describe, sha256_of
from specbatch.sweeps.workload.heading import lines_of
from specbatch.sweeps.workload.rounds import Rounds
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.servers.engine import HttpEngine
    from specbatch.servers.server import Server
    from specbatch.sweeps.run.unloaded import Unloaded
    from specbatch.text.tokenizer import Tokenizer

WARM_UP_TOKENS = 16
OnMeasured = Callable[[Any, Point, RunRecord], None]
CPU_WARM_UP = 4  # requests and tokens: a CPU has nothing to compile, and a whole batch takes as long as a point


@dataclass(frozen=True)
class SweepOptions(Rounds):
    """Which points are run, and their workload. section: the name of this sweep in a bench of several."""

    workload: Workload = field(default_factory=Workload)
    section: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        most, count = max(self.concurrency), self.workload.count(max(self.concurrency))
        if most > count and not self.workload.is_open:
            more = "more groups" if self.workload.is_grouped else "a larger num_prompts"
            raise refuse("concurrency", most, f"there are {count} prompts; use at most {count}, or {more}")

    def fitted(self, configs: Configs) -> dict[str, EngineConfig | Server]:
        """Engines as long as the workload's prompts and answers, unless they were asked to be longer. Servers are as
        they are. Refused: rows with parameters that are not sent to these."""
        own = engines_of(configs)
        if len(own) < len(configs):
            self.workload.refuse_unsent()
        most = max(self.concurrency)
        if self.until_precise is not None and len(configs) < 2:
            works = "a ratio needs a configuration to compare with; use at least two, or repeats=3"
            raise refuse("until_precise", f"{100 * self.until_precise:g}%", works)
        for name, config in own.items():
            with about(name):
                if self.workload.uncapped:
                    own[name] = replace(config, job=self.workload.size(most))
                else:
                    own[name] = with_concurrency(config, most)
        length = self.workload.max_model_len
        if length is not None:  # a single configuration that is too short fails by itself
            longest = max((config.max_model_len or length for config in own.values()), default=length)
            if longest < length:
                works = f"prompts and answers of this workload have up to {length} tokens; use at least that"
                raise refuse("max_model_len", longest, works)
        longer = {name: replace(config, max_model_len=config.max_model_len or length) for name, config in own.items()}
        return {name: longer.get(name, config) for name, config in configs.items()}

    def described(self, configurations: Iterable[str], *, shortened: bool, varies: str = "") -> str:
        """The settings that a sweep runs with; `shortened`: defaults for a CPU are among them. varies: the field of the
        workload that has several values."""
        workload = self.workload
        lengths = lines_of(describe(workload, []))["workload"]
        count = workload.prompts_per_concurrency
        prompts = f"{counted(count, 'prompt')} per concurrent request (at least {workload.least_prompts})"
        if workload.is_grouped:
            prompts = f"{workload.groups * workload.group_prompts} prompts"
        elif workload.num_prompts is not None:
            prompts = counted(workload.num_prompts, "prompt")
        is_one = workload.request_rate < math.inf and varies != "request_rate"
        rate = "" if not is_one else f", {workload.request_rate:g} requests/s"
        most = "no cap on the requests in flight" if workload.uncapped else None
        most = most or f"concurrency {', '.join(map(str, self.concurrency))}"
        least = "" if self.until_precise is None else "at least "
        repeats = f"{least}{counted(self.repeats, 'repeat')}"
        line = f"settings: {lengths}; {prompts}{rate}; {most}; {repeats}; configurations {', '.join(configurations)}"
        return f"{line}\nshort run, the default on a CPU; for a long one add {LONG_RUN}" if shortened else line


@dataclass(frozen=True)
class Benchmark:
    """The points of a sweep, as a `PointWorkload`.

    measured   called with engine, point and record of each point that was measured, before it is saved
    made       the prompts that were made last, by section and longest request, which sweeps of one run share
    """

    options: SweepOptions
    measured: OnMeasured | None = None
    made: dict[tuple[str, int], BenchmarkPrompts] = field(default_factory=dict, repr=False, compare=False)
    kind = SWEEP

    @property
    def concurrency(self) -> tuple[int, ...]:
        return self.options.concurrency

    @property
    def repeats(self) -> int:
        return self.options.repeats

    @property
    def section(self) -> str:
        return self.options.section

    @property
    def lengths(self) -> Workload:
        return self.options.workload

    def plan(self, configs: Mapping[str, Described]) -> dict[str, Any]:
        return plan_of(configs, self.options)

    def requests(self, concurrency: int) -> int:
        return self.options.workload.requests(concurrency)

    def load(self, configs: Configs, log: Log | None, failed: Failed | None) -> AbstractContextManager[Engines]:
        own, ready = engines_of(configs), next(iter(self.made.values()), None)
        if self.lengths.uncapped and ready is not None:  # the lengths are known
            own = {name: replace(config, job=ready.size) for name, config in own.items()}
        return connected({**configs, **own}, log, self.options.workload, failed)

    def prepare(self, engines: Engines, tokenizer: Tokenizer, report: Report | None = None) -> BenchmarkPrompts:
        most = min([sys.maxsize, *(engine.caps.get("max_model_len", sys.maxsize) for engine in engines.values())])
        key = self.section, most if self.lengths.has_own_lengths else 0
        if key not in self.made:
            self.made.clear()  # those of another section may take as much memory
            self.made[key] = self._prompts(tokenizer, most, report)
        ready = self.made[key]
        for client in clients_of(engines):
            client.know_messages(ready.prompts, ready.workload.messages(len(ready.prompts)))
        return ready

    def _prompts(self, tokenizer: Tokenizer, most: int, report: Report | None) -> BenchmarkPrompts:
        """Make the prompts. most: tokens of a request, where these decide on the rows."""
        count = self.lengths.count(max(self.concurrency))
        workload = self.lengths.for_engines(tokenizer, count, most, report)
        prompts = workload.prompts(tokenizer, count, report)
        params = workload.params(len(prompts))
        sources = [window.source for window in workload.windows(tokenizer, len(prompts))]
        own = replace(self, options=replace(self.options, workload=workload))
        return BenchmarkPrompts(own, prompts, params, list(longest(workload, tokenizer, prompts, params)), sources)

    def save(self, folder: Path, plan: dict[str, Any], point: Point, measured: Measured) -> None:
        """Write a point. One with other prompts than those before it fails: rows of ShareGPT are those that fit, also
        into the memory that an engine gets."""
        if self.options.workload.has_own_lengths and not measured.record.error:
            paths = sorted(folder.glob(f"*/c{point.concurrency}/r*/{RECORD}"))
            before = (load_record("output", path.parent) for path in paths)
            other = next((record.workload for record in before if not record.error), None)  # as all that are kept
            if other is not None and other["prompts_sha256"] != measured.record.workload["prompts_sha256"]:
                error = f"has other prompts than {other['configuration']}, those that fit into its context"
                measured = without_numbers(measured, f"{error}; set max_model_len to the same for all")
        save_measured(folder, plan, point, measured)

    def more_points(self, configs: Iterable[str], folder: Path) -> list[Point]:
        """The next round at each concurrency where a ratio is not known to `until_precise` yet. Configurations that
        fail have none."""
        options = self.options
        if options.until_precise is None:
            return []
        known = precision_of(load_records(folder))
        vague = {concurrency for (concurrency, _), share in known.items() if share > options.until_precise}
        rounds = {one: rounds_at(one, options.repeats, folder) for one in options.concurrency if one in vague}
        return [
            point
            for concurrency, done in rounds.items()
            if done < options.most_repeats
            for point in round_of(configs, concurrency, done + 1)
        ]


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The prompts of a benchmark as token ids, of which each point runs the first ones, and most tokens of each.
    sources: of long text, what is at the end of each prompt."""

    benchmark: Benchmark
    prompts: list[list[int]]
    params: list[SamplingParams]
    lengths: list[int]
    sources: list[str]

    def check(self, name: str, engine: InferenceEngine | HttpEngine | Unloaded, concurrency: int) -> None:
        lengths = self.lengths[: self.workload.count(concurrency)]
        if (check := getattr(engine, "check", None)) is not None:  # a client of a server has none
            check_prompts(check, engine.caps, self.workload, *self._of(concurrency), lengths)
        check_concurrency(name, engine.caps, _replicas(engine), self.workload.held(concurrency), lengths)

    def warm_up(self, engine: InferenceEngine | HttpEngine, concurrency: int) -> None:
        """Run a full batch, and on a GPU one request that takes the slot of another. Prompt passes alternate with
        iterations, so each request has enough new tokens that the first one still runs when the last one begins. The
        first prompt is whole; of others one chunk is enough."""
        prompts, params = self._of(concurrency)
        if chunk := engine.caps.get("prefill_chunk"):
            prompts = [*prompts[:1], *(prompt[-chunk:] for prompt in prompts[1:])]
        caps, replicas, most = engine.caps, _replicas(engine), WARM_UP_TOKENS
        if self.workload.uncapped:
            concurrency = min(concurrency, caps.get("max_running", concurrency) * replicas)
        running = -(-concurrency // replicas) * replicas  # each replica has a full batch
        count = running
        if caps.get("device") == "cpu":
            count, most = min(count, CPU_WARM_UP * replicas), CPU_WARM_UP
        elif "prefill_chunk" in caps:
            count += replicas
            passes = -(-sum(map(len, prompts[:running])) // (caps["prefill_chunk"] * replicas))
            most = max(most, (passes + 2) * caps["verify_rows"])
        short = [replace(wanted, max_new_tokens=min(wanted.max_new_tokens, most)) for wanted in params[:count]]
        engine.generate(prompts[:count], short, concurrency=min(running, len(short)))

    def measure(self, engine: InferenceEngine | HttpEngine, point: Point, count: Callable[[], None]) -> Measured:
        """Measure one point: a closed loop that keeps `concurrency` requests unfinished, prompts that arrive by a
        clock, of which at most `concurrency` run, or one request after the other. At its start the prefix cache is
        empty, and the corpus has no answers of this run."""
        workload, (prompts, params) = self.workload, self._of(point.concurrency)
        if engine.config.prefix_cache or _has_corpus(engine):
            engine.forget_prefixes()
        engine.reset_record()
        asked = list(ask(engine, workload, prompts, params, point.concurrency, lambda _: count()))
        completions = [completion for call in asked for completion in call.completions]
        record = engine.record(concurrency=point.concurrency, workload=self.describe(point.concurrency))
        label(workload, asked, record.requests, len(prompts))
        answers = {
            (call.turn - 1) * len(prompts) + call.places[one.index]: one for call in asked for one in call.completions
        }
        add_digests(record.requests, answers)
        record.metrics["retokenized_tokens"] = retokenized(engine.tokenizer, completions)
        if workload.slo is not None:
            record.metrics |= workload.slo.metrics(record.requests, record.metrics["duration_s"])
        record.workload["output_sha256"] = sha256_of([item.token_ids or whole_text(item) for item in completions])
        found = warnings(workload, completions, params, drafts=record.drafts)
        # A simulated accept length makes the text meaningless.
        record.workload["warnings"] = [] if record.simulated_accept_length is not None else list(found)
        if (errors := failures(record)) and not record.metrics["requests"]:
            reasons = "; ".join(f"{error} ({number})" for error, number in errors)
            record.workload["error"] = f"every request failed: {reasons}"
        if self.benchmark.measured is not None and not record.error:
            self.benchmark.measured(engine, point, record)
        return Measured(record)

    def describe(self, concurrency: int) -> dict[str, Any]:
        options = self.benchmark.options
        about: dict[str, Any] = {"until_precise": options.until_precise, "section": options.section or None}
        about |= {"sources": self.sources[: options.workload.count(concurrency)] or None}
        known = {name: value for name, value in about.items() if value is not None}
        return describe(options.workload, self._of(concurrency)[0]) | known

    @property
    def size(self) -> JobSize:
        """What an engine that chooses its capacity should know of them."""
        estimate = self.workload.size(len(self.prompts))
        return replace(estimate, prompt_tokens=sum(map(len, self.prompts)) / len(self.prompts))

    @property
    def workload(self) -> Workload:
        return self.benchmark.options.workload

    def _of(self, concurrency: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """The prompts of a point, and their parameters."""
        count = self.workload.count(concurrency)
        return self.prompts[:count], self.params[:count]


def check_prompts(
    check: Callable[[list[int], SamplingParams, int], None],
    caps: Mapping[str, Any],
    workload: Workload,
    prompts: list[list[int]],
    params: list[SamplingParams],
    lengths: list[int],
) -> None:
    """Refuse prompts that an engine cannot run, the last ones of recorded conversations included. check: that of the
    engine; lengths: of `longest`"""
    for index, (tokens, wanted, most) in enumerate(zip(prompts, params, lengths, strict=True)):
        check(tokens, wanted, index)
        if workload.replay:
            check_size(caps, most - wanted.max_new_tokens, wanted.max_new_tokens, index)


def check_concurrency(name: str, caps: Mapping[str, Any], replicas: int, most: int, lengths: list[int]) -> None:
    """Refuse requests of these lengths that would wait for a slot or for pages: the numbers would be of another
    concurrency. Each replica must hold its share, of the longest ones. A server does not report its pages."""
    if "kv_pages" not in caps:
        return
    limit = held_at_once(caps, lengths) * replicas
    if most > limit:
        fewer = f"at most {limit}, " if limit else ""
        raise refuse(
            "concurrency",
            most,
            f"{name} can hold {limit} of these requests at once (max_running={caps['max_running']}, "
            f"kv_pages={caps['kv_pages']}); use {fewer}shorter requests or more kv_pages",
        )


def _replicas(engine: InferenceEngine | HttpEngine | Unloaded) -> int:
    return engine.config.data_parallel if isinstance(engine.config, EngineConfig) else 1


def _has_corpus(engine: InferenceEngine | HttpEngine) -> bool:
    return isinstance(engine.config, EngineConfig) and engine.config.speculation.corpus is not None
