"""Loads models for an engine: weights, KV cache and prefill forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from specbatch.kernels.attention.prefill.prefill_backends import PrefillAttention
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.common.native import missing
from specbatch.kernels.gemm.linear import is_blocked
from specbatch.kernels.gemm.quantized.grouped import runs_on as has_grouped_gemm
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.planner import size_text
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import Format, MatrixShape, Shapes
from specbatch.models.formats.fp8 import FP8Weights
from specbatch.models.formats.grouped import GroupedSource
from specbatch.models.partition import rows_per_rank
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import parameter_count, shapes_and_matrices, tensor_shapes, weight_shapes
from specbatch.progress.bars import Stages
from specbatch.runtime.cuda_graphs import Recorder
from specbatch.runtime.prefill_forward import EagerForward, Forward, PiecewiseGraphs, PromptWork

if TYPE_CHECKING:
    from specbatch.weights import Checkpoint

C = TypeVar("C", bound=ModelConfig)


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, grouped: GroupedSource | None = None
) -> int:
    """Memory that a model's weights take once they are loaded. grouped: see `kept_groups`."""
    count, kept, shapes = parameter_count(config), kept_quantized(config, device), weight_shapes(config)
    kept |= {name: size for name, size in (grouped.bytes if grouped else {}).items() if name in shapes}
    head = kept.pop(config.names.embedding, None)  # the embedding itself is a table of the type
    size = count * dtype.itemsize + sum(size - math.prod(shapes[name]) * dtype.itemsize for name, size in kept.items())
    if not config.tie_embeddings:
        return size
    if head is not None:
        return size + head
    copied = is_blocked(dtype, device)  # the head is then a copy of the embedding
    return size + copied * rows_per_rank(config.vocab_size, config.ranks) * config.hidden_size * dtype.itemsize


def kept_groups(
    checkpoint: Checkpoint, device: torch.device, ranks: Communicator | None, *, to_fp8: bool = False
) -> GroupedSource | None:
    """What a model keeps in groups on this device. A model that is divided, or quantized at load, keeps none."""
    return checkpoint.grouped if ranks is None and not to_fp8 and has_grouped_gemm(device) else None


def grouped_line(checkpoint: Checkpoint, device: torch.device, kept: GroupedSource | None) -> str | None:
    """A log line on how such matrices were loaded on a CPU."""
    if checkpoint.grouped is None or device.type != "cpu":
        return None
    if kept is None:
        return f"quantized weights of {checkpoint.name}: dequantized" + (f", as {why}" if (why := missing()) else "")
    config = checkpoint.config
    sizes = [size for name, size in kept.bytes.items() if config.tie_embeddings or name != config.names.embedding]
    return f"quantized weights of {checkpoint.name}: {len(sizes)} matrices kept, {size_text(sum(sizes))}"


def kept_quantized(config: ModelConfig, device: torch.device) -> dict[str, int]:
    """Weights that stay quantized in memory, and their bytes including scales."""
    stored = config.format_except_ends
    if stored is None:
        return {}
    found, kinds = dict[str, int](), dict[str, str]()
    shapes, matrices = shapes_and_matrices(config)
    for name, shape in shapes.items():
        if stored.is_quantized(name, shape) and not config.may_dequantize(name, shape):
            form = stored.of(name)
            if form.keeps(name, device):
                found[name], kinds[name] = form.memory(shape), form.kind
            elif form.keeps_groups(name, device):
                found[name], kinds[name] = form.group_memory(shape) or 0, "groups"
    for names in matrices:
        if len({kinds.get(name) for name in names}) > 1:  # all of them are dequantized
            for name in names:
                found.pop(name, None)
    return found


