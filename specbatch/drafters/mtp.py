"""MTP (NEXTN in SGLang) drafting: the head that is stored with the target, whose one layer makes every draft.

A head of several layers has one for each draft (see `mtp_layers`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from specbatch.drafters.base import DraftPlan
from specbatch.drafters.feature_head import FeatureChain, feature_chain, head_plan
from specbatch.drafters.mtp_layers import LayerChain
from specbatch.errors import refuse
from specbatch.models.decoder import Decoder
from specbatch.models.layers.moe import Shapes
from specbatch.models.weight_shapes import parameter_count, tensor_shapes, weight_shapes
from specbatch.runtime.loader import Loader
from specbatch.weights.dummy import DummyCheckpoint
from specbatch.weights.folder import check_tensors

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.config.speculation import Speculation
    from specbatch.weights import Checkpoint, Log

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is the target's tensors `mtp.*`, or those of the layers after its last one (DeepSeek-V3). Raises
    SpecbatchError if there are none, if they are not those of layers of its family, or if there are fewer layers than
    drafts and more than one."""
    network = import_module(target.config.mtp_module)
    is_dummy, first = config.load_format == "dummy", network.first_layer(target.config)
    stored = _stored(target, config.speculation, is_dummy=is_dummy)
    asked = _drafted(config.speculation, stored, target.name)
    config = replace(config, speculation=asked)
    layers = min(stored, asked.shape.steps)
    if is_dummy:
        layer = network.mtp_config(target.config, layers=layers).stacked()
    else:
        unused = range(first + layers, first + stored)
        found = network.own_tensors(target.config, _without(target.mtp, unused))
        layer = network.mtp_config(target.config, found, layers)
        check_tensors(tensor_shapes(layer), found, f"{target.name}, its MTP head")
    mlp = f"{layer.mixture.experts} experts" if layer.mixture else "a dense MLP"
    quantized = ""
    if layer.quantization is not None and len(tensor_shapes(layer)) > len(weight_shapes(layer)):
        quantized = f", {' and '.join(form.name for form in layer.quantization.forms)}"
    several = f"{layers} of {stored} layers, one for each draft; " if stored > 1 else ""
    log(
        f"draft: the MTP head of {target.name}, {parameter_count(layer) / 1e6:.1f} M parameters{quantized}; {several}"
        f"{layer.num_heads} heads ({layer.num_kv_heads} KV) of {layer.head_dim}, {mlp}; the target's embedding and "
        f"output matrix; {layer.rope}"
    )

    def build(model: Decoder, loader: Loader) -> FeatureChain:
        read = target.tensor
        if is_dummy:  # generated on its device, as the target's
            device = str(model.device)
            read = DummyCheckpoint(layer, name="mtp", seed=config.seed + 1, tokenizer=None, device=device).tensor
        head = network.Mtp(loader.draft_reader(layer, read), model, loader.max_positions)
        kind = LayerChain if layers > 1 else None
        return feature_chain(head, loader, config, target.config.vocab_size, kind=kind)

    found_plan = head_plan(build, layer, config, weights=layer)
    if layers == 1:
        return found_plan
    # The window of a step begins earlier by a position for each layer after the first.
    tail = asked.shape.steps + layers
    return replace(found_plan, num_drafts=asked.shape.steps, scratch_slots=tail, uncached_tail=tail, embedded=layers)


def _stored(target: Checkpoint, asked: Speculation, *, is_dummy: bool) -> int:
    """The number of layers of the head."""
    stated = target.config.mtp_layers
    if stated == 0 or not (is_dummy or target.mtp):
        works = f"{target.name} has no tensors of an MTP head; use a target that has, or 'eagle3'"
        raise refuse("algorithm", asked.algorithm, works)
    if stated is not None:
        return stated
    return len({found[1] for name in target.mtp if (found := _LAYER.search(name))}) or 1


def _drafted(asked: Speculation, layers: int, name: str) -> Speculation:
    """With the number of drafts that the layers of a head of several can make."""
    steps = asked.shape.steps
    if layers == 1 or (steps <= layers and asked.shape.topk == 1):
        return asked
    has = f"the MTP head of {name} has {layers} layers, one for each draft of a chain"
    if asked.drafts_trees:
        raise refuse("draft_topk", asked.shape.topk, f"{has}; use 1")
    if asked.draft_steps is not None:
        raise refuse("draft_steps", asked.draft_steps, f"{has}; use at most {layers}")
    if isinstance(asked.draft_tokens, int):
        raise refuse("draft_tokens", asked.draft_tokens, f"{has}; use at most {layers}")
    return asked.with_num_drafts(layers)


def _without(found: Shapes, layers: range) -> Shapes:
    """The tensors that are not of these layers."""

    def is_read(name: str) -> bool:
        layer = _LAYER.search(name)
        return layer is None or int(layer[1]) not in layers

    return {name: shape for name, shape in found.items() if is_read(name)}
