"""What an engine is asked to be. Every illegal combination is refused here, before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION, Algorithm, algorithms_with
from specbatch.draft_shape import AUTO, DraftShape, lengths_of, shape_of
from specbatch.errors import at_least, refuse

SCHEDULES = ("v1", "v2")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DECODE_GRAPHS = ("off", "whole")
PREFILL_GRAPHS = ("off", "piecewise")
ATTENTION_BACKENDS = ("auto", "triton", "torch", "flashinfer", "flash-attn")
KV_DTYPES = ("auto", "fp8")
STATE_DTYPES = ("fp32", "bf16", "fp16")


def _choice(setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise refuse(setting, value, f"use one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted and when the host learns of them.

    algorithm     "none" is plain decoding: the same iteration with zero drafted tokens; "nextn" means "mtp"
    schedule      "v1" waits for each result before it plans the next iteration, "v2" handles it one step late
    draft         for "standalone": a model of the same vocabulary, or "self:skip=12-15", the target without
                  those layers (inclusive ranges, comma separated), sharing its weights; for "eagle", "eagle3" and
                  "dflash": what was made for the target, a folder or hub id (with random weights: "dummy" or a
                  config.json); "mtp" lies in the target
    draft_tokens  tokens drafted per verify, the root not counted (a verify runs draft_tokens + 1 rows); None for
                  "dflash": as many as the draft's blocks hold. "auto": a chain of at most as many as otherwise (or of
                  draft_steps); how many, 0 included, follows from measured times and acceptance. Where drafts are
                  drawn (sampled, by a model or a head) a seed's tokens then depend on these times; their law does not
    draft_steps   draft passes, the depth of a tree; a chain takes draft_tokens of them
    draft_topk    children per expanded node; 1 is a chain. "ngram": texts merged into a tree
                  None of the three: the published shape of the algorithm; some: see `draft_shape.shape_of`
    aux_layers    for "eagle3": layers of the target whose inputs (k: the output of layer k - 1) the head reads, in
                  place of what its config says
    draft_rope_theta  for "eagle" and "eagle3": theta of the head's rope, in place of its config's (a config that names
                  none means 10000; some heads were trained with 10000 whatever they say)
    ngram_min/max lengths of the suffix that "ngram" looks up, longest first
    simulate_accept_length  for benchmarks: mean tokens per verify, drawn by a seeded coin instead of comparing drafts
                  (at most draft_steps + 1; a row that drafts nothing accepts nothing). The output is no model's text.
    """

    algorithm: str = NO_SPECULATION
    schedule: str = "v2"
    draft: str | None = None
    draft_tokens: int | Literal["auto"] | None = None
    draft_steps: int | None = None
    draft_topk: int | None = None
    aux_layers: tuple[int, ...] | None = None
    draft_rope_theta: float | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    simulate_accept_length: float | None = None

    def __post_init__(self) -> None:
        _choice("algorithm", self.algorithm, tuple(ALGORITHMS))
        _choice("schedule", self.schedule, SCHEDULES)
        _ = self.shape  # refused where it is impossible
        if self.draft is not None and not isinstance(self.draft, str):
            raise refuse("draft", self.draft, "name a folder, a hub id, a bundled model or self:skip=FIRST-LAST")
        needed = self.entry.draft
        if needed is not None and not self.draft:
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} needs {needed}")
        if needed is None and self.draft:
            takers = ", ".join(repr(name) for name, entry in ALGORITHMS.items() if entry.draft is not None)
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} takes no draft; those that do: {takers}")
        self._check_heads()
        at_least("ngram_min", self.ngram_min, 1)
        at_least("ngram_max", self.ngram_max, 1)
        if self.ngram_min > 16:
            raise refuse("ngram_min", self.ngram_min, "use at most 16")
        if self.ngram_max < self.ngram_min or self.ngram_max > 16:
            raise refuse("ngram_max", self.ngram_max, f"use ngram_min={self.ngram_min} to 16")
        self._check_simulation()

    def __str__(self) -> str:
        if self.algorithm == NO_SPECULATION:
            return f"nothing drafted, schedule {self.schedule}"
        draft = f" {self.draft}" if self.draft else ""
        simulated = self.simulate_accept_length
        note = "" if simulated is None else f", simulated accept length {simulated:g}"
        most = "up to " if self.is_auto else ""
        return f"{self.algorithm}{draft}, {most}{self.shape}, schedule {self.schedule}{note}"

    @property
    def entry(self) -> Algorithm:
        """The registry's entry of the algorithm."""
        return ALGORITHMS[self.algorithm]

    @property
    def shape(self) -> DraftShape:
        """Steps, children per node and nodes, all of them known."""
        tokens = self.draft_tokens
        if tokens == AUTO:
            if (self.draft_topk or 1) > 1:
                raise refuse("draft_topk", self.draft_topk, "draft_tokens='auto' drafts chains only; use 1")
            tokens = None
        return shape_of(self.algorithm, self.draft_steps, self.draft_topk, tokens)

    @property
    def is_auto(self) -> bool:
        return self.draft_tokens == AUTO and self.algorithm != NO_SPECULATION

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens an iteration may draft, rising; a single number unless that is chosen as it runs."""
        return lengths_of(self.drafted) if self.is_auto else (self.drafted,)

    @property
    def drafted(self) -> int:
        """Tokens drafted per verify, or the most of them; 0 for the baseline."""
        return 0 if self.algorithm == NO_SPECULATION else self.shape.tokens

    @property
    def depth(self) -> int:
        """Drafts that a verify can accept: of a chain all, of a tree one for each step."""
        return 0 if self.algorithm == NO_SPECULATION else self.shape.steps

    def _check_heads(self) -> None:
        for setting in ("aux_layers", "draft_rope_theta"):
            if getattr(self, setting) is not None and setting not in self.entry.settings:
                takers = algorithms_with(setting)
                works = f"algorithm {self.algorithm!r} has no such setting, only {', '.join(map(repr, takers))}"
                raise refuse(setting, getattr(self, setting), works)
        layers, theta = self.aux_layers, self.draft_rope_theta
        if layers is not None:
            if not isinstance(layers, tuple) or not layers:
                raise refuse("aux_layers", layers, "give a tuple of layers, such as (2, 18, 33)")
            for layer in layers:
                at_least("aux_layers", layer, 1)
        number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
        if theta is not None and not (number and 0 < theta < math.inf):
            raise refuse("draft_rope_theta", theta, "use a positive number, such as 10000.0")

    def _check_simulation(self) -> None:
        mean = self.simulate_accept_length
        if mean is None:
            return
        if self.algorithm == NO_SPECULATION:
            raise refuse("simulate_accept_length", mean, "nothing is drafted; leave it out")
        number = isinstance(mean, (int, float)) and not isinstance(mean, bool)
        most = self.shape.steps + 1
        if not number or not 1 <= mean <= most:
            raise refuse("simulate_accept_length", mean, f"use 1 to {most} (draft_steps + 1)")


@dataclass(frozen=True)
class Graphs:
    """CUDA graphs.

    decode   "whole" records draft, verify, accept and commit as one graph per batch bucket
    prefill  "piecewise" records what lies between attention layers, one set of graphs per token bucket
    """

    decode: str = "off"
    prefill: str = "off"

    def __post_init__(self) -> None:
        _choice("graphs.decode", self.decode, DECODE_GRAPHS)
        _choice("graphs.prefill", self.prefill, PREFILL_GRAPHS)

    def __str__(self) -> str:
        asked = [f"{name} {mode}" for name, mode in asdict(self).items() if mode != "off"]
        return f"graphs: {', '.join(asked)}" if asked else "eager"

    @property
    def any(self) -> bool:
        return (self.decode, self.prefill) != ("off", "off")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an `Engine` is built from.

    model          a bundled name ("smollm2-135m"), a hub id, a folder, a .gguf file or, with load_format
                   "dummy", a named shape or a config.json
    device         "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"
    dtype          "auto" is float32 on a CPU and the checkpoint's own type on a GPU
    tokenizer      bundled name, folder or hub id to use in place of the model's own tokenizer
    max_running    requests that decode at the same time
    max_model_len  longest prompt + output in tokens; default what the model was made for
    page_size      tokens per KV page
    kv_pages       size of the KV pool; default what max_running and max_model_len can need, within memory
    memory_fraction  share of the free memory of the device that weights and KV may take
    prefill_chunk  most prompt tokens computed in one step
    kv_dtype       "auto" is the model's own type, "fp8" keeps keys and values as float8 e4m3
    float8_activations  where weights are float8 and activations of 16 bits: multiply in float8, activations
                   rounded with a scale for each row and 128 columns, as `activation_scheme: dynamic` says
    state_dtype    of the matrix states of recurrent layers: "fp32", "bf16" or "fp16"
    attention_backend        who computes the attention of prompts: "auto" is the fastest of those installed
    draft_attention_backend  the same for the draft model
    seed           for requests without a seed of their own, and for dummy weights
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    tokenizer: str | None = None
    max_running: int = 32
    max_model_len: int | None = None
    page_size: int = 16
    kv_pages: int | None = None
    memory_fraction: float = 0.8
    prefill_chunk: int = 2048
    prefix_cache: bool = True
    kv_dtype: str = "auto"
    float8_activations: bool = True
    state_dtype: str = "fp32"
    attention_backend: str = "auto"
    draft_attention_backend: str = "auto"
    seed: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    graphs: Graphs = field(default_factory=Graphs)

    def __post_init__(self) -> None:
        if not self.model or not isinstance(self.model, str):
            raise refuse("model", self.model, "name a model, for example smollm2-135m")
        if not isinstance(self.graphs, Graphs):
            raise refuse("graphs", self.graphs, "give a Graphs, such as Graphs(decode='whole')")
        if not isinstance(self.speculation, Speculation):
            raise refuse("speculation", self.speculation, "give a Speculation, such as Speculation(algorithm='ngram')")
        takes = self.speculation.entry.settings
        if self.draft_attention_backend != "auto" and "draft_attention_backend" not in takes:
            raise refuse("draft_attention_backend", self.draft_attention_backend, "no model drafts; leave it out")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(self.device)):
            raise refuse("device", self.device, "use auto, cpu, cuda or cuda:N")
        _choice("dtype", self.dtype, DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _choice("state_dtype", self.state_dtype, STATE_DTYPES)
        _choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _choice("draft_attention_backend", self.draft_attention_backend, ATTENTION_BACKENDS)
        at_least("max_running", self.max_running, 1)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2)
        at_least("page_size", self.page_size, 1)
        if self.kv_pages is not None:
            at_least("kv_pages", self.kv_pages, 2)
        at_least("prefill_chunk", self.prefill_chunk, 1)
        at_least("seed", self.seed, 0)
        for setting in ("prefix_cache", "float8_activations"):
            if not isinstance(getattr(self, setting), bool):
                raise refuse(setting, getattr(self, setting), "use True or False")
        if (
            isinstance(self.memory_fraction, bool)
            or not isinstance(self.memory_fraction, (int, float))
            or not 0.0 < self.memory_fraction <= 1.0
        ):
            raise refuse("memory_fraction", self.memory_fraction, "use a share above 0 and up to 1")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
