"""Checks that a draft head fits its target, before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import ALGORITHMS
from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.models.heads.dflash import ARCHITECTURE, DEEPSPEC, SECOND
from specbatch.models.heads.draft_head import EMBEDDING, HEAD, LAYER, Shapes
from specbatch.weights.draft_heads import DraftFiles

if TYPE_CHECKING:
    from specbatch.config.engine_config import Speculation
    from specbatch.weights import Checkpoint, Log

_MASK = "mask_hidden"  # a tensor of P-EAGLE heads alone


def check_algorithm(config: dict[str, Any], algorithm: str) -> None:
    """Refuse a draft whose config.json is of another algorithm. One that names none may be any of a model or a head."""
    found, names = config.get("speculators_model_type"), config.get("architectures")
    if found is None and isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        suffix = re.search("(Eagle3?)$", names[0])
        of_deepspec = "dflash" if config.get("markov_rank") == 0 else "dspark"
        kinds = {ARCHITECTURE: "dflash", SECOND: "dflash2", **dict.fromkeys(DEEPSPEC, of_deepspec)}
        found = kinds.get(names[0], suffix and suffix[1].lower())
        if found == "eagle3" and any(config.get(key) is not None for key in ("pard_token", "ptd_token_id")):
            found = "peagle"  # in vLLM's layout
    if isinstance(found, str) and found in ALGORITHMS and found != algorithm:
        raise refuse("algorithm", algorithm, f"the draft was trained for algorithm {found!r}; use that")


def expect(files: DraftFiles, algorithm: str) -> None:
    """Refuse an EAGLE-3 head with algorithm "eagle" and so on: it would run, but hardly a draft would be accepted."""
    names, mark = files.shapes, f"{LAYER}.hidden_norm"
    found = "eagle3" if f"{mark}.weight" in names else "eagle"
    if "fc.weight" not in names or (found == "eagle" and f"{LAYER}.input_layernorm.weight" in names):
        check_algorithm(files.config, algorithm)
        works = "these are not tensors of an EAGLE head: fc, and layer 0 with hidden_norm or without input_layernorm"
        raise refuse("draft", files.origin, works)
    if found == "eagle3" and (_MASK in names or algorithm == "peagle"):
        found, mark = "peagle" if _MASK in names else "eagle3", _MASK
    if found != algorithm:
        has = "no" if found == "eagle" or (found, mark) == ("eagle3", _MASK) else "a"
        works = f"{files.origin} has {has} tensor {mark}, so it is for algorithm {found!r}; use that"
        raise refuse("algorithm", algorithm, works)


def fit(
    layer: ModelConfig, target_hidden: int, files: DraftFiles, target: Checkpoint, asked: Speculation, log: Log
) -> ModelConfig:
    """Compare a head's `layer` with the target and log the result. Returns the layer as it will run."""
    beside = target.config
    for what, own, wanted in (
        ("vocabulary", layer.vocab_size, beside.vocab_size),
        ("hidden size of features", target_hidden, beside.hidden_size),
    ):
        if own != wanted:
            works = f"its {what} is {own} and that of {target.name} is {wanted}; use a head that was trained for it"
            raise refuse("draft", files.origin, works)
    rope = layer.rope
    if asked.draft_rope_theta is not None:
        rope = replace(rope, theta=asked.draft_rope_theta, source="draft_rope_theta")
    lent = [name for name, tensor in (("embedding", EMBEDDING), ("output matrix", HEAD)) if tensor not in files.shapes]
    log(
        f"draft: {files.name} ({files.origin}), {parameters(files.shapes) / 1e6:.1f} M parameters; hidden size "
        f"{layer.hidden_size}, {layer.num_heads} heads ({layer.num_kv_heads} KV) of {layer.head_dim}"
        + (f", {layer.num_layers} layers" if layer.num_layers > 1 else "")
        + (f"; the target's {' and '.join(lent)}" if lent else "")
    )
    log(f"draft: {rope}, the target's theta is {beside.rope.theta:g}; trained for {layer.max_position} positions")
    # Heads are trained on short texts and used on long ones: beyond they are less accurate, not invalid.
    return replace(layer, rope=rope, max_position=max(layer.max_position, beside.max_position))


def stated_drafts(stated: int | None, most: int, asked: Speculation, log: Log) -> int | None:
    """The number of drafts of a chain, at most `most`, that the config of a draft has (`speculative_tokens`), if none
    is asked for; else None. Which of the two counts is logged."""
    given = asked.draft_steps if asked.is_auto else asked.draft_tokens or asked.draft_steps
    if stated is None or asked.drafts_trees:
        return None
    if given is not None:
        if given != stated:
            log(f"draft: up to {given} drafts as asked, not speculative_tokens={stated} of its config")
        return None
    note = f", of which it can make {most}" if stated > most else ""
    log(f"draft: the number of drafts is speculative_tokens={stated} of its config{note}")
    return min(stated, most)


def parameters(shapes: Shapes) -> int:
    """Number of parameters, without the maps between vocabularies."""
    return sum(math.prod(shape) for shape in without_maps(shapes).values())


def without_maps(shapes: Shapes) -> Shapes:
    """`shapes` of a head's tensors, without the maps between vocabularies."""
    return {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}


def usual_head(target: ModelConfig) -> dict[str, Any]:
    """The config.json of a head with a Llama layer of the target's sizes, as most published heads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.usual_heads[0],
        "head_dim": target.usual_heads[1],
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.rms_norm_eps,
    }
