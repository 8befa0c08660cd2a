"""The files of a draft head: whether they fit algorithm and target, before anything is loaded, and what is logged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import ALGORITHMS, algorithm_of
from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.models.heads.draft_head import EMBEDDING, HEAD, LAYER, Shapes
from specbatch.weights.draft_heads import DraftFiles

if TYPE_CHECKING:
    from specbatch.config.speculation import Speculation
    from specbatch.weights import Checkpoint, Log


def check_algorithm(config: dict[str, Any], algorithm: str) -> None:
    """Refuse a draft whose config.json is of another algorithm. One that names none may be any of a model or a head."""
    found = algorithm_of(config)
    if found is not None and found != algorithm:
        raise refuse("algorithm", algorithm, f"the draft was trained for algorithm {found!r}; use that")


def check_tensors_of(algorithm: str, files: DraftFiles) -> None:
    """Refuse a head on the target's features that is for another algorithm, such as one of EAGLE-3 for EAGLE: it would
    run, but hardly a draft would be accepted."""
    names, hidden_norm = files.shapes, f"{LAYER}.hidden_norm.weight"
    if "fc.weight" not in names or (hidden_norm not in names and f"{LAYER}.input_layernorm.weight" in names):
        check_algorithm(files.config, algorithm)
        works = "these are not tensors of an EAGLE head: fc, and layer 0 with hidden_norm or without input_layernorm"
        raise refuse("draft", files.origin, works)
    marks = {name: entry.published.tensors for name, entry in ALGORITHMS.items()}
    known = {name: tensors for name, tensors in marks.items() if tensors is not None}
    found = max((name for name in known if set(known[name]) <= set(names)), key=lambda name: len(known[name]))
    if found != algorithm:
        missing = [tensor for tensor in known[algorithm] if tensor not in names]
        has, mark = ("no", missing[0]) if missing else ("a", known[found][-1])
        works = f"{files.origin} has {has} tensor {mark.removesuffix('.weight')}, so it is for algorithm {found!r}"
        raise refuse("algorithm", algorithm, f"{works}; use that")


def layer_for_target(
    layer: ModelConfig, target_hidden: int, files: DraftFiles, target: Checkpoint, asked: Speculation, log: Log
) -> ModelConfig:
    """The config of a head's layers as they run with the target: with the rope that is asked for, and at all of the
    target's positions. It is logged. Raises SpecbatchError for a head of another target's sizes."""
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
