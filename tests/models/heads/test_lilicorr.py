"""LiLiCorr drafts in the layout that SGLang and vLLM read: config, files on disk, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_configs import QWEN3_8B, SMALL, check_another_target, check_refused, opened, planned, random_tensors

from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash2 import DFlash2Config
from specbatch.models.heads.lilicorr import LiLiCorrConfig, published_shape
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights import open_checkpoint

INSIDE: dict[str, Any] = {
    "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "lilicorr",
    "lilicorr_enabled": True, "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 1024, "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 8, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 1024, "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 8.0,
}  # fmt: skip
LILICORR: dict[str, Any] = QWEN3_8B | {
    "architectures": ["LiLiCorrDraftModel"], "block_size": 16, "dflash_config": INSIDE, "rope_theta": 1000000,
}  # fmt: skip


def changed(**inside: Any) -> dict[str, Any]:
    return {"dflash_config": INSIDE | inside}


def test_config_of_the_authors_recipe() -> None:
    config = LiLiCorrConfig.from_dict(LILICORR)
    assert (config.most_drafts, config.choices, config.width, config.inner, config.conv_kernel) == (
        15,
        8,
        1024,
        2048,
        0,
    )
    shapes = weight_shapes(config)
    assert shapes["lilicorr.slot_embedding"] == (1, 1, 15, 1, 1024)
    assert shapes["lilicorr.relative_slot_bias"] == (8, 31)
    assert shapes["lilicorr.token_proj.weight"] == (1024, 4096)
    assert shapes["lilicorr.layers.1.attn.in_proj_weight"] == (3072, 1024)
    assert not any("conv" in name for name in shapes)
    assert "a head of width 1024 with 2 layers" in "\n".join(config.lines())


def test_convolutions_and_width_are_optional() -> None:
    config = LiLiCorrConfig.from_dict(
        LILICORR | changed(conv_kernel_size=2, conv_group_size=16, lilicorr_hidden_size=0)
    )
    shapes = weight_shapes(config)
    assert shapes["layers.4.mlp_conv.base_kernel"] == (2, 2, 4096)
    assert (config.width, "lilicorr.token_proj.weight" in shapes) == (4096, False)
    assert "convolutions over 2 tokens" in "\n".join(config.lines())
    assert LiLiCorrConfig.from_dict(LILICORR | changed(conv_kernel_size=0, conv_group_size=0)).conv_kernel == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "algorithm='lilicorr': the draft has a selector; use 'dflash2'"),
    (changed(conv_kernel_size=2), "conv_group_size=None"),
    (changed(conv_group_size=2), "conv_kernel_size=None"),
    (changed(lilicorr_logit_scale=None), "lilicorr_logit_scale=None"),
    (changed(lilicorr_vector_eps=0.7), "lilicorr_vector_eps=0.7"),
    (changed(lilicorr_candidate_topk=65), "lilicorr_candidate_topk=65"),
    (changed(lilicorr_num_heads=3), "lilicorr_num_heads=3: it must divide the head's width of 1024"),
    (changed(lilicorr_enabled=False), "lilicorr_enabled=False: a LiLiCorr draft has true, or leaves it out"),
    ({"has_own_lm_head": True}, "has_own_lm_head=True: a LiLiCorr draft has false, or leaves it out"),
    ({"sample_from_anchor": True}, "sample_from_anchor=True"),
    (changed(selector_rank=8), "selector_rank=8: not supported"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    check_refused(LiLiCorrConfig, LILICORR, changes, message)


def test_a_draft_with_this_head_is_none_of_another_algorithm() -> None:
    with pytest.raises(SpecbatchError, match="algorithm='dflash2': the draft has a LiLiCorr head; use 'lilicorr'"):
        DFlash2Config.from_dict(LILICORR)


def test_dummy_has_the_shape_of_the_recipe() -> None:
    target = open_checkpoint("qwen3-8b", "dummy").config
    ours, theirs = vars(LiLiCorrConfig.from_dict(published_shape(target))), vars(LiLiCorrConfig.from_dict(LILICORR))
    assert {key for key in ours if ours[key] != theirs[key]} <= {"eos_ids", "bos_id", "dtype", "rope", "features"}


def test_plan_and_log_of_a_dummy() -> None:
    plan, text = planned("lilicorr", "qwen3-8b")
    assert (plan.num_drafts, plan.kv_layers, plan.aux) == (15, 5, (1, 9, 17, 25, 33))
    assert "scores transitions between 8 tokens of each position" in text


def test_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    check_another_target("lilicorr", LILICORR, tmp_path)


def test_folder_is_read_and_checked(tmp_path: Path) -> None:
    inside = INSIDE | {"mask_token_id": 9, "target_layer_ids": [0, 2], "lilicorr_hidden_size": 16}
    described = LILICORR | SMALL | {"dflash_config": inside}
    tensors = random_tensors(LiLiCorrConfig.from_dict(described))
    assert len(tensors) == 2 * 11 + 3 + 6 + 2 + 2 * 9 + 2 * 10
    assert sorted(opened(tmp_path, described, tensors, LiLiCorrConfig).names()) == sorted(tensors)
    name = "lilicorr.layers.1.attn.in_proj_bias"
    with pytest.raises(SpecbatchError, match=f"tensor {name} is missing"):
        opened(tmp_path, described, {key: value for key, value in tensors.items() if key != name}, LiLiCorrConfig)
    broken = tensors | {"lilicorr.slot_embedding": torch.randn(1, 1, 4, 1, 16)}
    with pytest.raises(SpecbatchError, match=r"its config requires \[1, 1, 3, 1, 16\]"):
        opened(tmp_path, described, broken, LiLiCorrConfig)
