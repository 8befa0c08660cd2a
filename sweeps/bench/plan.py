"""Plan of `specbatch bench`: options, points, and the engines that hold these points.

A point that the user's lengths make too long for the model is refused; one that is too long by defaults is left out.
An engine that drafts is compared with a baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specbatch.algorithms import NO_SPECULATION
from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.memory.page_pool import pages_for, reach_of
from specbatch.sweeps.bench.columns import BASELINE, SECTIONS

VERIFY_ROWS = 16
VERIFY = f"v2, {VERIFY_ROWS} rows"
# Schedule, and whether prompts go through piecewise graphs.
CONFIGS = {"v1": ("v1", "off"), "v2": ("v2", "off"), "v2+piecewise": ("v2", "piecewise")}
TTFT_REQUESTS = 5
TTFT_NEW_TOKENS = 8  # so that there is a step after the first token to wait for
# Options that determine the length of a section's requests; the first one is that of prompt tokens.
LENGTHS = {
    "decode": ("decode_tokens", "new_tokens"),
    "closed": ("input_len", "output_len"),
    "ttft": ("ttft_tokens",),
    "verify": ("decode_tokens", "new_tokens"),
}
Log = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """Requests of one point: `prompts` random prompts, once for each number of new tokens."""

    prompts: int
    prompt_tokens: int
    new_tokens: tuple[int, ...]
    concurrency: int
    alone: bool = False  # each request runs after the previous one has left the device
    full_batch: bool = False  # measures the iterations that run all requests

    @property
    def longest(self) -> int:
        """Prompt and output tokens of a request."""
        return self.prompt_tokens + max(self.new_tokens)


@dataclass(frozen=True)
class BenchOptions:
    """Which points are measured, `repeats` times each. None: all that the device supports.

    asked: options of `LENGTHS`, and "sections", that the user gave.
    """

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
    asked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for setting, allowed in (("sections", SECTIONS), ("configs", (*CONFIGS, BASELINE))):
            for name in getattr(self, setting) or ():
                if name not in allowed:
                    raise refuse(setting, name, f"use some of {', '.join(allowed)}")
        for setting in ("sections", "configs", "batch", "verify_batch", "concurrency", "ttft_tokens"):
            values = getattr(self, setting)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise refuse(setting, ",".join(map(str, values)), "name at least one, each once")
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
        """Batch sizes, concurrencies or prompt lengths; none for the section machine."""
        return {
            "decode": self.batch,
            "closed": self.concurrency,
            "ttft": self.ttft_tokens,
            "verify": self.verify_batch,
        }.get(section, ())

    def load(self, section: str, size: int, drafting: bool = False) -> Load:
        """Requests of a point; requests that draft do not stay in step, so that a decode step needs another method."""
        if section == "closed":
            return Load(2 * size if size > 1 else 3, self.input_len, (self.output_len,), size)
        if section == "ttft":
            return Load(TTFT_REQUESTS, size, (TTFT_NEW_TOKENS,), 1, alone=True)
        if drafting:
            return Load(size, self.decode_tokens, self.new_tokens[1:], size, full_batch=True)
        return Load(size, self.decode_tokens, self.new_tokens, size)


@dataclass(frozen=True)
class Point:
    """A section at a size, and the configurations that it compares."""

    section: str
    size: int
    load: Load
    names: list[str]


@dataclass(frozen=True)
class Plan:
    """Engines by name, and the points in the order of the run."""

    engines: dict[str, EngineConfig]
    points: list[Point]


def plan_engines(base: EngineConfig, options: BenchOptions, log: Log | None = None) -> Plan:
    """Engines with the slots and pages of their largest point, all with the same maximum length.

    `log` gets a line about points that are left out. Refused: nothing is left, a draft that does not fit, or a length
    that the user gave and that does not fit.
    """
    from specbatch.engine.builder import prepare
    from specbatch.runtime.device import default_graphs, find_device

    device = find_device(base.device)
    on_cuda = device.type == "cuda"
    decode = options.decode_graph or default_graphs(device).decode
    drafting, most = base.speculation.algorithm != NO_SPECULATION, None
    if drafting:  # refused before anything is loaded; and a draft may set how many tokens it drafts
        found = prepare(base, log or (lambda line: None))
        base, most = found.config, min(found.target.config.max_position, found.draft.config.max_position)
    points = _points_that_fit(base, options, _compared(options, drafting, on_cuda), most, log)
    longest = max((point.load.longest for point in points), default=2)
    engines = {}
    for name in dict.fromkeys(name for point in points for name in point.names):
        asked, prefill = _configured(base, name, on_cuda)
        rows = asked.speculation.drafted + 1
        slots = found.draft.kv_slots_per_step(rows) if drafting and name != BASELINE else rows
        loads = [point.load for point in points if name in point.names]

        def pages(tokens: int, slots: int = slots) -> int:
            return pages_for(reach_of(tokens, slots), base.page_size)

        engines[name] = replace(
            asked,
            graphs=Graphs(decode=decode, prefill=prefill),
            max_running=max((load.concurrency for load in loads), default=1),
            max_model_len=longest,
            # An engine takes two pages or more.
            kv_pages=max(2, pages(longest), *(load.concurrency * pages(load.longest) for load in loads)),
            prefix_cache=False,
        )
    return Plan(engines, points)


def _configured(base: EngineConfig, name: str, on_cuda: bool) -> tuple[EngineConfig, str]:
    """The engine of a configuration and its prefill graphs."""
    if name == BASELINE:
        config = replace(base, speculation=Speculation(), draft_attention_backend="auto")
        return config, "piecewise" if on_cuda else "off"
    if name == VERIFY:
        drafts = Speculation("ngram", "v2", draft_tokens=VERIFY_ROWS - 1, simulate_accept_length=1.0)
        return replace(base, speculation=drafts), "off"
    schedule, prefill = CONFIGS[name]
    return replace(base, speculation=replace(base.speculation, schedule=schedule)), prefill


def _compared(options: BenchOptions, drafting: bool, on_cuda: bool) -> dict[str, list[str]]:
    """The configurations of each section, in the order of the run."""
    known = [name for name, (_, prefill) in CONFIGS.items() if on_cuda or prefill == "off"]
    names = list(options.configs or ([BASELINE, *known] if drafting else known))
    if drafting:
        if names == [BASELINE]:
            raise refuse("configs", BASELINE, f"add one that drafts: {', '.join(CONFIGS)}")
        return {"decode": names, "closed": names, "ttft": names}
    if BASELINE in names:
        raise refuse(
            "configs", BASELINE, f"nothing drafts without --algorithm or --draft; use some of {', '.join(CONFIGS)}"
        )
    decoding = [name for name in names if CONFIGS[name][1] == "off"] or names  # prompt graphs do not change a step
    return {"decode": decoding, "closed": names, "ttft": names, "verify": ["v2", VERIFY]}


def _points_that_fit(
    base: EngineConfig, options: BenchOptions, compared: dict[str, list[str]], most: int | None, log: Log | None
) -> list[Point]:
    """The points in the order of the run, without those that default lengths make too long for the model.

    most: the longest request of an engine that drafts; None if nothing drafts.
    """
    from specbatch.weights import open_checkpoint

    if "verify" in options.sections and "verify" not in compared and "sections" in options.asked:
        works = "it has its own drafts and is measured without --algorithm and --draft"
        if set(options.sections) <= {"machine", "verify"}:
            raise refuse("sections", "verify", f"{works}; use some of {', '.join(compared)}")
        if log is not None:
            log(f"left out: section verify: {works}")
    sections = [name for name in compared if name in options.sections]
    if not sections:
        return []
    drafting = most is not None
    if most is None:
        checkpoint = open_checkpoint(base.model, base.load_format, seed=base.seed, tokenizer=base.tokenizer, log=log)
        most = checkpoint.config.max_position
    points, left_out = [], []
    for section in sections:
        for size in options.sizes(section):
            load = options.load(section, size, drafting)
            if load.longest <= most:
                points.append(Point(section, size, load, compared[section]))
                continue
            lengths = LENGTHS[section]
            works = f"with {max(load.new_tokens)} new tokens that is more than the model's {most}"
            refused = refuse(lengths[0], load.prompt_tokens, works)
            if options.asked & set(lengths):
                lower = " or ".join(f"--{name.replace('_', '-')}" for name in lengths)
                raise SpecbatchError(f"{refused}; lower {lower}")
            left_out.append(str(refused))
    if left_out:
        line = f"left out: {'; '.join(dict.fromkeys(left_out))}"
        if not points and "machine" not in options.sections:
            raise SpecbatchError(f"nothing to measure: {line}")
        if log is not None:
            log(line)
    return points
