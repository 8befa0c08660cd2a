"""EAGLE-3 drafting: a head of few layers reads three residual streams of the target and the next token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbatch.config.draft_shape import MOST
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.feature_head import ChainKind, FeatureChain, feature_chain, head_plan
from specbatch.drafters.head_checks import (
    check_tensors_of,
    layer_for_target,
    stated_drafts,
    usual_head,
    without_maps,
)
from specbatch.drafters.layer_offset import compare_layer_offsets
from specbatch.errors import of_draft, refuse
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.heads.draft_head import Shapes
from specbatch.models.heads.eagle3 import NESTED, Eagle3, Eagle3Config, default_aux
from specbatch.models.heads.feature_layers import FeatureLayers
from specbatch.models.heads.speculators import speculative_tokens
from specbatch.runtime.device import find_device
from specbatch.runtime.loader import Loader
from specbatch.weights.draft_heads import DraftFiles, dummy_config, dummy_draft, open_draft
from specbatch.weights.folder import check_tensors

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.config.speculation import Speculation
    from specbatch.weights import Checkpoint, Log

USUAL_VOCABULARY = 32000  # draft vocabulary of most published heads


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a checkpoint of SpecForge or speculators. Raises SpecbatchError if it does not fit the target."""
    return eagle3_plan(target, config, log, Kind())


class Kind(NamedTuple):
    """What heads of EAGLE-3 and those that extend it differ in.

    chain   how a head drafts, given its files: see `feature_chain`
    most    drafts that it can make
    usual   keys of the config.json of random weights, given the target's config
    masked  whether the heads have the tensor mask_hidden, which takes the place of features
    """

    chain: Callable[[DraftFiles], ChainKind | None] = lambda files: None
    most: int = MOST
    usual: Callable[[ModelConfig], dict[str, Any]] = lambda target: {}
    masked: bool = False


def eagle3_plan(target: Checkpoint, config: EngineConfig, log: Log, kind: Kind) -> DraftPlan:
    """The plan of a head of EAGLE-3, or of one that extends it."""
    asked = config.speculation
    assert asked.draft is not None
    with of_draft(asked.draft):
        if config.load_format == "dummy":
            files = _dummy(target, asked, config.seed + 1, kind, str(find_device(config.device)))
        else:
            files = open_draft(asked.draft)
            check_tensors_of(asked.algorithm, files)
        described = Eagle3Config.from_dict(files.config, files.shapes, asked.algorithm)
        chosen, stated = kind.chain(files), speculative_tokens(files.config)
    if asked.shape.topk > described.draft_vocabulary:
        works = f"the head drafts {described.draft_vocabulary} tokens; use at most that"
        raise refuse("draft_topk", asked.shape.topk, works)
    count = stated_drafts(stated, kind.most, asked, log)
    config = replace(config, speculation=asked.with_num_drafts(count))
    layer = layer_for_target(described.layer, described.target_hidden, files, target, asked, log)
    aux = _aux(described, target, asked, files, log)
    check_tensors(described.shapes(len(aux), files.shapes), files.shapes, files.origin, "draft")
    if "speculators_model_type" in files.config and files.config.get("norm_before_residual") is None:
        log("draft: its config lacks norm_before_residual: false, as speculators has it; vLLM takes it for true")
    _report_output_norm(files.config, log)
    d2t = _offsets(files, layer.vocab_size, log)

    def build(model: Decoder, loader: Loader) -> FeatureChain:
        read = loader.draft_reader(layer, files.tensor)
        head = Eagle3(read.config, described, len(aux), read, files.shapes, model, loader.max_positions, d2t)
        diagnosis = None if config.load_format == "dummy" else partial(compare_layer_offsets, model, head)
        return feature_chain(head, loader, config, target.config.vocab_size, diagnosis, chosen)

    def shapes_of(layer: ModelConfig) -> Shapes:
        return without_maps(replace(described, layer=layer).shapes(len(aux), files.shapes))

    layers = tuple(boundary - 1 for boundary in aux)  # a boundary is the input of its layer
    needs_all_hidden = target.config.ends_in(layers)
    found = head_plan(build, layer, config, shapes_of=shapes_of, needs_all_hidden=needs_all_hidden, aux=layers)
    return replace(found, num_drafts=count)


