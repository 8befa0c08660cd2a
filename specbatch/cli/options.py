"""The options of every command that has an engine, and their one way to an `EngineConfig`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

from typer import Option

from specbatch.algorithms import ALGORITHMS
from specbatch.config import (
    ATTENTION_BACKENDS,
    DECODE_GRAPHS,
    DTYPES,
    KV_DTYPES,
    LOAD_FORMATS,
    PREFILL_GRAPHS,
    STATE_DTYPES,
    EngineConfig,
    Graphs,
    Speculation,
)
from specbatch.errors import at_least, refuse

SPECS = ("off", "v1", "v2")
Json = Annotated[bool, Option("--json", help="Print one JSON line instead of tables.")]
Concurrency = Annotated[int | None, Option(help="Keep at most this many requests unfinished; also sets --max-running.")]
_MODEL, _SPEC, _ENGINE = "Model", "Speculation", "Engine"
_OF_DRAFTS = (
    *("draft_tokens", "draft_steps", "draft_topk", "aux_layers", "draft_rope_theta"),
    *("ngram_min", "ngram_max", "simulate_accept_length"),
)


@dataclass(frozen=True)
class EngineOptions:
    """One field per shared option; None leaves a setting at the engine's own default."""

    model: Annotated[str, Option(help="Bundled name, hub id, folder or .gguf file.", rich_help_panel=_MODEL)] = (
        EngineConfig.model
    )
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL)] = EngineConfig.device
    dtype: Annotated[str, Option(metavar="|".join(DTYPES), help="auto: float32 on a CPU.", rich_help_panel=_MODEL)] = (
        EngineConfig.dtype
    )
    load_format: Annotated[
        str,
        Option(
            metavar="|".join(LOAD_FORMATS),
            help="dummy: random weights of a named shape or a config.json.",
            rich_help_panel=_MODEL,
        ),
    ] = EngineConfig.load_format
    tokenizer: Annotated[
        str | None,
        Option(help="Bundled name, folder or hub id in place of the model's own tokenizer.", rich_help_panel=_MODEL),
    ] = None

    spec: Annotated[
        str | None,
        Option(
            metavar="|".join(SPECS),
            help="off: plain decoding, whatever else is given. v1: wait for each result. v2: handle it one step late. "
            "Default: v2 if --algorithm or --draft is given, else off.",
            rich_help_panel=_SPEC,
        ),
    ] = None
    algorithm: Annotated[
        str | None,
        Option(
            metavar="|".join(ALGORITHMS),
            help="Who drafts. Default: standalone with --draft, else ngram.",
            rich_help_panel=_SPEC,
        ),
    ] = None
    draft: Annotated[
        str | None,
        Option(
            help="Draft model, self:skip=12-15 (the target without those layers), or what was made for the target "
            "(eagle, eagle3, dflash; dummy: random weights).",
            rich_help_panel=_SPEC,
        ),
    ] = None
    draft_tokens: Annotated[
        str | None,
        Option(
            metavar="INTEGER|auto",
            help="Nodes drafted per verify, the root not counted. Default: as published (SGLang counts the root and "
            "says 4 for 3 here); for dflash what its blocks hold. auto: up to that many (or --draft-steps), as "
            "measured times and acceptance say, 0 included.",
            rich_help_panel=_SPEC,
        ),
    ] = None
    draft_steps: Annotated[
        int | None,
        Option(help="Draft passes: the depth of a tree; a chain takes --draft-tokens.", rich_help_panel=_SPEC),
    ] = None
    draft_topk: Annotated[
        int | None, Option(help="Children per expanded node; 1 is a chain.", rich_help_panel=_SPEC)
    ] = None
    aux_layers: Annotated[
        str | None,
        Option(
            help="eagle3: layers of the target whose inputs the head reads, such as 2,18,33. Default: as its config "
            "says.",
            rich_help_panel=_SPEC,
        ),
    ] = None
    draft_rope_theta: Annotated[
        float | None,
        Option(help="eagle, eagle3: theta of the head's rope. Default: as its config says.", rich_help_panel=_SPEC),
    ] = None
    ngram_min: Annotated[int, Option(help="Shortest suffix that ngram looks up.", rich_help_panel=_SPEC)] = (
        Speculation.ngram_min
    )
    ngram_max: Annotated[int, Option(help="Longest suffix that ngram looks up.", rich_help_panel=_SPEC)] = (
        Speculation.ngram_max
    )

    simulate_accept_length: Annotated[
        float | None,
        Option(
            help="Benchmarks: draw the tokens per verify with this mean instead of comparing drafts.",
            rich_help_panel=_SPEC,
        ),
    ] = None

    max_running: Annotated[
        int | None,
        Option(
            help=f"Requests that decode together. Default: the concurrency, else {EngineConfig.max_running}.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(help="Longest prompt + output. Default: what the model allows.", rich_help_panel=_ENGINE),
    ] = None
    page_size: Annotated[int, Option(help="Tokens per KV page.", rich_help_panel=_ENGINE)] = EngineConfig.page_size
    kv_pages: Annotated[
        int | None,
        Option(help="Pages in the KV pool. Default: what can be needed and fits.", rich_help_panel=_ENGINE),
    ] = None
    decode_graph: Annotated[
        str | None,
        Option(
            metavar="|".join(DECODE_GRAPHS),
            help="whole: one CUDA graph for each iteration (draft, verify, accept, commit). "
            "Default: whole on a CUDA device, off on a CPU.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    prefill_graph: Annotated[
        str | None,
        Option(
            metavar="|".join(PREFILL_GRAPHS),
            help="piecewise: CUDA graphs for what lies between attention layers in a prompt pass. Default: piecewise "
            "on a CUDA device, off on a CPU and where configurations with and without it are compared.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    attention_backend: Annotated[
        str,
        Option(
            help=f"Who computes prompts' attention: {', '.join(ATTENTION_BACKENDS)}.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineConfig.attention_backend
    draft_attention_backend: Annotated[str, Option(help="The same for the draft model.", rich_help_panel=_ENGINE)] = (
        EngineConfig.draft_attention_backend
    )
    kv_dtype: Annotated[
        str,
        Option(
            metavar="|".join(KV_DTYPES),
            help="auto: the model's type. fp8: keys and values as float8 e4m3.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineConfig.kv_dtype
    float8_activations: Annotated[
        bool,
        Option(
            "--float8-activations/--no-float8-activations",
            help="Where weights are float8: round activations to float8 as well, by token and 128 columns.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineConfig.float8_activations
    state_dtype: Annotated[
        str,
        Option(
            metavar="|".join(STATE_DTYPES),
            help="Type of the matrix states of recurrent layers.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineConfig.state_dtype
    memory_fraction: Annotated[
        float, Option(help="Share of free memory for weights and KV.", rich_help_panel=_ENGINE)
    ] = EngineConfig.memory_fraction
    prefill_chunk: Annotated[int, Option(help="Most prompt tokens computed in one step.", rich_help_panel=_ENGINE)] = (
        EngineConfig.prefill_chunk
    )
    prefix_cache: Annotated[
        bool | None,
        Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep the KV of finished prompts. Default: on; off in trace, send-one and sweep (but for gsp).",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    seed: Annotated[int, Option(help="Of sampling, random prompts and dummy weights.", rich_help_panel=_ENGINE)] = (
        EngineConfig.seed
    )

    def speculation(self) -> Speculation:
        """What --spec, --algorithm and --draft mean together.

        `--spec off` is plain decoding whatever else is given.
        """
        if self.spec not in (None, *SPECS):
            raise refuse("spec", self.spec, f"use one of {', '.join(SPECS)}")
        if self.spec == "off":
            return Speculation()
        if self.spec is None and self.algorithm is None and self.draft is None:
            for name in _OF_DRAFTS:
                if getattr(self, name) != getattr(Speculation, name):
                    raise refuse(name, getattr(self, name), "nothing is drafted; add --algorithm, or leave it out")
        default = "standalone" if self.draft else "none" if self.spec is None else "ngram"
        return Speculation(
            algorithm=self.algorithm or default,
            schedule=self.spec or "v2",
            draft=self.draft,
            draft_tokens=self._draft_tokens(),
            draft_steps=self.draft_steps,
            draft_topk=self.draft_topk,
            aux_layers=self._aux_layers(),
            draft_rope_theta=self.draft_rope_theta,
            ngram_min=self.ngram_min,
            ngram_max=self.ngram_max,
            simulate_accept_length=self.simulate_accept_length,
        )

    def having(self, changes: Mapping[str, object], where: str) -> EngineOptions:
        """The same with other settings, by their names here. Refused: one that there is not, or of another type."""
        hints = get_type_hints(EngineOptions)
        known: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in hints:
                raise refuse("configs", f"{where}: {name}", f"use options of an engine: {', '.join(hints)}")
            kinds = get_args(hints[name]) or (hints[name],)
            known[name] = str(value) if str in kinds and type(value) is int else value
            if type(known[name]) not in kinds and not (float in kinds and type(value) is int):
                works = "use true or false" if bool in kinds else "this is not a value of that option"
                raise refuse("configs", f"{where}: {name}={value!r}", works)
        return replace(self, **known)

    def _draft_tokens(self) -> int | Literal["auto"] | None:
        if self.draft_tokens is None:
            return None
        if self.draft_tokens == "auto":
            return "auto"
        try:
            return int(self.draft_tokens)
        except ValueError:
            raise refuse("draft_tokens", self.draft_tokens, "use a whole number, or auto") from None

    def _aux_layers(self) -> tuple[int, ...] | None:
        if self.aux_layers is None:
            return None
        try:
            return tuple(int(layer) for layer in self.aux_layers.split(","))
        except ValueError:
            raise refuse("aux_layers", self.aux_layers, "write layers with commas, such as 2,18,33") from None

    def config(
        self, *, concurrency: int | None = None, prefix_cache: bool = True, compares: bool = False
    ) -> EngineConfig:
        """The engine asked for, with the command's `concurrency` and its default for the prefix cache. compares: the
        command has configurations with prompts from graphs beside others without."""
        if concurrency is not None:
            at_least("concurrency", concurrency, 1)
        same = {item.name for item in fields(EngineConfig)} & {item.name for item in fields(EngineOptions)}
        settings = {name: getattr(self, name) for name in same}
        settings["max_running"] = next(
            value for value in (self.max_running, concurrency, EngineConfig.max_running) if value is not None
        )
        settings["prefix_cache"] = prefix_cache if self.prefix_cache is None else self.prefix_cache
        asked = Graphs(decode=self.decode_graph or "off", prefill=self.prefill_graph or "off")
        config = EngineConfig(**settings, speculation=self.speculation(), graphs=asked)
        if self.decode_graph and (self.prefill_graph or compares):
            return config
        from specbatch.engine.builder import find_device, usual_graphs

        usual = usual_graphs(find_device(config.device))
        prefill = self.prefill_graph or ("off" if compares else usual.prefill)
        return replace(config, graphs=Graphs(self.decode_graph or usual.decode, prefill))


def takes_engine(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `EngineOptions` in place of its parameter `engine`.

    Typer reads a command's signature, so this rewrites it. `without` names options that the command lacks.
    """
    hints = get_type_hints(EngineOptions, include_extras=True)
    shared = [item for item in fields(EngineOptions) if item.name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            engine = EngineOptions(**{item.name: values.pop(item.name) for item in shared})
            command(engine=engine, **values)

        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != "engine"
        ]
        added = [
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
            for item in shared
        ]
        run.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + added}
        return run

    return decorate
