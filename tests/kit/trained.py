"""One entry per algorithm whose heads can be trained: how tests train one, and the tensors that its file has."""

from __future__ import annotations

from typing import NamedTuple

LAYER = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER += ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
NORMED = (*LAYER, "self_attn.q_norm", "self_attn.k_norm")


def weights(stem: str, *names: str) -> set[str]:
    return {f"{stem}{name}.weight" for name in names}


LATTICE = {
    f"lilicorr.{name}.{part}"
    for name in (
        *("token_proj", "pass_hidden_proj", "context_proj", "feature_norm", "feature_mlp.up_proj"),
        *("feature_mlp.down_proj", "factor_input_proj", "out_head", "in_head", "anchor_out_head"),
        *(f"layers.{index}.{name}" for index in (0, 1) for name in ("attn.out_proj", "mlp.up_proj", "mlp.down_proj")),
    )
    for part in ("weight", "bias")
}
LATTICE |= {f"lilicorr.{name}" for name in ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias")}
LATTICE |= weights("lilicorr.", "output_norm", "anchor_norm")
for index in (0, 1):
    LATTICE |= {f"lilicorr.layers.{index}.attn.in_proj_{part}" for part in ("weight", "bias")}
    LATTICE |= weights(f"lilicorr.layers.{index}.", "attn_norm", "mlp_norm")


class Trained(NamedTuple):
    """recipe: settings of `Recipe`; tensors: names in the file; loss_falls_to: share of the loss at first that is left
    at the end, at most."""

    recipe: dict[str, int]
    tensors: set[str]
    loss_falls_to: float = 0.5


# Quick tests train these to make their files only: of each, another test has its loss by the formula and its gradients.
FILES_ONLY = ("dflash2", "domino", "lilicorr", "xpress")

TRAINED = {
    "eagle": Trained(
        {"unroll": 3, "draft_layers": 2},
        {"fc.bias"}
        | weights("", "fc", "embed_tokens")
        | weights("layers.0.", *LAYER[1:])
        | weights("layers.1.", *LAYER),
    ),
    "eagle3": Trained(
        {"unroll": 3, "vocab": 24},
        {"d2t", "t2d"} | weights("", "fc", "norm", "lm_head") | weights("midlayer.", "hidden_norm", *LAYER),
    ),
    "peagle": Trained(
        {"unroll": 3, "vocab": 24, "draft_layers": 2, "steps": 40},
        {"d2t", "t2d", "mask_hidden"}
        | weights("", "fc", "norm", "lm_head", "embed_tokens")
        | weights("layers.0.", "hidden_norm", *LAYER)
        | weights("layers.1.", *LAYER),
    ),
    "mtp": Trained(
        {"unroll": 3},
        weights("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        | weights("mtp.layers.0.", *NORMED),
    ),
    "dflash": Trained(
        {"draft_layers": 2, "block_size": 5, "steps": 40},
        weights("", "fc", "hidden_norm", "norm") | weights("layers.0.", *NORMED) | weights("layers.1.", *NORMED),
    ),
    "dflash2": Trained(
        {"draft_layers": 1, "block_size": 5, "selector_rank": 6, "steps": 40},
        weights("", "fc", "hidden_norm", "norm", "candidate_selector.hidden_projection")
        | weights("layers.0.", *NORMED, "attention_conv.kernel_projection", "mlp_conv.kernel_projection")
        | {f"layers.0.{part}_conv.base_kernel" for part in ("attention", "mlp")}
        | {f"candidate_selector.{part}_codebook" for part in ("predecessor", "successor")},
    ),
    "dspark": Trained(
        {"draft_layers": 1, "block_size": 4, "markov_rank": 8, "steps": 40},
        weights("", "fc", "hidden_norm", "norm", "embed_tokens", "lm_head", "confidence_head.proj")
        | weights("layers.0.", *NORMED)
        | weights("markov_head.", "markov_w1", "markov_w2")
        | {"confidence_head.proj.bias"},
        loss_falls_to=0.8,  # that of a confidence head cannot fall to 0
    ),
    "domino": Trained(
        {"draft_layers": 1, "block_size": 4, "gru_size": 12, "correction_rank": 8, "steps": 40},
        weights("", "fc", "hidden_norm", "norm", "embed_proj.0", "embed_proj.2")
        | weights("layers.0.", *NORMED)
        | {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"},
    ),
    "lilicorr": Trained(
        {"draft_layers": 1, "block_size": 5, "lattice_width": 16, "steps": 40},
        weights("", "fc", "hidden_norm", "norm") | weights("layers.0.", *NORMED) | LATTICE,
        loss_falls_to=0.8,  # the head learns from more rows as candidates get better
    ),
    "xpress": Trained(
        {"draft_layers": 1, "block_size": 5, "refiner_rank": 8, "steps": 40},
        {"xpress_head.mix.L"}
        | weights("", "fc", "hidden_norm", "norm")
        | weights("layers.0.", *NORMED)
        | weights("xpress_head.", "w1", "w2", "down_h", "down_g", "in_proj")
        | weights("xpress_head.mlp.", "gate_proj", "up_proj", "down_proj"),
    ),
}
