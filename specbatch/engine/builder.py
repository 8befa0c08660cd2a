"""Builds an engine from its configuration: checkpoints, memory plan, models, caches, scheduler, graphs."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from specbatch import weights
from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.core.device_batch import DeviceBatch
from specbatch.draft_shape import counts_root
from specbatch.drafters.base import Diagnosis, Drafter, DraftPlan
from specbatch.drafters.corpus import Corpus, CorpusDrafter, CorpusPlan
from specbatch.drafters.corpus_files import plan_corpus
from specbatch.engine.device_worker import DeviceWorker, OtherRanks
from specbatch.engine.draft_length import DraftLength, announced
from specbatch.engine.prefill import PrefillStep
from specbatch.engine.scheduler import Scheduler
from specbatch.engine.score_step import ScoreStep
from specbatch.engine.step import DecodeStep
from specbatch.engine.step_times import measure_step_times
from specbatch.engine.token_check import TokenCheck
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.attention.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.gemm.fp8_activations import use_fp8_activations
from specbatch.kernels.sampling.rng import acceptance_thresholds
from specbatch.memory.grammar_pool import CELLS
from specbatch.memory.kv_cache import KVCache, bytes_per_page
from specbatch.memory.page_pool import PagePool, pages_for, reach_of
from specbatch.memory.planner import EXCLUSIVE, MemoryPlan, MemoryShare, available_memory, plan_memory, size_text
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.recurrent_state import state_bytes, state_types
from specbatch.memory.state_cache import StateCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, token_bytes
from specbatch.models.fp8 import FP8Weights
from specbatch.models.int4 import Int4Weights
from specbatch.progress import Report, Stages
from specbatch.runtime.cuda_graphs import Recorder, batch_buckets, graph_bytes
from specbatch.runtime.device import find_device, find_dtype, type_name
from specbatch.runtime.loader import Loader, dequantized_bytes, quantization_lines, quantizes_activations, weight_bytes
from specbatch.runtime.prefill_forward import static_bytes
from specbatch.tokenizer import Tokenizer
from specbatch.weights import Checkpoint, Log
from specbatch.weights.draft_heads import check_random

MOST_RANKS = 16  # that are tried when others do not work
# What deterministic mode refuses on a CUDA device: the bits of these kernels were compared in the interpreter only.
# `tests/lossless/test_deterministic_gpu.py` compares them there.
NOT_COMPARED_ON_CUDA = frozenset({"INT4", "MXFP4", "FP8 experts"})


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. config: as asked for, with what the draft and the memory decide; diagnose: see
    `Drafter.diagnose`; caps: what it can hold at most, for the record."""

    config: EngineConfig
    device: torch.device
    tokenizer: Tokenizer
    model: Decoder
    plan: MemoryPlan
    scheduler: Scheduler
    worker: DeviceWorker
    draft_length: DraftLength
    draft: DraftPlan
    diagnose: Diagnosis
    caps: dict[str, Any]


class Prepared(NamedTuple):
    """What is known of an engine before its memory is planned. config: with the settings that the draft decides filled
    in; model: the target's config, of one rank if it is divided, as that of the draft; attention: by role; corpus: None
    without one."""

    config: EngineConfig
    device: torch.device
    target: Checkpoint
    model: ModelConfig
    dtype: torch.dtype
    attention: dict[str, PrefillAttention]
    draft: DraftPlan
    corpus: CorpusPlan | None


