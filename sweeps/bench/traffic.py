"""Minimum memory traffic of a step in bytes: weights, states, and keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from specbatch.memory.recurrent_state import state_bytes, state_types
from specbatch.models.weight_shapes import weight_shapes
from specbatch.runtime.loader import kept_quantized

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine
    from specbatch.models.config import ModelConfig

_ROUTED = ".experts."  # in the names of what a router chooses from; shared ones are called otherwise


def step_bytes(engine: Engine, concurrency: int, workload: Mapping[str, Any]) -> float:
    """Bytes of a step: weights that it uses, states, and keys and values at the mean context of the run."""
    caps, model = engine.caps, engine.model_config
    dtype, rows = getattr(torch, caps["dtype"]), caps["verify_rows"]
    context: float = workload["input_len"] + workload["output_len"] / 2
    kv_token: float = caps["kv_bytes"] / (caps["kv_pages"] * caps["page_size"])
    states = 0
    if model.state_shapes:
        states = moved_states(model, rows, state_types(dtype, engine.config.state_dtype))
    weights = used_bytes(model, verify_rows(caps, concurrency), dtype, engine.device)
    return weights + concurrency * (context * kv_token + states)


def verify_rows(caps: Mapping[str, Any], concurrency: int) -> int:
    """Rows of a verify of so many requests."""
    each: float = caps.get("verify_budget", caps["verify_rows"])
    return math.ceil(round(concurrency * each, 6))


def used_bytes(model: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes of weights that a step of so many tokens reads: all except embedding tables that are not also the head (a
    row per token), and of a mixture the shared weights and the experts that are hit (`hit_experts`)."""
    share = 1.0 if model.chosen is None else hit_experts(*model.chosen, tokens) / model.chosen[0]
    kept, total = kept_quantized(model, device), 0.0
    for name, shape in weight_shapes(model).items():
        if name in model.lookups and not (name == model.names.embedding and model.tie_embeddings):
            continue
        size = kept.get(name, math.prod(shape) * dtype.itemsize)
        total += size * share if _ROUTED in name else size
    return total


def hit_experts(experts: int, top_k: int, tokens: int) -> float:
    """Experts that get a token at all, on average, if each of the tokens chooses top_k different ones at random."""
    return float(experts * (1 - (1 - top_k / experts) ** tokens))


def moved_states(model: ModelConfig, rows: int, types: dict[str, torch.dtype]) -> int:
    """Bytes that the states of one sequence take a step with a verify of `rows` rows: each is read once and written
    once, and so are the inputs of every row (`kernels.recurrent`)."""
    return 2 * state_bytes(model.state_shapes, model.recurrent_layers, rows, types)


def without_gemms(model: ModelConfig) -> str | None:
    """Why `machine.limits.gemm_seconds`, which is for dense attention layers, is not measured; None if it is."""
    if model.chosen is not None:
        return "which experts' matrices a step multiplies by depends on its tokens"
    if model.state_shapes:
        return "recurrent layers have GEMMs of other shapes"
    if model.layer_inputs or len(model.kv_layers) < model.num_layers:
        return "layers have GEMMs of several shapes"
    return "torch's linear does not multiply quantized weights" if model.quantization is not None else None