def _aux(
    described: Eagle3Config, target: Checkpoint, asked: Speculation, files: DraftFiles, log: Log
) -> tuple[int, ...]:
    """Boundary indices of the target's layers whose inputs are the features."""
    layers, found, note = target.config.depth, described.features, ""
    if asked.aux_layers is not None:
        found = FeatureLayers("aux_layers", asked.aux_layers, first=1)
    elif found is None:
        found, note = FeatureLayers("aux_layers", default_aux(layers), first=1), ", the default: its config lists none"
    elif found.key == NESTED:
        note = ", read as inputs of layers: a guess, see --aux-layers" if found.first else ", read as outputs of layers"
    columns = files.shapes["fc.weight"][-1] if "fc.weight" in files.shapes else 0
    count = columns // described.target_hidden
    if not found.within(layers) or len(found.listed) != count:
        works = f"the head reads {count} different features of {layers} layers; list {found.valid(layers)}{note}"
        raise refuse(found.key, found.listed, works)
    aux = found.boundaries
    log(f"draft: features are the inputs of layers {', '.join(map(str, aux))} of {layers} (from {found}{note})")
    return aux


def _report_output_norm(config: dict[str, Any], log: Log) -> None:
    """SpecForge up to 0.2.0 trains heads with `norm_output` to other equations than those that vLLM 0.33, SGLang 0.5.23
    and later SpecForge (sgl-project/SpecForge, pull request 879) run; its config looks like theirs."""
    value = config.get("norm_output")
    if value is None or "speculators_model_type" in config:
        return
    theirs = "as if this were false: set it to false" if value else "without a norm before the logits: train it again"
    log(
        f"draft: norm_output: {json.dumps(value)} is read as in vLLM; SpecForge up to 0.2.0 trains such a head {theirs}"
    )


def _offsets(files: DraftFiles, vocabulary: int, log: Log) -> torch.Tensor | None:
    """d2t, int64 [Vd], if the head has one."""
    if "d2t" not in files.shapes:
        return None
    d2t = files.tensor("d2t").long()
    ids = torch.arange(len(d2t)) + d2t
    if len(ids.unique()) != len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        works = f"its d2t must hold offsets to {len(ids)} different tokens of {vocabulary}"
        raise refuse("draft", files.origin, works)
    log(f"draft: it drafts {len(ids)} of the target's {vocabulary} tokens")
    return d2t


def _dummy(target: Checkpoint, asked: Speculation, seed: int, kind: Kind, device: str) -> DraftFiles:
    """Random weights: of a config.json, or of the target's sizes and the usual vocabulary."""
    assert asked.draft is not None
    layers, config = target.config.depth, dummy_config(asked.draft)
    if config is None:
        config = usual_head(target.config)
        config["draft_vocab_size"] = min(USUAL_VOCABULARY, target.config.vocab_size)
        config |= kind.usual(target.config)
        usual = default_aux(layers)
        if len(set(usual)) < 3 or not all(1 <= boundary <= layers for boundary in usual):  # too few layers for it
            config["eagle_aux_hidden_state_layer_ids"] = list(range(1, min(layers, 3) + 1))
    described = Eagle3Config.from_dict(config, None, asked.algorithm)
    count = len(described.features.listed if described.features else default_aux(layers))
    shapes = described.shapes(count, {})
    if kind.masked:
        shapes["mask_hidden"] = (1, 1, count * described.target_hidden)
    total, known = target.config.vocab_size, described.draft_vocabulary
    own = torch.arange(known)
    return dummy_draft(config, shapes, seed, device, {"d2t": own * total // known - own})