def prepare(config: EngineConfig, log: Log, *, shared: Decoder | None = None) -> Prepared:
    """Open the checkpoints and refuse what cannot run, such as a draft for another model, before anything is loaded.

    shared: the target, loaded by another engine.
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
        max_model_len=config.max_model_len,
    )
    dtype = find_dtype(config.dtype, target.config.dtype, device)
    sizes = target.config
    attention = {
        "target": prefill_backend(
            config.attention_backend,
            device,
            dtype,
            sizes.head_dim,
            sinks=sizes.has_sinks,
            latents=sizes.has_latents,
        )
    }
    if shared is not None and (dtype, device) != (shared.dtype, shared.device):
        works = f"the weights are {type_name(shared.dtype)} on {shared.device}; use the same"
        raise refuse("weights_of", f"{type_name(dtype)} on {device}", works)
    sharing = "" if shared is None else ", weights shared"
    log(f"model: {target.name} ({target.origin}), {type_name(dtype)} on {device}{sharing}; {target.config.rope}")
    if target.config.length_note is not None:
        log(target.config.length_note)
    _check_cache_scales(config, target.config)
    if config.deterministic and device.type == "cuda":
        _check_deterministic_on_cuda(config, device, target.config, dtype)
    if config.load_format == "dummy" and config.speculation.draft is not None:
        check_random(config.speculation.draft)
    draft: DraftPlan = import_module(config.speculation.entry.module).plan(target, config, log)
    if config.deterministic and device.type == "cuda":
        _check_kernels_on_cuda(draft.config, "a draft model with ")
    if draft.drafted is not None:
        asked = config.speculation
        if asked.is_auto:  # an upper limit
            config = replace(config, speculation=replace(asked, draft_steps=draft.drafted))
        else:
            config = replace(config, speculation=replace(asked, draft_tokens=draft.drafted))
    if not config.fp8_activations and not quantizes_activations(True, dtype, device, target.config, draft.config):
        log("fp8_activations: off has no effect: this model has no FP8 GEMM on this device")
    attention["draft"] = prefill_backend(
        config.draft_attention_backend,
        device,
        dtype,
        draft.config.head_dim,
        "draft_attention_backend",
        sinks=draft.config.has_sinks,
        latents=draft.config.has_latents,
    )
    model = target.config
    if config.tensor_parallel > 1:
        model, draft = _divided(model, draft, config.tensor_parallel)
    return Prepared(
        config, device, target, model, dtype, attention, draft, plan_corpus(config.speculation, target, log)
    )


def build(
    config: EngineConfig,
    log: Log,
    report: Report,
    *,
    shared: Decoder | None = None,
    share: MemoryShare = EXCLUSIVE,
    ranks: Communicator | None = None,
    others: OtherRanks | None = None,
) -> EngineParts:
    """Load and record everything. Raises SpecbatchError for what cannot run or does not fit; shared: see `prepare`.

    ranks: over which the models are divided, for a rank that is led; others: for rank 0, those that it leads. They
    build once the configuration is checked."""
    prepared = prepare(config, log, shared=shared)
    if others is None:
        return _build(prepared, log, report, shared, share, ranks)
    ranks = others.build()
    try:
        return _build(prepared, log, others.with_theirs(report), shared, share, ranks, others)
    except BaseException as error:
        others.fail(error)
        raise


def _build(
    prepared: Prepared,
    log: Log,
    report: Report,
    shared: Decoder | None,
    share: MemoryShare,
    ranks: Communicator | None,
    others: OtherRanks | None = None,
) -> EngineParts:
    plan = memory_plan(prepared, share, is_shared=shared is not None, ranks=ranks)
    config = prepared.config
    if config.prefix_cache and plan.states and not plan.cached_states:
        log("prefix cache: off, because no prefix state fits next to the KV pages; use a higher memory_fraction")
        prepared = prepared._replace(config=replace(config, prefix_cache=False))
    log(f"decoding: {config.speculation}")
    asked = config.speculation
    if counts_root(asked.draft_steps, asked.draft_topk, asked.draft_tokens):
        log(
            f"draft_tokens={asked.draft_tokens} with draft_steps={asked.draft_steps} counts the root, as SGLang does: "
            f"{asked.draft_steps} drafted"
        )
    if asked.is_auto:
        log(announced(asked.lengths))
    for line in plan.lines(1 if ranks is None else ranks.size):
        log(line)
    if ranks is not None and prepared.device.type == "cpu":
        log(f"tensor_parallel={ranks.size}: on a CPU, ranks exchange tensors through gloo, which is slow and for tests")
    try:
        with on_device(prepared.device):
            progress = Stages(report)
            parts = _load(prepared, plan, shared, log, progress, ranks)
            progress.begin()
            parts.caps.update(_record_graphs(parts.worker, log, progress))
            if others is not None:
                parts.worker.lead(others)
                others.wait_until_built()
            if ranks is None or ranks.rank == 0:  # the others repeat its steps
                parts.caps.update(_time_draft_lengths(parts))
            return parts
    except torch.OutOfMemoryError as error:
        raise plan.out_of_memory("building the engine") from error


def memory_plan(
    prepared: Prepared, share: MemoryShare = EXCLUSIVE, *, is_shared: bool = False, ranks: Communicator | None = None
) -> MemoryPlan:
    """How an engine would use the memory that is free now, of each rank what the rank with the least has. Refuses what
    does not fit."""
    config, device, _, model, dtype, _, draft, corpus = prepared
    kv_dtype, chunk = _kv_dtype(config, dtype), config.prefill_chunk
    graphs = graph_bytes(
        config.graphs,
        most=config.max_running,
        chunk=chunk,
        layers=model.num_layers + draft.layers,
        lengths=len(config.speculation.lengths),
    )
    if config.graphs.prefill == "piecewise":
        graphs += static_bytes(model, dtype, chunk, needs_all_hidden=draft.needs_all_hidden, aux=len(draft.aux))
        graphs += static_bytes(draft.config, dtype, chunk, needs_all_hidden=False) if draft.layers else 0
    pools = 2 if graphs else 1  # graphs have one of their own
    return plan_memory(
        config,
        free=available_memory(device) if ranks is None else _least_memory(device, ranks),
        on_cpu=device.type == "cpu",
        model_len=min(model.max_position, draft.config.max_position),
        weights=0 if is_shared and share.index == 0 else weight_bytes(model, dtype, device),
        draft_weights=(weight_bytes(draft.weights, dtype, device) if draft.weights else 0)
        + draft.parameters * dtype.itemsize,
        page_bytes=bytes_per_page(model, len(model.kv_layers), config.page_size, kv_dtype)
        + bytes_per_page(draft.config, draft.kv_layers, config.page_size, kv_dtype),
        state_bytes=_state_bytes(prepared, config.speculation.drafted + 1),
        cached_state_bytes=_state_bytes(prepared, 0),
        vocabulary=model.vocab_size,
        rows=draft.kv_slots_per_step(config.speculation.drafted + 1),
        token_bytes=_token_bytes(model, draft, dtype),
        temporary=pools * max(dequantized_bytes(part, dtype, device) for part in (model, draft.config)),
        corpus_bytes=(lambda running: 0) if corpus is None else corpus.bytes,
        grammars=2 * CELLS,
        graphs=graphs,
        share=share,
    )


def _divided(model: ModelConfig, draft: DraftPlan, ranks: int) -> tuple[ModelConfig, DraftPlan]:
    """The parts of one rank. Refused: models that cannot be divided, with the numbers of ranks that work."""
    whose = ""
    try:
        part = model.divided(ranks)
        whose = "for the draft, "
        return part, draft.divided(ranks)
    except SpecbatchError as error:
        found = []
        for size in range(2, MOST_RANKS + 1):
            with suppress(SpecbatchError):
                model.divided(size), draft.divided(size)
                found.append(str(size))
        works = f"use {' or '.join(found)}" if found else "this model runs on one device only"
        raise refuse("tensor_parallel", ranks, f"{whose}{error.works}; {works}") from None


def _least_memory(device: torch.device, ranks: Communicator) -> int:
    """Free memory of a rank: on a CPU all ranks share it."""
    free = available_memory(device) // (ranks.size if device.type == "cpu" else 1)
    mebibytes = torch.tensor([float(free >> 20)], device=device)
    return int(ranks.all_gather(mebibytes).min()) << 20


def _token_bytes(target: ModelConfig, draft: DraftPlan, dtype: torch.dtype) -> int:
    """Activations of a token: those of the target, or of the draft after it, which reads its features and may keep
    embedded tokens with their ids and positions."""
    features = (draft.needs_all_hidden + len(draft.aux)) * target.hidden_size * dtype.itemsize
    embedded = draft.embedded * (draft.config.hidden_size * dtype.itemsize + 2 * torch.int64.itemsize)
    drafting = features + embedded + token_bytes(draft.config, dtype) if draft.layers else 0
    return max(token_bytes(target, dtype) + features, drafting)


def _state_bytes(prepared: Prepared, rows: int) -> int:
    """Recurrent states of one slot with a verify of `rows` tokens, the target's and the draft's; with 0, of a cached
    prefix."""
    model, draft, types = prepared.model, prepared.draft, state_types(prepared.dtype, prepared.config.state_dtype)
    own = state_bytes(model.state_shapes, model.recurrent_layers, rows, types)
    return own + state_bytes(draft.config.state_shapes, draft.state_layers, rows, types)


def _load(
    prepared: Prepared,
    plan: MemoryPlan,
    shared: Decoder | None,
    log: Log,
    progress: Stages,
    ranks: Communicator | None,
) -> EngineParts:
    """Load the models and allocate the caches."""
    config, device, target, sizes, dtype, attention, draft, asked_corpus = prepared
    num_queries = config.speculation.drafted + 1
    kv_slots = draft.kv_slots_per_step(num_queries)
    width = reach_of(plan.max_model_len, kv_slots) + 1
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
        num_queries=num_queries,
        state_dtype=config.state_dtype,
        cached_states=plan.cached_states,
        progress=progress,
        recorder=recorder if config.graphs.prefill == "piecewise" else None,
        ranks=ranks,
    )
    model = (loader.model(target) if shared is None else shared.with_positions(width, sizes)).with_aux(draft.aux)
    fp8 = quantizes_activations(config.fp8_activations, dtype, device, target.config, draft.config)
    for line in quantization_lines(
        model, draft.config, loads=(shared is None, draft.weights is not None), quantizes=fp8
    ):
        log(line)
    needs_all_hidden = draft.needs_all_hidden
    forward, cache = loader.target(model, needs_all_hidden=needs_all_hidden)
    drafter: Drafter = draft.build(model, loader)
    corpus = None if asked_corpus is None else Corpus(asked_corpus, batch)
    if corpus is not None:
        drafter = CorpusDrafter(drafter, corpus.index)
    states = [one.states for one in loader.caches if one.states is not None]
    simulated = config.speculation.simulated
    simulate = None if simulated is None else acceptance_thresholds(simulated.conditional, device)
    token_check = None if ranks is None else TokenCheck(device)
    passes: dict[str, Any] = {"page_size": config.page_size, "needs_all_hidden": needs_all_hidden, "fp8": fp8}
    worker = DeviceWorker(
        batch,
        PrefillStep(batch, model, forward, drafter, states=states, workspace=plan.workspace, **passes),
        DecodeStep(
            model,
            cache,
            drafter,
            simulate,
            config.speculation.verification,
            fp8=fp8,
            history=None if token_check is None else token_check.history,
            budget=_budget(config, device),
        ),
        ScoreStep(batch, model, forward, workspace=plan.workspace, **passes),
        caches=loader.caches,
        forwards=loader.forwards,
        page_size=config.page_size,
        prefill_chunk=config.prefill_chunk,
        draft_lengths=config.speculation.lengths,
        recorder=recorder if config.graphs.decode == "whole" else None,
        fp8=fp8,
        deterministic=config.deterministic,
        token_check=token_check,
        corpus=corpus,
    )
    return EngineParts(
        config=config,
        device=device,
        tokenizer=target.tokenizer(),
        model=model,
        plan=plan,
        scheduler=_scheduler(config, plan, model.config, draft, has_states=bool(states)),
        worker=worker,
        draft_length=DraftLength(config.speculation.lengths, batch_buckets(config.max_running)),
        draft=draft,
        diagnose=use_fp8_activations(fp8)(drafter.diagnose),
        caps=_caps(prepared, plan, cache, batch.tokens.numel(), fp8=fp8),
    )


def _caps(prepared: Prepared, plan: MemoryPlan, cache: KVCache, running: int, *, fp8: bool) -> dict[str, Any]:
    """What the engine can hold at most and what was chosen for it, for the record. running: tokens that all slots have
    room for; fp8: whether activations are quantized."""
    config, asked, corpus = prepared.config, prepared.config.speculation, prepared.corpus
    num_queries = asked.drafted + 1
    caps: dict[str, Any] = {
        "device": str(prepared.device),
        "dtype": type_name(prepared.dtype),
        "kv_dtype": type_name(cache.dtype),
        "fp8_activations": "on" if fp8 else "off",
        "deterministic": "on" if config.deterministic else "off",
        "attention_backend": cache.attention.name,
        "max_running": config.max_running,
        "max_model_len": plan.max_model_len,
        "kv_pages": plan.kv_pages,
        "page_size": config.page_size,
        "prefill_chunk": config.prefill_chunk,
        "verify_rows": num_queries,
        "verify_slots": prepared.draft.kv_slots_per_step(num_queries),
        "draft_shape": str(asked.shape) if num_queries > 1 else "none",
        "weights_bytes": plan.weights + plan.draft_weights,
        "kv_bytes": plan.kv,
        "state_bytes": plan.states,
        "cached_states": plan.cached_states,
        "prefix_cache": "on" if config.prefix_cache else "off",
    }
    if asked.verify_budget is not None:
        caps["verify_budget"] = asked.verify_budget
    if corpus is not None:
        caps |= {"corpus_tokens": corpus.size, "corpus_bytes": corpus.bytes(running)}
    return caps


def _budget(config: EngineConfig, device: torch.device) -> VerifyBudget | None:
    asked = config.speculation
    if asked.verify_budget is None:
        return None
    by_rejection = asked.entry.samples_drafts and asked.corpus is None and not config.deterministic
    return VerifyBudget.of(asked.verify_budget, config.max_running, device, mixes_seeds=by_rejection)


def _scheduler(
    config: EngineConfig, plan: MemoryPlan, target: ModelConfig, draft: DraftPlan, *, has_states: bool
) -> Scheduler:
    pool = PagePool(plan.kv_pages)
    prefixes, state_cache = None, None
    if config.prefix_cache:
        prefixes = PrefixCache(pool, config.page_size)
        if has_states:
            state_cache = StateCache(prefixes, config.page_size, plan.cached_states)
    return Scheduler(
        pool,
        prefixes,
        page_size=config.page_size,
        max_running=config.max_running,
        prefill_chunk=config.prefill_chunk,
        kv_slots_per_step=draft.kv_slots_per_step(config.speculation.drafted + 1),
        uncached_tail=draft.uncached_tail,
        window=_largest_window([target, *[draft.config] * bool(draft.kv_layers)]),
        state_cache=state_cache,
        samples_share=state_cache is not None or not has_states,
    )


def _largest_window(models: list[ModelConfig]) -> int | None:
    """The most keys that a query of any of the models sees; None: all."""
    windows = [model.largest_window for model in models]
    return None if None in windows else max(filter(None, windows))


def _record_graphs(worker: DeviceWorker, log: Log, report: Report) -> dict[str, Any]:
    """Record the graphs, if any. Returns the time and memory that it took, for the caps."""
    if not worker.recordings():
        return {}
    start, free = time.perf_counter(), available_memory(worker.batch.device)
    total = worker.record_graphs(report)
    seconds, taken = time.perf_counter() - start, max(free - available_memory(worker.batch.device), 0)
    log(f"graphs: {total} buckets recorded in {seconds:.1f} s, {size_text(taken)}")
    return {"capture_s": seconds, "graph_bytes": taken}


def _time_draft_lengths(parts: EngineParts) -> dict[str, Any]:
    """Time decode steps of every length, if one is chosen as the engine runs. Returns seconds, for the caps."""
    if not parts.draft_length.is_auto:
        return {}
    bound = parts.scheduler.kv_slots_per_step + 1
    catch_up = parts.config.prefill_chunk if parts.draft.idle_at_zero else None
    times = measure_step_times(parts.worker, parts.draft_length, bound=bound, catch_up_tokens=catch_up)
    return {
        "draft_length_s": {str(rows): {str(n): seconds for n, seconds in row.items()} for rows, row in times.items()}
    }


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Refuse what the device cannot do."""
    if device.type == "cuda":
        return
    for setting, value in (("decode_graph", config.graphs.decode), ("prefill_graph", config.graphs.prefill)):
        if value != "off":
            raise refuse(setting, value, "needs a CUDA device and this engine runs on a CPU; use off")
    if config.kv_dtype != "auto":
        raise refuse("kv_dtype", config.kv_dtype, "needs a CUDA device and this engine runs on a CPU; use auto")


