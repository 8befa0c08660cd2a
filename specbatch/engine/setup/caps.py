"""Caps of an engine: what it can hold at most and what was chosen for it, for the record and the log."""

from __future__ import annotations

from typing import Any

from specbatch.engine.setup.memory_plan import shares_prefixes
from specbatch.engine.setup.prepare import Prepared
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.planner import MemoryPlan
from specbatch.runtime.device import type_name


def caps_of(prepared: Prepared, plan: MemoryPlan, cache: KVCache, running: int, *, fp8: bool) -> dict[str, Any]:
    """Those that are known before graphs are recorded. running: tokens that all slots have room for; fp8: whether
    activations are quantized."""
    config, asked, corpus = prepared.config, prepared.config.speculation, prepared.corpus
    caps: dict[str, Any] = {
        "device": str(prepared.device),
        "dtype": type_name(prepared.dtype),
        "kv_dtype": type_name(cache.dtype),
        "kv_scales": "none" if cache.k_scales is None else "checkpoint" if prepared.target.cache else "computed",
        "fp8_activations": "on" if fp8 else "off",
        "deterministic": "on" if config.deterministic else "off",
        "attention_backend": cache.attention.name,
        "max_running": plan.max_running,
        "max_model_len": plan.max_model_len,
        "kv_pages": plan.kv_pages,
        "page_size": config.page_size,
        "prefill_chunk": plan.prefill_chunk,
        "memory_fraction": plan.memory_fraction,
        "reasons": plan.reasons,
        "verify_rows": asked.num_drafts + 1,
        "verify_slots": prepared.draft.kv_slots_per_step(asked.num_drafts),
        "draft_shape": str(asked.shape) if asked.num_drafts else "none",
        "weights_bytes": plan.weights + plan.draft_weights,
        "kv_bytes": plan.kv,
        "state_bytes": plan.states,
        "cached_states": plan.cached_states,
        "prefix_cache": "on" if config.prefix_cache else "off",
        "shared_prefixes": "once" if shares_prefixes(prepared) else "each",
    }
    if asked.verify_budget is not None and not asked.budgets:
        caps["verify_budget"] = asked.verify_budget
    if corpus is not None:
        caps |= {"corpus_tokens": corpus.size, "corpus_bytes": corpus.bytes(running)}
    return caps


def start_up_line(caps: dict[str, Any], total: float) -> str:
    """A log line: how long an engine took to start, and its parts."""
    parts = {"load": "load_s", "compile": "compile_s", "record": "capture_s"}
    seconds = {verb: caps[name] for verb, name in parts.items() if name in caps}
    seconds["other"] = total - sum(seconds.values())
    return f"start-up: {total:.1f} s ({', '.join(f'{verb} {s:.1f} s' for verb, s in seconds.items())})"
