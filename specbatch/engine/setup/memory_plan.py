"""What the models, caches, activations and graphs of an engine take of memory: arguments of `memory.planner`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.drafters.base import DraftPlan
from specbatch.engine.setup.prepare import Prepared
from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.latent.latent_attention_configs import latent_prefix_bytes
from specbatch.kernels.attention.verify.prefix_attention_configs import prefix_bytes
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.dispatch import runs_kernels
from specbatch.memory.grammar_pool import CELLS
from specbatch.memory.kv_cache import bytes_per_page
from specbatch.memory.planner import EXCLUSIVE, MemoryPlan, MemoryShare, available_memory, plan_memory
from specbatch.memory.recurrent_state import state_bytes, state_types
from specbatch.memory.shared_prefixes import MOST_GROUPS, may_share
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import token_bytes
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.partition import rows_per_rank
from specbatch.runtime.cuda_graphs import graph_bytes, recorded_tokens
from specbatch.runtime.device import is_out_of_memory
from specbatch.runtime.loader import dequantized_bytes, kept_groups, saved_by_fp8, weight_bytes
from specbatch.runtime.prefill_forward import static_bytes


def memory_plan(
    prepared: Prepared, share: MemoryShare = EXCLUSIVE, *, is_shared: bool = False, ranks: Communicator | None = None
) -> MemoryPlan:
    """How an engine would use the memory that is free now, of each rank what the rank with the least has. Refuses what
    does not fit."""
    config, device, target, model, dtype, _, draft, corpus = prepared
    kv_dtype, shares = kv_dtype_of(config, dtype), shares_prefixes(prepared)

    def of_graphs(running: int, chunk: int) -> int:
        most = recorded_tokens(chunk, model.hidden_size, model.ranks)
        recorded = graph_bytes(
            config.graphs,
            most=running,
            chunk=most,
            layers=model.num_layers + draft.layers,
            choices=len(config.speculation.draft_lengths) + max(len(config.speculation.budgets) - 1, 0),
            may_share=shares,
        )
        if config.graphs.prefill == "piecewise":
            recorded += static_bytes(model, dtype, most, needs_all_hidden=draft.needs_all_hidden, aux=len(draft.aux))
            recorded += static_bytes(draft.config, dtype, most, needs_all_hidden=False) if draft.layers else 0
        return recorded

    pools = 2 if config.graphs.any else 1  # graphs have one of their own
    dequantized = pools * max(dequantized_bytes(part, dtype, device) for part in (model, draft.config))
    target_page = bytes_per_page(model, len(model.kv_layers), config.page_size, kv_dtype)
    return plan_memory(
        config,
        free=available_memory(device) if ranks is None else _least_memory(device, ranks),
        on_cpu=device.type == "cpu",
        model_len=prepared.max_position,
        weights=0
        if is_shared and share.index == 0
        else weight_bytes(model, dtype, device, kept_groups(target, device, ranks)),
        draft_weights=_draft_bytes(draft, dtype, device, to_fp8=config.speculation.quantizes_draft),
        page_bytes=target_page + bytes_per_page(draft.config, draft.kv_layers, config.page_size, kv_dtype),
        target_page_bytes=target_page,
        state_bytes=_state_bytes(prepared, config.speculation.num_drafts + 1),
        cached_state_bytes=_state_bytes(prepared, 0),
        vocabulary=model.vocab_size,
        rows=draft.kv_slots_per_step(config.speculation.num_drafts),
        token_bytes=_token_bytes(model, draft, dtype),
        temporary=lambda running: dequantized + (_prefix_bytes(prepared, running) if shares else 0),
        corpus_bytes=(lambda running: 0) if corpus is None else corpus.bytes,
        grammars=2 * CELLS,
        graph_bytes=of_graphs,
        is_sparse=model.chosen is not None,
        share=share,
    )


class _Place(NamedTuple):
    """A device as `runs_kernels` asks for it, which this machine need not have."""

    is_cuda: bool


def shares_prefixes(prepared: Prepared) -> bool:
    """Whether decode steps read a prefix that several requests share once. It takes the Triton kernels of verify
    attention, another order of sums than without sharing, a target of which a layer sees all keys, and steps with not
    too many query rows for a KV head."""
    config, model = prepared.config, prepared.model
    if not config.prefix_cache or config.deterministic or not runs_kernels(_Place(prepared.device.type == "cuda")):
        return False
    sees_all = bool(model.kv_layers) and model.largest_window is None
    return sees_all and may_share(fewest_rows(prepared))


def fewest_rows(prepared: Prepared) -> int:
    """Query rows of a request for a KV head, in the steps with the fewest drafts."""
    model = prepared.model
    return (min(prepared.config.speculation.draft_lengths) + 1) * model.num_heads // max(1, model.num_kv_heads)


def _prefix_bytes(prepared: Prepared, running: int) -> int:
    config, model = prepared.config, prepared.model
    rows = config.speculation.num_drafts + 1
    if model.has_latents:
        rank = model.cache_dims[1]
        return latent_prefix_bytes(running, rows, MOST_GROUPS, model.num_heads, rank, prepared.device)
    heads = model.num_heads, model.num_kv_heads, model.head_dim
    return prefix_bytes(running, rows, MOST_GROUPS, *heads, prepared.device)


def pages_of_shared_pool(prepared: Sequence[Prepared], replicas: int = 1) -> int | None:
    """How many pages a KV pool of the target can have that all these engines use, one at a time, on one copy of the
    weights. None if they cannot: their pages differ, one has a prefix cache, which would keep pages between its turns,
    or there is no room. replicas: see `MemoryShare`."""
    configs = [one.config for one in prepared]
    sizes = {(config.page_size, config.kv_pages, kv_dtype_of(config, one.dtype), config.memory_fraction)
             for config, one in zip(configs, prepared, strict=True)}  # fmt: skip
    if len(sizes) > 1 or any(config.prefix_cache for config in configs):
        return None
    try:
        plans = [memory_plan(one, MemoryShare(replicas=replicas)) for one in prepared]
    except SpecbatchError:  # it is refused when it is built
        return None
    first = plans[0]
    room = first.available - first.weights - sum(plan.fixed for plan in plans)
    most = max(plan.kv_pages for plan in plans)
    each = first.target_page_bytes + sum(plan.page_bytes - plan.target_page_bytes for plan in plans)
    pages = min(most, room // each) if each else most
    return pages if pages > 0 else None


def _draft_bytes(draft: DraftPlan, dtype: torch.dtype, device: torch.device, *, to_fp8: bool) -> int:
    """Memory that the weights of a draft take once they are loaded. to_fp8: its matrices are quantized at load, and a
    copy of the target's output matrix if it has none of its own."""
    size = weight_bytes(draft.weights, dtype, device) if draft.weights else 0
    size += sum(map(math.prod, draft.shapes_of(draft.config).values())) * dtype.itemsize
    if not to_fp8:
        return size
    if FP8Weights.runs_on(device):
        size -= saved_by_fp8(draft.config, draft.shapes, dtype)
    if any(name.endswith("lm_head.weight") for name in draft.shapes):
        return size
    head = rows_per_rank(draft.config.vocab_size, draft.config.ranks), draft.config.hidden_size
    return size + (FP8Weights().memory(head) if FP8Weights.runs_on(device) else math.prod(head) * dtype.itemsize)


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


def kv_dtype_of(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype


@contextmanager
def within_memory(plan: MemoryPlan, ranks: Communicator | None, doing: str, works: str = "") -> Iterator[None]:
    """Say what to change if memory runs out within this context; see `MemoryPlan.out_of_memory`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise plan.out_of_memory(doing if ranks is None else f"{doing} on rank {ranks.rank}", works) from error


def less_for_graphs(plan: MemoryPlan, config: EngineConfig) -> str:
    """What to change where there is no memory for graphs."""
    off = [f"graphs.{name}=off" for name, value in asdict(config.graphs).items() if value != "off"]
    return (
        f"use a lower memory_fraction ({plan.memory_fraction:g} now), max_running ({plan.max_running}) or "
        f"prefill_chunk ({plan.prefill_chunk}), or {' and '.join(off)}"
    )
