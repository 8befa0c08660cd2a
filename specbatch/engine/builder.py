"""From a configuration to an engine's parts: checkpoint, memory plan, models, caches, scheduler, runner, graphs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import torch

from specbatch import weights
from specbatch.config import EngineConfig, Graphs
from specbatch.core.async_copy import on_device
from specbatch.core.device_batch import DeviceBatch
from specbatch.drafters.base import Drafter, DraftPlan
from specbatch.engine.draft_length import DraftLength, announced
from specbatch.engine.prefill import PromptPass
from specbatch.engine.runner import OnTokens, Runner
from specbatch.engine.scheduler import Scheduler
from specbatch.engine.scoring import Scorer
from specbatch.engine.step import DecodeStep
from specbatch.errors import refuse
from specbatch.kernels.attention.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.memory.kv_cache import bytes_per_page
from specbatch.memory.page_pool import PagePool, pages_for, reach_of
from specbatch.memory.planner import EXCLUSIVE, MemoryPlan, MemoryShare, available_memory, plan_memory, size_text
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.recurrent_state import state_bytes, state_types
from specbatch.memory.state_cache import StateCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, token_bytes
from specbatch.progress import Report
from specbatch.runtime.cuda_graphs import Program, Recorder, Recordings, batch_buckets, graph_bytes, token_buckets
from specbatch.runtime.loader import Loader, float8_said, rounds_activations, weight_bytes
from specbatch.runtime.prefill_forward import PromptWork, static_bytes
from specbatch.tokenizer import Tokenizer
from specbatch.weights import Checkpoint, Log


@dataclass(frozen=True)
class Parts:
    """What an engine works with. `config`: as asked for, with what the draft and the memory decide; `caps`: what it can
    hold at most, for the record; `forwards`: by role."""

    config: EngineConfig
    device: torch.device
    tokenizer: Tokenizer
    model: Decoder
    plan: MemoryPlan
    caps: dict[str, Any]
    scheduler: Scheduler
    runner: Runner
    drafter: Drafter
    scorer: Scorer
    forwards: dict[str, PromptWork]


class Prepared(NamedTuple):
    """What is known of an engine before its memory is planned. config: with what the draft says filled in; attention:
    by role."""

    config: EngineConfig
    device: torch.device
    target: Checkpoint
    dtype: torch.dtype
    attention: dict[str, PrefillAttention]
    draft: DraftPlan


def prepare(config: EngineConfig, log: Log, *, shared: Decoder | None = None) -> Prepared:
    """Refuse what cannot run, a draft that was made for another model among it, before anything is planned or loaded.

    shared: the target as another engine has loaded it.
    """
    device = find_device(config.device)
    _check_device(config, device)
    target = weights.open_checkpoint(
        config.model,
        config.load_format,
        seed=config.seed,
        tokenizer=config.tokenizer,
        log=log,
        device=str(device),
    )
    dtype = find_dtype(config.dtype, target.config.dtype, device)
    attention = {"target": prefill_backend(config.attention_backend, device, dtype, target.config.head_dim)}
    if shared is not None and (dtype, device) != (shared.dtype, shared.device):
        works = f"the weights are {type_name(shared.dtype)} on {shared.device}; ask for the same"
        raise refuse("weights_of", f"{type_name(dtype)} on {device}", works)
    sharing = "" if shared is None else ", weights shared"
    log(f"model: {target.name} ({target.origin}), {type_name(dtype)} on {device}{sharing}; {target.config.rope}")
    draft: DraftPlan = import_module(config.speculation.entry.module).plan(target, config, log)
    if draft.drafted is not None:
        asked = config.speculation
        if asked.is_auto:  # then this is the most
            config = replace(config, speculation=replace(asked, draft_steps=draft.drafted))
        else:
            config = replace(config, speculation=replace(asked, draft_tokens=draft.drafted))
    if not config.float8_activations and not rounds_activations(True, dtype, device, target.config, draft.config):
        log("float8_activations: off, which changes nothing: on gives this model nothing to multiply in float8 here")
    attention["draft"] = prefill_backend(
        config.draft_attention_backend, device, dtype, draft.config.head_dim, "draft_attention_backend"
    )
    return Prepared(config, device, target, dtype, attention, draft)


def build(
    config: EngineConfig,
    log: Log,
    report: Report,
    on_tokens: OnTokens,
    *,
    shared: Decoder | None = None,
    share: MemoryShare = EXCLUSIVE,
) -> Parts:
    """Load and record everything. Raises SpecbatchError for what cannot run or does not fit; shared: see `prepare`."""
    prepared = prepare(config, log, shared=shared)
    config, device, target, dtype, attention, draft = prepared
    plan = memory_plan(prepared, share, is_shared=shared is not None)
    if config.prefix_cache and plan.states and not plan.cached_states:
        log("prefix cache: off, as no state of a prefix fits beside the KV pages; use a higher memory_fraction")
        config = replace(config, prefix_cache=False)
    log(f"speculation: {config.speculation}")
    if config.speculation.is_auto:
        log(announced(config.speculation.lengths))
    for line in plan.lines():
        log(line)
    try:
        with on_device(device):
            return _assemble(config, target, shared, draft, attention, plan, dtype, device, log, report, on_tokens)
    except torch.OutOfMemoryError as error:
        raise plan.out_of_memory("building the engine") from error


def memory_plan(prepared: Prepared, share: MemoryShare = EXCLUSIVE, *, is_shared: bool = False) -> MemoryPlan:
    """What an engine would take of the memory that is free now. Refused: what does not fit."""
    config, device, target, dtype, _, draft = prepared
    kv_dtype, chunk = _kv_dtype(config, dtype), config.prefill_chunk
    graphs = graph_bytes(
        config.graphs,
        most=config.max_running,
        chunk=chunk,
        layers=target.config.num_layers + draft.kv_layers,
        lengths=len(config.speculation.lengths),
    )
    if config.graphs.prefill == "piecewise":
        graphs += static_bytes(target.config, dtype, chunk, needs_all_hidden=draft.needs_all_hidden, aux=len(draft.aux))
        graphs += static_bytes(draft.config, dtype, chunk, needs_all_hidden=False) if draft.kv_layers else 0
    return plan_memory(
        config,
        free=available_memory(device),
        on_cpu=device.type == "cpu",
        model_len=min(target.config.max_position, draft.config.max_position),
        weights=0 if is_shared and share.index == 0 else weight_bytes(target.config, dtype, device),
        draft_weights=(weight_bytes(draft.weights, dtype, device) if draft.weights else 0)
        + draft.parameters * dtype.itemsize,
        page_bytes=bytes_per_page(target.config, target.config.attention_layers, config.page_size, kv_dtype)
        + bytes_per_page(draft.config, draft.kv_layers, config.page_size, kv_dtype),
        state_bytes=_state_bytes(config, target.config, dtype, config.speculation.drafted + 1),
        cached_state_bytes=_state_bytes(config, target.config, dtype, 0),
        vocabulary=target.config.vocab_size,
        rows=draft.kv_slots_per_step(config.speculation.drafted + 1),
        token_bytes=_token_bytes(target.config, draft, dtype),
        graphs=graphs,
        share=share,
    )


def _token_bytes(target: ModelConfig, draft: DraftPlan, dtype: torch.dtype) -> int:
    """Activations of a token: those of the target, or of what drafts behind it, which reads its features."""
    features = (draft.needs_all_hidden + len(draft.aux)) * target.hidden_size * dtype.itemsize
    behind = features + token_bytes(draft.config, dtype) if draft.kv_layers else 0
    return max(token_bytes(target, dtype) + features, behind)


def _state_bytes(config: EngineConfig, target: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """Of one device row with a verify of `rows` rows; without, of a checkpoint."""
    layers = target.num_layers - target.attention_layers
    return state_bytes(target.state_shapes, layers, rows, state_types(dtype, config.state_dtype))


def _assemble(
    config: EngineConfig,
    target: Checkpoint,
    shared: Decoder | None,
    draft: DraftPlan,
    attention: dict[str, PrefillAttention],
    plan: MemoryPlan,
    dtype: torch.dtype,
    device: torch.device,
    log: Log,
    report: Report,
    on_tokens: OnTokens,
) -> Parts:
    rows = config.speculation.drafted + 1
    slots = draft.kv_slots_per_step(rows)
    width = reach_of(plan.max_model_len, slots) + 1
    recorder = Recorder(device) if config.graphs.any else None
    batch = DeviceBatch(config.max_running, width, pages_for(width, config.page_size), device)
    loader = Loader(
        dtype=dtype,
        kv_dtype=_kv_dtype(config, dtype),
        device=device,
        max_positions=width,
        pages=plan.kv_pages,
        page_size=config.page_size,
        attention=attention,
        chunk=config.prefill_chunk,
        page_table=batch.page_table,
        rows=rows,
        state_dtype=config.state_dtype,
        cached_states=plan.cached_states,
        recorder=recorder if config.graphs.prefill == "piecewise" else None,
    )
    model = (loader.model(target) if shared is None else shared.with_positions(width)).with_aux(draft.aux)
    float8 = rounds_activations(config.float8_activations, dtype, device, target.config, draft.config)
    for line in float8_said(model, draft.config, loads=(shared is None, draft.weights is not None), rounds=float8):
        log(line)
    forward, cache = loader.target(model, needs_all_hidden=draft.needs_all_hidden)
    drafter = draft.build(model, loader)
    if drafter.diagnose is not None:
        drafter.diagnose = use_fp8_activations(float8)(drafter.diagnose)
    pool = PagePool(plan.kv_pages)
    prefixes, state_cache = None, None
    if config.prefix_cache:
        prefixes = PrefixCache(pool, config.page_size)
        if model.recurrent_layers:
            state_cache = StateCache(prefixes, config.page_size, plan.cached_states)
    scheduler = Scheduler(
        pool,
        prefixes,
        page_size=config.page_size,
        max_running=config.max_running,
        max_model_len=plan.max_model_len,
        prefill_chunk=config.prefill_chunk,
        rows=slots,
        uncached_tail=draft.uncached_tail,
        state_cache=state_cache,
    )
    lengths = DraftLength(config.speculation.lengths, batch_buckets(config.max_running))
    ways = {"needs_all_hidden": draft.needs_all_hidden, "float8": float8}
    prompt_pass = PromptPass(model, forward, cache.page_size, drafter, states=cache.states, **ways)
    scorer = Scorer(model, forward, batch, plan, chunk=config.prefill_chunk, shares=config.prefix_cache, **ways)
    runner = Runner(
        scheduler,
        batch,
        DecodeStep(model, cache, drafter, config.speculation.simulate_accept_length, float8=float8),
        prompt_pass,
        lengths=lengths,
        idle_at_zero=draft.idle_at_zero,
        depth=config.speculation.depth,
        page_size=config.page_size,
        chunk=config.prefill_chunk,
        seed=config.seed,
        on_tokens=on_tokens,
        recorder=recorder if config.graphs.decode == "whole" else None,
    )
    caps: dict[str, Any] = {
        "device": str(device),
        "dtype": type_name(dtype),
        "kv_dtype": type_name(cache.dtype),
        "float8_activations": "on" if float8 else "off",
        "attention_backend": cache.attention.name,
        "max_running": config.max_running,
        "max_model_len": plan.max_model_len,
        "kv_pages": plan.kv_pages,
        "page_size": config.page_size,
        "prefill_chunk": config.prefill_chunk,
        "verify_rows": rows,
        "verify_slots": slots,
        "draft_shape": str(config.speculation.shape) if rows > 1 else "none",
        "weights_bytes": plan.weights + plan.draft_weights,
        "kv_bytes": plan.kv,
        "state_bytes": plan.states,
        "cached_states": plan.cached_states,
        "prefix_cache": "off" if prefixes is None else "on",
    }
    recordings: list[Recordings] = [item for item in loader.forwards.values() if isinstance(item, Recordings)]
    if runner.graphs is not None:
        recordings.append(runner.graphs)
    if recordings:
        passes: list[Program] = []
        if loader.recorder is not None:
            sizes = token_buckets(config.prefill_chunk)
            passes = [partial(prompt_pass.warm, batch, size) for size in sizes]
            # Keys of a prefix are read by other kernels; where it is long, several programs share them.
            passes += [partial(prompt_pass.warm, batch, sizes[0], prefix) for prefix in (1, width)]
            # Behind the last attention a pass has as many rows as prompts end in it: Triton compiles its products for
            # one row, for 16 and for those between.
            passes += [partial(prompt_pass.warm, batch, sizes[0], ends=n) for n in (2, 16) if n <= config.max_running]
        caps |= _capture(recordings, passes, device, log, report, float8=float8)
    if lengths.is_auto:
        times = runner.time_lengths().items()
        caps["draft_length_s"] = {str(rows): {str(n): seconds for n, seconds in row.items()} for rows, row in times}
    return Parts(
        config=config,
        device=device,
        tokenizer=target.tokenizer(),
        model=model,
        plan=plan,
        caps=caps,
        scheduler=scheduler,
        runner=runner,
        drafter=drafter,
        scorer=scorer,
        forwards=loader.forwards,
    )


@torch.inference_mode()
def _capture(
    recordings: list[Recordings],
    passes: list[Program],
    device: torch.device,
    log: Log,
    report: Report,
    *,
    float8: bool,
) -> dict[str, Any]:
    """Record every bucket, with float8 as in `use_fp8_activations`; then run `passes` to warm up what runs between
    the pieces. What it took, for the caps."""
    start, free = time.perf_counter(), available_memory(device)
    total, done = sum(len(item) for item in recordings), 0
    report(0, total)
    with use_fp8_activations(float8):
        for _ in chain.from_iterable(item.capture() for item in recordings):
            done += 1
            report(done, total)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what warming up took: on the recorder's stream nobody else could have it
    for program in passes:
        program()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = {"capture_s": time.perf_counter() - start, "graph_bytes": max(free - available_memory(device), 0)}
    log(f"graphs: {total} buckets recorded in {took['capture_s']:.1f} s, {size_text(int(took['graph_bytes']))}")
    return took


def find_device(name: str) -> torch.device:
    """The device that `name` (auto, cpu, cuda, cuda:N) means here; refused where there is none such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise refuse("device", name, "torch sees no CUDA device here; use cpu or auto")
        index = int(name[5:] or 0) if ":" in name else 0
        if index >= torch.cuda.device_count():
            raise refuse("device", name, f"there are {torch.cuda.device_count()} CUDA devices; count from 0")
        return torch.device("cuda", index)
    return torch.device(name)


def usual_graphs(device: torch.device) -> Graphs:
    """What a command records that is told nothing: nobody wants to time the host by accident."""
    return Graphs("whole", "piecewise") if device.type == "cuda" else Graphs()


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Refuse what only a CUDA device can do."""
    if device.type == "cuda":
        return
    for setting, value in (("decode_graph", config.graphs.decode), ("prefill_graph", config.graphs.prefill)):
        if value != "off":
            raise refuse(setting, value, "needs a CUDA device and this engine runs on a CPU; use off")
    if config.kv_dtype != "auto":
        raise refuse("kv_dtype", config.kv_dtype, "needs a CUDA device and this engine runs on a CPU; use auto")


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The type that `name` means for a checkpoint published in `stored`: auto is float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored or "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
