"""Builds an engine from its configuration: models, caches, scheduler, CUDA graphs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.config.draft_shape import counts_root
from specbatch.config.engine_config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.core.device_batch import DeviceBatch
from specbatch.drafters.base import Diagnosis, Drafter, DraftPlan
from specbatch.drafters.corpus import Corpus, CorpusDrafter
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.prefill import PrefillStep
from specbatch.engine.device.rank_calls import OtherRanks
from specbatch.engine.device.score_step import ScoreStep
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.device.token_check import DigestedStep, TokenCheck
from specbatch.engine.device.verify_budget import BudgetedStep, VerifyBudget
from specbatch.engine.schedule.draft_length import PROBED, DraftLength, announced
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.engine.schedule.verify_rows import VerifyRows
from specbatch.engine.schedule.verify_rows import announced as announced_budgets
from specbatch.engine.setup.cache_scales import stored_cache
from specbatch.engine.setup.caps import caps_of, start_up_line
from specbatch.engine.setup.graph_recording import record_graphs
from specbatch.engine.setup.memory_plan import (
    fewest_rows,
    kv_dtype_of,
    less_for_graphs,
    memory_plan,
    shares_prefixes,
    within_memory,
)
from specbatch.engine.setup.prepare import Prepared, prepare
from specbatch.engine.setup.step_times import measure_catch_up, measure_step_times
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.sampling.rng import acceptance_thresholds, thresholds_by_context
from specbatch.memory.kv_cache import bytes_per_page
from specbatch.memory.page_pool import PagePool, pages_for, reserved_length
from specbatch.memory.planner import EXCLUSIVE, MemoryPlan, MemoryShare
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.shared_prefixes import MOST_ROWS, SharedPrefixPlanner
from specbatch.memory.state_cache import StateCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.progress.bars import Report, Stages
from specbatch.runtime.cuda_graphs import Recorder, batch_buckets, recorded_tokens
from specbatch.runtime.loader import Loader, grouped_line, kept_groups, quantization_lines, quantizes_activations
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights import Log


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


def build(
    config: EngineConfig,
    log: Log,
    report: Report,
    *,
    shared: DecodeStep | None = None,
    share: MemoryShare = EXCLUSIVE,
    ranks: Communicator | None = None,
    others: OtherRanks | None = None,
) -> EngineParts:
    """Load and record everything. Raises SpecbatchError for what cannot run or does not fit.

    shared: of an open engine, whose weights of the target are used, and its KV cache if `share` says so; ranks: over
    which the models are divided, for a rank that is led; others: for rank 0, those that it leads. They build once the
    configuration is checked."""
    start = time.perf_counter()
    prepared = prepare(config, log, shared=None if shared is None else shared.model)
    if others is None:
        return _build(prepared, log, report, shared, share, ranks, start=start)
    ranks = others.build()
    try:
        return _build(prepared, log, others.with_theirs(report), shared, share, ranks, others, start=start)
    except BaseException as error:
        others.fail(error)
        raise


def _build(
    prepared: Prepared,
    log: Log,
    report: Report,
    shared: DecodeStep | None,
    share: MemoryShare,
    ranks: Communicator | None,
    others: OtherRanks | None = None,
    *,
    start: float,
) -> EngineParts:
    if share.borrows:
        assert shared is not None, "there is no pool to borrow"
        share = share.within(shared.cache.pages)
    plan = memory_plan(prepared, share, is_shared=shared is not None, ranks=ranks)
    config = prepared.config
    if config.prefix_cache and plan.states and not plan.cached_states:
        log("prefix cache: off, because no prefix state fits next to the KV pages; use a higher memory_fraction")
        prepared = prepared._replace(config=replace(config, prefix_cache=False))
    log(f"decoding: {config.speculation}")
    if shares_prefixes(prepared):
        log("shared prefixes: steps read them once for all requests that share one, where that is faster")
    elif config.prefix_cache and config.deterministic:
        log("shared prefixes: steps read them for each request, as deterministic=True fixes the order of sums")
    elif config.prefix_cache and prepared.device.type == "cuda" and (rows := fewest_rows(prepared)) > MOST_ROWS:
        log(
            f"shared prefixes: steps read them for each request, whose {rows} query rows for a KV head take about as "
            f"long to multiply as to read; steps with up to {MOST_ROWS} share"
        )
    asked = config.speculation
    if counts_root(asked.draft_steps, asked.draft_topk, asked.draft_tokens):
        log(
            f"draft_tokens={asked.draft_tokens} with draft_steps={asked.draft_steps} counts the root, as SGLang does: "
            f"{asked.draft_steps} drafted"
        )
    if asked.is_auto:
        log(announced(asked.draft_lengths))
    if asked.budgets:
        log(announced_budgets(asked.budgets))
    for line in plan.lines(1 if ranks is None else ranks.size):
        log(line)
    if ranks is not None and prepared.device.type == "cpu":
        log(f"tensor_parallel={ranks.size}: on a CPU, ranks exchange tensors through gloo, which is slow and for tests")
    with within_memory(plan, ranks, "building the engine"), on_device(prepared.device):
        progress = Stages(report)
        before = time.perf_counter()
        parts = _load(prepared, plan, shared, log, progress, ranks)
        parts.caps["load_s"] = time.perf_counter() - before
        try:
            with within_memory(plan, ranks, "warming up and recording graphs", less_for_graphs(plan, config)):
                recorded = record_graphs(parts.worker, plan, config.graphs, log, progress)
            parts.caps.update(recorded)
            if "max_running" in recorded:
                parts.scheduler.max_running = recorded["max_running"]
                parts.draft_length.buckets = batch_buckets(recorded["max_running"])
            if others is not None:
                parts.worker.lead(others)
                others.wait_until_built()
            if ranks is None or ranks.rank == 0:  # the others repeat its steps
                parts.caps.update(_time_draft_lengths(parts))
        except BaseException:
            parts.worker.close()  # else its memory is freed only when garbage is collected
            raise
        log(start_up_line(parts.caps, time.perf_counter() - start))
        return parts


def _load(
    prepared: Prepared,
    plan: MemoryPlan,
    shared: DecodeStep | None,
    log: Log,
    progress: Stages,
    ranks: Communicator | None,
) -> EngineParts:
    """Load the models and allocate the caches."""
    config, device, target, sizes, dtype, attention, draft, asked_corpus = prepared
    num_drafts = config.speculation.num_drafts
    kv_slots = draft.kv_slots_per_step(num_drafts)
    width = reserved_length(plan.max_model_len, kv_slots) + 1
    recorder = Recorder(device, may_leave_out=ranks is None) if config.graphs.any else None
    to_fp8 = config.speculation.quantizes_draft
    recorded = recorded_tokens(plan.prefill_chunk, sizes.hidden_size, sizes.ranks)
    batch = DeviceBatch(plan.max_running, width, pages_for(width, config.page_size), device)
    loader = Loader(
        dtype=dtype,
        kv_dtype=kv_dtype_of(config, dtype),
        device=device,
        max_positions=width,
        pages=plan.kv_pages,
        page_size=config.page_size,
        attention=attention,
        chunk=recorded,
        page_table=batch.page_table,
        tokens=batch.tokens,
        num_drafts=num_drafts,
        trees=config.speculation.drafts_trees,
        state_dtype=config.state_dtype,
        cached_states=plan.cached_states,
        progress=progress,
        recorder=recorder if config.graphs.prefill == "piecewise" else None,
        ranks=ranks,
        draft_to_fp8=to_fp8,
        pool=shared.cache if shared is not None and plan.borrows else None,
    )
    more = f"a smaller model or dtype, or a higher tensor_parallel ({sizes.ranks} now)"
    with within_memory(plan, ranks, "loading the weights", f"use a device with more free memory, {more}"):
        model = loader.model(target) if shared is None else shared.model.with_positions(width, sizes)
    model = model.with_aux(draft.aux)
    models, loads = (target.config, draft.config), (shared is None, draft.weights is not None)
    fp8 = quantizes_activations(config.fp8_activations, dtype, device, *models, at_load=to_fp8)
    if shared is None and (line := grouped_line(target, device, kept_groups(target, device, ranks))) is not None:
        log(line)
    for line in quantization_lines(model, draft.config, loads=loads, quantizes=fp8, draft_to_fp8=to_fp8):
        log(line)
    needs_all_hidden = draft.needs_all_hidden
    stored = None
    if loader.kv_dtype != dtype and model.kv_layers:
        stored = use_fp8_activations(fp8)(stored_cache)(target, model, ranks, log)
    model = model.with_k_offsets({} if stored is None else stored.k_offsets)
    less = f"use a lower memory_fraction ({plan.memory_fraction:g} now) or kv_pages ({plan.kv_pages})"
    with within_memory(plan, ranks, "allocating the KV cache", less):
        forward, cache = loader.target(model, needs_all_hidden=needs_all_hidden)
    if stored is not None:
        cache.set_scales(stored.k_scales, stored.v_scales)
    drafter: Drafter = draft.build(model, loader)
    corpus = None if asked_corpus is None else Corpus(asked_corpus, batch)
    if corpus is not None:
        drafter = CorpusDrafter(drafter, corpus.index)
    states = [one.states for one in loader.caches if one.states is not None]
    simulated = config.speculation.simulated
    simulate = None if simulated is None else _thresholds(simulated, device)
    idles = draft.catch_up != "none" and corpus is None
    one_for_all = ranks is not None or corpus is not None or bool(config.speculation.budgets)
    can_split = config.speculation.is_auto and not one_for_all and (idles or not draft.layers)
    step = DecodeStep(model, cache, drafter, simulate, config.speculation.verification, idles)
    token_check = None if ranks is None else TokenCheck(device)
    if token_check is not None:
        step = DigestedStep(**vars(step), history=token_check.history)
    elif (budget := _budget(config, plan.max_running, device)) is not None:
        step = BudgetedStep(**vars(step), budget=budget)
    passes: dict[str, Any] = {"page_size": config.page_size, "needs_all_hidden": needs_all_hidden, "fp8": fp8}
    sharing = None
    if shares_prefixes(prepared):
        sharing = SharedPrefixPlanner(config.page_size, bytes_per_page(prepared.model, 1, 1, cache.dtype), cache.group)
    reads = draft.catch_up == "target"
    worker = DeviceWorker(
        batch,
        PrefillStep(
            batch, model, forward, drafter, states=states, workspace=plan.workspace, reads_features=reads, **passes
        ),
        step,
        ScoreStep(batch, model, forward, workspace=plan.workspace, **passes),
        caches=loader.caches,
        forwards=loader.forwards,
        page_size=config.page_size,
        prefill_chunk=plan.prefill_chunk,
        recorded_tokens=recorded,
        draft_lengths=config.speculation.draft_lengths,
        budgets=config.speculation.budgets,
        recorder=recorder if config.graphs.decode == "whole" else None,
        fp8=fp8,
        deterministic=config.deterministic,
        may_share=sharing is not None,
        token_check=token_check,
        corpus=corpus,
        fewest=PROBED if can_split else None,
    )
    chooser = DraftLength(config.speculation.draft_lengths, batch_buckets(plan.max_running))
    if config.speculation.budgets:
        pads = config.graphs.decode == "whole"
        chooser = VerifyRows(
            num_drafts, config.speculation.budgets, chooser.buckets, pads=pads, may_idle=config.speculation.is_auto
        )
    chooser.can_split = can_split
    return EngineParts(
        config=config,
        device=device,
        tokenizer=target.tokenizer(),
        model=model,
        plan=plan,
        scheduler=_scheduler(config, plan, model.config, draft, sharing, has_states=bool(states)),
        worker=worker,
        draft_length=chooser,
        draft=draft,
        diagnose=use_fp8_activations(fp8)(drafter.diagnose),
        caps=caps_of(prepared, plan, cache, batch.tokens.numel(), fp8=fp8),
    )


def _thresholds(simulated: AcceptanceProfile, device: torch.device) -> torch.Tensor:
    if simulated.by_context:
        return thresholds_by_context(simulated.at, device)
    return acceptance_thresholds(simulated.conditional, device)


def _budget(config: EngineConfig, running: int, device: torch.device) -> VerifyBudget | None:
    asked = config.speculation
    if asked.verify_budget is None:
        return None
    by_rejection = asked.entry.samples_drafts and asked.corpus is None and not config.deterministic
    mean = None if asked.budgets else float(asked.verify_budget)
    return VerifyBudget.of(mean, running, device, mixes_seeds=by_rejection)


def _scheduler(
    config: EngineConfig,
    plan: MemoryPlan,
    target: ModelConfig,
    draft: DraftPlan,
    sharing: SharedPrefixPlanner | None,
    *,
    has_states: bool,
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
        max_running=plan.max_running,
        prefill_chunk=plan.prefill_chunk,
        kv_slots_per_step=draft.kv_slots_per_step(config.speculation.num_drafts),
        uncached_tail=draft.uncached_tail,
        window=_largest_window([target, *[draft.config] * bool(draft.kv_layers)]),
        state_cache=state_cache,
        samples_share=state_cache is not None or not has_states,
        sharing=sharing,
    )


def _largest_window(models: list[ModelConfig]) -> int | None:
    """The most keys that a query of any of the models sees; None: all."""
    windows = [model.largest_window for model in models]
    return None if None in windows else max(filter(None, windows))


def _time_draft_lengths(parts: EngineParts) -> dict[str, Any]:
    """Time decode steps of every length or budget, if one is chosen as the engine runs. Returns seconds, for the
    caps."""
    chooser, pages = parts.draft_length, parts.plan.kv_pages
    if not chooser.is_auto:
        return {}
    slots = parts.scheduler.kv_slots_per_step
    chooser.model = model = measure_step_times(
        parts.worker, chooser.buckets, chooser.draft_lengths, slots_per_step=slots, pages=pages, form=chooser.form
    )
    if parts.draft.catch_up != "none" and chooser.draft_lengths[0] == 0:
        chunk, by_target = parts.plan.prefill_chunk, parts.draft.catch_up == "target"
        chooser.catch_up_s, chooser.prompt_s = measure_catch_up(parts.worker, chunk, pages, by_target=by_target)
        chooser.idle_tokens = parts.draft.uncached_tail + 1

    def seconds(cached: int) -> dict[str, dict[str, float]]:
        return {
            str(rows): {
                f"{chooser.form(n)[1] or 1:g}" if chooser.chooses_rows else str(n): model.expected(
                    model.kind(rows, n), cached
                )
                for n in chooser.draft_lengths
            }
            for rows in chooser.buckets
        }

    base, more = seconds(0), seconds(1)
    per_token = {rows: {n: more[rows][n] - base[rows][n] for n in row} for rows, row in base.items()}
    return {
        "verify_budget_s" if chooser.chooses_rows else "draft_length_s": base,
        "cached_token_s": per_token,
        "catch_up_token_s": chooser.catch_up_s,
        "draft_prompt_token_s": chooser.prompt_s,
    }