def _check_cache_scales(config: EngineConfig, target: ModelConfig) -> None:
    """Refuse an FP8 KV cache for a checkpoint that was calibrated with other scales than the 1 of the cache here."""
    if config.kv_dtype == "fp8" and target.quantization is not None and target.quantization.has_cache_scales:
        works = "the checkpoint has scales for an FP8 KV cache, and the cache here has none; use auto"
        raise refuse("kv_dtype", config.kv_dtype, works)


def _check_deterministic_on_cuda(
    config: EngineConfig, device: torch.device, target: ModelConfig, dtype: torch.dtype
) -> None:
    """Refuse what has no deterministic kernels on a CUDA device, and devices on which their bits were not compared. A
    draft may be any model: no bit of a result depends on it."""
    why = "with deterministic=True a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        works = f"its kernels were compared on Hopper only, and {device} has compute capability {capability}"
        raise refuse("deterministic", True, f"{works}; use an H100 or H200, or device='cpu'")
    if config.attention_backend not in ("auto", "triton"):
        raise refuse("attention_backend", config.attention_backend, f"{why} runs triton only; use auto or triton")
    is_fp8 = isinstance(target.quantization, FP8Weights)
    if is_fp8 and not quantizes_activations(config.fp8_activations, dtype, device, target):
        raise refuse("fp8_activations", False, f"{why} multiplies FP8 weights by FP8 activations only; use True")
    _check_kernels_on_cuda(target)
    for size in target.input_widths:
        if size % 8:
            works = f"{why} needs matrices whose columns are a multiple of 8, not {size}; use device='cpu'"
            raise refuse("deterministic", True, works)


def _check_kernels_on_cuda(model: ModelConfig, whose: str = "") -> None:
    """Refuse what only kernels run whose bits no device has shown to be equal, in a draft, too."""
    is_fp8 = isinstance(model.quantization, FP8Weights)
    for what, has_it, may_run in (
        ("INT4 weights", isinstance(model.quantization, Int4Weights), "INT4" not in NOT_COMPARED_ON_CUDA),
        ("MXFP4 experts", model.has_mxfp4, "MXFP4" not in NOT_COMPARED_ON_CUDA),
        ("FP8 experts", is_fp8 and model.chosen is not None, "FP8 experts" not in NOT_COMPARED_ON_CUDA),
        (f"heads of {model.head_dim} channels", model.head_dim > 256, False),
    ):
        if has_it and not may_run:
            works = f"on a CUDA device the bits of {whose}{what} were not yet found equal; use device='cpu'"
            raise refuse("deterministic", True, works)


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
