"""Engine configuration: `EngineConfig` with its parts `Speculation` and `Graphs`.

Each field has its help text, choices and least value in its metadata, from which the command line derives its options.
Invalid values and combinations are rejected here, before anything is loaded.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
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


def _setting(default: Any, help: str, *, choices: tuple[str, ...] | None = None, least: int | None = None) -> Any:
    """A field with its help text; `choices` are its only values, `least` is the smallest one of a whole number."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


def _check_fields(config: Any, prefix: str = "") -> None:
    """Reject values outside the fields' `choices` and below their `least`. `prefix` is put before a field's name."""
    for item in fields(config):
        setting, value = f"{prefix}{item.name}", getattr(config, item.name)
        choices, least = item.metadata.get("choices"), item.metadata.get("least")
        if choices is not None and value not in choices:
            raise refuse(setting, value, f"use one of {', '.join(choices)}")
        if least is not None and (value is not None or item.default is not None):
            at_least(setting, value, least)


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted, and when the host reads the results.

    `draft_steps`, `draft_topk` and `draft_tokens` give the shape of a draft. With none of them it is the shape that the
    algorithm was published with; `draft_shape.shape_of` completes a partial one.

    Details beyond the help texts of the fields:

    draft_tokens   "auto" drafts chains of at most draft_steps tokens (or the default number); their length follows from
                   measured step times and acceptance. Where drafts are sampled by a model or a head, the tokens of a
                   seed then depend on these times; their distribution does not
    draft          "self:skip=12-15,20-21" names inclusive ranges of layers and shares the target's weights. A draft
                   with random weights is "dummy" or a config.json. "mtp" takes none: its head is part of the target
    aux_layers     counted as EAGLE-3 heads do: the input of layer k is the output of layer k - 1
    draft_rope_theta  overrides the theta in the head's config. A config without one means 10000, and some heads were
                   trained with 10000 whatever their config says
    simulate_accept_length  at most draft_steps + 1. A request that drafts nothing accepts nothing, and the generated
                   text is not the model's
    """

    algorithm: str = _setting(
        NO_SPECULATION,
        "Drafting algorithm. none: the baseline, the same iteration without drafts. nextn: another name for mtp.",
        choices=tuple(ALGORITHMS),
    )
    schedule: str = _setting(
        "v2",
        "v1: wait for each result before planning the next iteration. v2: read results one iteration late.",
        choices=SCHEDULES,
    )
    draft: str | None = _setting(
        None,
        "standalone: a draft model with the same vocabulary, or self:skip=12-15 (the target without those layers). "
        "eagle, eagle3, dflash: the draft trained for the target (dummy: random weights). A folder, hub id or known "
        "name.",
    )
    draft_tokens: int | Literal["auto"] | None = _setting(
        None,
        "Tokens drafted per verify step, not counting the root, so that a verify step has one row more. Default: the "
        "algorithm's usual number; for dflash, the draft's block size - 1. SGLang counts the root: 4 there is 3 here. "
        "auto: 0 up to the default or --draft-steps, chosen from measured step times and acceptance.",
    )
    draft_steps: int | None = _setting(
        None, "Draft passes: the depth of a tree. A chain takes as many as it has drafted tokens."
    )
    draft_topk: int | None = _setting(
        None, "Children per expanded node; 1 is a chain. ngram: matching continuations merged into a tree."
    )
    aux_layers: tuple[int, ...] | None = _setting(
        None, "eagle3: layers of the target whose inputs the head reads, such as 2,18,33. Default: from its config."
    )
    draft_rope_theta: float | None = _setting(None, "eagle, eagle3: RoPE theta of the head. Default: from its config.")
    ngram_min: int = _setting(2, "Shortest suffix that ngram looks up.", least=1)
    ngram_max: int = _setting(4, "Longest suffix that ngram looks up, and the first one tried.", least=1)
    simulate_accept_length: float | None = _setting(
        None,
        "Benchmarks only: draw the number of tokens per verify step at random, with this mean, instead of comparing "
        "drafts with the target.",
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        _ = self.shape  # raises if it is impossible
        if self.draft is not None and not isinstance(self.draft, str):
            raise refuse("draft", self.draft, "name a folder, a hub id, a known model or self:skip=FIRST-LAST")
        needed = self.entry.draft
        if needed is not None and not self.draft:
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} needs {needed}")
        if needed is None and self.draft:
            takers = ", ".join(repr(name) for name, entry in ALGORITHMS.items() if entry.draft is not None)
            raise refuse("draft", self.draft, f"algorithm {self.algorithm!r} takes no draft; those that do: {takers}")
        self._check_heads()
        if self.ngram_min > 16:
            raise refuse("ngram_min", self.ngram_min, "use at most 16")
        if self.ngram_max < self.ngram_min or self.ngram_max > 16:
            raise refuse("ngram_max", self.ngram_max, f"use ngram_min={self.ngram_min} to 16")
        self._check_simulation()

    def __str__(self) -> str:
        if self.algorithm == NO_SPECULATION:
            return f"no speculation, schedule {self.schedule}"
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
            raise refuse("simulate_accept_length", mean, "algorithm 'none' drafts nothing; leave it out")
        number = isinstance(mean, (int, float)) and not isinstance(mean, bool)
        most = self.shape.steps + 1
        if not number or not 1 <= mean <= most:
            raise refuse("simulate_accept_length", mean, f"use 1 to {most} (draft_steps + 1)")


@dataclass(frozen=True)
class Graphs:
    """CUDA graphs: one per batch size for decode iterations, one set per number of tokens for prefill passes."""

    decode: str = _setting(
        "off",
        "whole: one CUDA graph for each decode iteration (draft, verify, accept, commit).",
        choices=DECODE_GRAPHS,
    )
    prefill: str = _setting(
        "off",
        "piecewise: CUDA graphs for the parts of a prefill pass between attention layers.",
        choices=PREFILL_GRAPHS,
    )

    def __post_init__(self) -> None:
        _check_fields(self, "graphs.")

    def __str__(self) -> str:
        asked = [f"{name} {mode}" for name, mode in asdict(self).items() if mode != "off"]
        return f"graphs: {', '.join(asked)}" if asked else "eager"

    @property
    def any(self) -> bool:
        return (self.decode, self.prefill) != ("off", "off")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an `Engine` is built from.

    float8_activations applies to activations of 16 bits. Each row gets one scale per 128 columns, as a checkpoint's
    `activation_scheme: dynamic` asks for.
    """

    model: str = _setting(
        "smollm2-135m",
        "Known name, hub id, folder or .gguf file; for dummy weights, a named shape or a config.json.",
    )
    device: str = _setting("auto", "auto (CUDA if there is a GPU), cpu, cuda or cuda:N.")
    dtype: str = _setting(
        "auto", "Data type of the computation. auto: float32 on a CPU, the checkpoint's dtype on a GPU.", choices=DTYPES
    )
    load_format: str = _setting(
        "auto", "dummy: random weights, for a named shape or a config.json.", choices=LOAD_FORMATS
    )
    tokenizer: str | None = _setting(
        None, "Known name, folder or hub id of a tokenizer to use instead of the model's own."
    )
    max_running: int = _setting(32, "Requests that decode at the same time.", least=1)
    max_model_len: int | None = _setting(
        None, "Maximum prompt + output, in tokens. Default: the model's context length.", least=2
    )
    page_size: int = _setting(16, "Tokens per KV page.", least=1)
    kv_pages: int | None = _setting(
        None,
        "Pages in the KV pool. Default: enough for max_running requests of full length, limited by memory.",
        least=2,
    )
    memory_fraction: float = _setting(0.8, "Share of the device's free memory for weights and KV pages.")
    prefill_chunk: int = _setting(2048, "Maximum number of prompt tokens computed in one step.", least=1)
    prefix_cache: bool = _setting(True, "Keep the KV pages of finished prompts for later ones with the same prefix.")
    kv_dtype: str = _setting(
        "auto", "Data type of the KV cache. auto: the model's dtype. fp8: FP8 (e4m3).", choices=KV_DTYPES
    )
    float8_activations: bool = _setting(
        True,
        "For FP8 weights: quantize activations to FP8 as well, and run GEMMs in FP8.",
    )
    state_dtype: str = _setting("fp32", "Data type of the matrix states of recurrent layers.", choices=STATE_DTYPES)
    attention_backend: str = _setting(
        "auto", "Attention backend for prompts. auto: the fastest one installed.", choices=ATTENTION_BACKENDS
    )
    draft_attention_backend: str = _setting(
        "auto", "Attention backend for the prompts of a draft model.", choices=ATTENTION_BACKENDS
    )
    seed: int = _setting(0, "Seed for requests that have none, for random prompts and for dummy weights.", least=0)
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
            raise refuse(
                "draft_attention_backend", self.draft_attention_backend, "no draft model is used; leave it out"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(self.device)):
            raise refuse("device", self.device, "use auto, cpu, cuda or cuda:N")
        _check_fields(self)
        for setting in ("prefix_cache", "float8_activations"):
            if not isinstance(getattr(self, setting), bool):
                raise refuse(setting, getattr(self, setting), "use True or False")
        if (
            isinstance(self.memory_fraction, bool)
            or not isinstance(self.memory_fraction, (int, float))
            or not 0.0 < self.memory_fraction <= 1.0
        ):
            raise refuse("memory_fraction", self.memory_fraction, "use a fraction above 0 and up to 1")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
