"""From a checkpoint to a model that runs: its weights, its KV cache and its way through a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specbatch.kernels.attention.prefill_backends import PrefillAttention
from specbatch.kernels.gemm.linear import is_blocked
from specbatch.kernels.gemm.weight import keeps_fp8
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.fp8 import SCALES
from specbatch.runtime.cuda_graphs import Recorder
from specbatch.runtime.prefill_forward import EagerForward, Forward, PiecewiseGraphs, PromptWork

if TYPE_CHECKING:
    from specbatch.weights import Checkpoint


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Memory that a model's weights take once they are loaded."""
    count = config.parameter_count()
    if config.tie_embeddings and is_blocked(dtype, device):  # the head is then a copy of the embedding
        count += config.vocab_size * config.hidden_size
    kept, shapes = kept_float8(config, device), config.weight_shapes()
    return count * dtype.itemsize + sum(size - math.prod(shapes[name]) * dtype.itemsize for name, size in kept.items())


def kept_float8(config: ModelConfig, device: torch.device) -> dict[str, int]:
    """Weights that stay float8 in memory, and their bytes with their scales."""
    if config.float8 is None or not keeps_fp8(device):
        return {}
    shapes = config.tensor_shapes()
    return {
        name: math.prod(shape) + 4 * math.prod(shapes[name + SCALES])
        for name, shape in shapes.items()
        if name + SCALES in shapes and not config.may_dequantize(name, shape)
    }


def rounds_activations(asked: bool, dtype: torch.dtype, device: torch.device, *models: ModelConfig) -> bool:
    """Are there products of these models in float8, if that is `asked`? Of activations in float32 there are none."""
    return asked and dtype.itemsize == 2 and any(kept_float8(model, device) for model in models)


def float8_said(model: Decoder, draft: ModelConfig, *, loads: tuple[bool, bool], rounds: bool) -> Iterator[str]:
    """What became of float8 weights at load, and of the activations beside them. loads: whether an engine has loaded
    the target, and the draft; rounds: see `rounds_activations`."""
    name, device = str(model.dtype).removeprefix("torch."), model.device
    stored = "kept" if keeps_fp8(device) else f"made {name}, as this device has no product with them"
    if loads[0] and model.config.float8 is not None:
        said = f"float8 weights: {stored}"
        if model.dequantized:
            said += (
                f", but {len(model.dequantized)} that are {name} now, as the matrices that they go into cut their "
                f"blocks of scales: {min(model.dequantized)} and others alike"
            )
        yield said
    if loads[1] and len(draft.tensor_shapes()) > len(draft.weight_shapes()):  # scales
        yield f"draft: float8 weights: {stored}"
    if kept_float8(model.config, device) or kept_float8(draft, device):
        yield f"float8 activations: {'on, rounded by token and 128 columns' if rounds else f'off, they are {name}'}"


@dataclass(frozen=True)
class Loader:
    """What the models of an engine have in common: type, device, room for positions, size of the KV pool.

    A model is used as "target" or as "draft". With a `recorder` prompt passes of up to `chunk` tokens are replayed in
    pieces. `forwards` collects what was handed out.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_positions: int
    pages: int
    page_size: int
    attention: dict[str, PrefillAttention]  # by role
    chunk: int
    page_table: torch.Tensor  # of the engine's batch
    rows: int  # of a verify
    state_dtype: str  # of recurrent layers' matrix states
    cached_states: int  # places for states of prefixes
    recorder: Recorder | None = None
    forwards: dict[str, PromptWork] = field(default_factory=dict)

    def model(self, checkpoint: Checkpoint, *, of_draft: bool = False) -> Decoder:
        return Decoder(
            checkpoint.config,
            checkpoint.tensor,
            dtype=self.dtype,
            device=self.device,
            max_positions=self.max_positions,
            of_draft=of_draft,
        )

    def target(self, model: Decoder, *, needs_all_hidden: bool) -> tuple[Forward, KVCache]:
        """The target's way through a prompt, and its cache. every: the features of all tokens are wanted."""
        return self._way(model, "target", needs_all_hidden)

    def draft(self, model: Decoder) -> tuple[Forward, KVCache]:
        """The same for a model that drafts."""
        return self._way(model, "draft", False)

    def cache(self, config: ModelConfig, layers: int, role: str, states: RecurrentStates | None = None) -> KVCache:
        """A cache alone, for who fills it otherwise than by prompt passes. layers: those that attend."""
        backend = self.attention[role]
        return KVCache(config, layers, self.pages, self.page_size, self.kv_dtype, self.device, backend, states)

    def _states(self, model: Decoder) -> RecurrentStates | None:
        if not model.recurrent_layers:
            return None
        types = state_types(self.dtype, self.state_dtype)
        shapes, device_rows = model.config.state_shapes, self.page_table.shape[0]
        return RecurrentStates(
            shapes, model.recurrent_layers, device_rows, self.rows, types, self.device, self.cached_states
        )

    def _way(self, model: Decoder, role: str, needs_all_hidden: bool) -> tuple[Forward, KVCache]:
        cache = self.cache(model.config, model.attention_layers, role, self._states(model))
        forward: Forward = EagerForward(model, cache)
        if self.recorder is not None:
            forward = PiecewiseGraphs(
                model, cache, self.recorder, self.chunk, self.page_table, needs_all_hidden=needs_all_hidden
            )
        self.forwards[role] = forward
        return forward, cache