def saved_by_fp8(config: ModelConfig, shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes by which the weights of a draft are smaller if they are quantized to FP8 at load."""
    fp8 = FP8Weights()
    matrices = [
        shape
        for name, shape in shapes.items()
        if isinstance(shape, MatrixShape) and not config.is_stored_quantized(name, shape)
    ]
    return sum(math.prod(shape) * dtype.itemsize - fp8.memory(shape) for shape in matrices)


def dequantized_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Memory of the largest weight that is dequantized for a GEMM of many rows."""
    stored, shapes = config.quantization, weight_shapes(config)
    if stored is None:
        return 0
    forms = ((name, stored.of(name)) for name in kept_quantized(config, device))
    kept = [name for name, form in forms if form.dequantizes_for_gemm and form.runs_on(device)]
    joined = 2  # weights of one matrix: gate and up
    return joined * max((math.prod(shapes[name]) for name in kept), default=0) * dtype.itemsize


def _has_quantized(config: ModelConfig) -> bool:
    """Whether the files have more tensors than the model has weights: scales."""
    return len(tensor_shapes(config)) > len(weight_shapes(config))


def quantizes_activations(
    asked: bool, dtype: torch.dtype, device: torch.device, *models: ModelConfig, at_load: bool = False
) -> bool:
    """Do these models have FP8 GEMMs, which quantize activations, if `asked`? With float32 activations there are
    none, and checkpoints with quantized weights only were not made for FP8 ones. at_load: whether one of them is
    quantized at load."""
    made = any(form.has_fp8_gemm and form.inputs for model in models for form in _kept_forms(model, device))
    return asked and dtype.itemsize == 2 and (made or (at_load and FP8Weights.runs_on(device)))


def _kept_forms(config: ModelConfig, device: torch.device) -> set[Format]:
    """The formats of the weights that stay quantized in memory."""
    stored = config.quantization
    return set() if stored is None else {stored.of(name) for name in kept_quantized(config, device)}


def quantization_lines(
    model: Decoder, draft: ModelConfig, *, loads: tuple[bool, bool], quantizes: bool, draft_to_fp8: bool = False
) -> Iterator[str]:
    """Log lines on how quantized weights were loaded and whether activations are quantized. loads: whether the engine
    loads the target, and the draft; quantizes: see `quantizes_activations`; draft_to_fp8: see `Loader`."""
    name, device = str(model.dtype).removeprefix("torch."), model.device

    def stored(form: Format | type[Format]) -> str:
        if form.runs_on(device) or (isinstance(form, Format) and form.keeps_groups("", device)):
            return f"{form.name} weights: kept"
        return f"{form.name} weights: dequantized to {name}, as this device has no {form.name} GEMM"

    if loads[0] and model.config.quantization is not None:
        line = "; ".join(dict.fromkeys(map(stored, model.config.quantization.forms)))
        if model.dequantized:
            works = "as their matrices are no whole number of scale blocks"
            if len(model.config.quantization.forms) > 1:
                works += " or have parts of several formats"
            line += f", but {len(model.dequantized)} dequantized to {name}, {works}, such as {min(model.dequantized)}"
        yield line
    if loads[1] and draft.quantization is not None and _has_quantized(draft):
        yield f"draft: {'; '.join(dict.fromkeys(map(stored, draft.quantization.forms)))}"
    for one, loaded in ((model.config, loads[0]), (draft, loads[1])):
        for form in one.quantization.forms if loaded and one.quantization is not None else ():
            if form.inputs and not form.has_fp8_gemm:
                yield f"{form.inputs} activations, for which the checkpoint was made: off, they are {name}"
            if form.irregular:
                some = f"{len(form.irregular)} dequantized to {name}, such as {min(form.irregular)}"
                yield f"{form.name} weights whose inputs are scaled or in another order: {some}"
    if draft_to_fp8:
        yield f"draft: matrices quantized at load, {stored(FP8Weights)}"
    in_files = any(form.has_fp8_gemm for one in (model.config, draft) for form in _kept_forms(one, device))
    if in_files or (draft_to_fp8 and FP8Weights.runs_on(device)):
        state = "on, quantized per token and 128 columns" if quantizes else f"off, they are {name}"
        yield f"FP8 activations: {state}"


@dataclass(frozen=True)
class Loader:
    """What the models of an engine share: type, device, number of positions, size of the KV pool.

    A model is used as "target" or as "draft". With a `recorder`, prefill passes of up to `chunk` tokens are replayed
    from piecewise graphs. `forwards` collects the forward passes by role.
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
    tokens: torch.Tensor  # of the engine's batch
    num_drafts: int  # of a verify, per request
    trees: bool  # whether drafts may be trees
    state_dtype: str  # of recurrent layers' matrix states
    cached_states: int  # places for states of prefixes
    progress: Stages
    recorder: Recorder | None = None
    ranks: Communicator | None = None  # over which the models are divided
    draft_to_fp8: bool = False  # quantize the draft at load, see `Reader`
    pool: KVCache | None = None  # the target's cache in another engine, see `KVCache`
    forwards: dict[str, PromptWork] = field(default_factory=dict)
    caches: list[KVCache] = field(default_factory=list)

    def model(self, checkpoint: Checkpoint, *, of_draft: bool = False) -> Decoder:
        self.progress.begin("loading the draft" if of_draft else "loading layers")
        return Decoder(
            self.part(checkpoint.config),
            checkpoint.tensor,
            dtype=self.dtype,
            device=self.device,
            max_positions=self.max_positions,
            of_draft=of_draft,
            ranks=self.ranks,
            to_fp8=of_draft and self.draft_to_fp8,
            grouped=kept_groups(checkpoint, self.device, self.ranks, to_fp8=of_draft and self.draft_to_fp8),
            report=self.progress,
        )

    def part(self, config: C) -> C:
        """The config of this rank's part of a model."""
        return config if self.ranks is None else config.divided(self.ranks.size)

    def draft_reader(self, config: ModelConfig, read: Callable[[str], torch.Tensor]) -> Reader:
        """Reads the tensors of a draft head that belong to this rank; `Reader.config` is that of its part."""
        return Reader(
            self.part(config),
            read,
            self.dtype,
            self.device,
            of_draft=True,
            ranks=self.ranks,
            to_fp8=self.draft_to_fp8,
        )

    def target(self, model: Decoder, *, needs_all_hidden: bool) -> tuple[Forward, KVCache]:
        """The target's prefill forward pass and its cache. needs_all_hidden: of all tokens, see `DraftPlan`."""
        return self._forward(model, "target", needs_all_hidden)

    def draft(self, model: Decoder) -> tuple[Forward, KVCache]:
        """The same for a draft model."""
        return self._forward(model, "draft", False)

    def cache(self, config: ModelConfig, layers: int, role: str, states: RecurrentStates | None = None) -> KVCache:
        """A cache that is not filled by prefill passes of its own model. layers: attention layers."""
        backend, pool = self.attention[role], self.pool if role == "target" else None
        cache = KVCache(config, layers, self.pages, self.page_size, self.kv_dtype, self.device, backend, states, pool)
        self.caches.append(cache)
        return cache

    def _states(self, model: Decoder) -> RecurrentStates | None:
        if not model.recurrent_layers:
            return None
        types = state_types(self.dtype, self.state_dtype)
        shapes, slots = model.config.state_shapes, self.page_table.shape[0]
        return RecurrentStates(
            shapes, model.recurrent_layers, slots, self.num_drafts + 1, types, self.device, self.cached_states,
            trees=self.trees,
        )  # fmt: skip

    def _forward(self, model: Decoder, role: str, needs_all_hidden: bool) -> tuple[Forward, KVCache]:
        cache = self.cache(model.config, model.kv_layers, role, self._states(model))
        forward: Forward = EagerForward(model, cache)
        if self.recorder is not None:
            forward = PiecewiseGraphs(
                model, cache, self.recorder, self.chunk, self.page_table, self.tokens,
                needs_all_hidden=needs_all_hidden,
            )  # fmt: skip
        self.forwards[role] = forward
        return forward, cache
