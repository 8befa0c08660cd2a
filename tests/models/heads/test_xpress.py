"""XPress drafts in the layout of their authors and of vLLM: config, files on disk, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_configs import QWEN3_8B, SMALL, check_another_target, check_refused, opened, planned, random_tensors

from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.xpress import XPressConfig, published_shape
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights import open_checkpoint

INSIDE = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
XPRESS: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3XPressModel"], "block_size": 16, "dflash_config": INSIDE, "rope_theta": 1000000,
    "xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_block_size": 16, "xpress_num_passes": 6,
    "sample_from_anchor": False,
}  # fmt: skip


def test_config_with_and_without_the_defaults() -> None:
    config = XPressConfig.from_dict(XPRESS)
    assert (config.most_drafts, config.rank, config.inner, config.passes, config.candidates) == (15, 256, 512, 6, 0)
    keys = ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes", "sample_from_anchor")
    assert XPressConfig.from_dict({key: value for key, value in XPRESS.items() if key not in keys}) == config
    shapes = weight_shapes(config)
    assert (shapes["xpress_head.mix.L"], shapes["xpress_head.in_proj.weight"]) == ((256, 16, 16), (256, 768))
    assert weight_shapes(config.divided(8))["xpress_head.w2.weight"] == (151936 // 8, 256)
    assert "a refiner of rank 256, 6 passes, chooses from all tokens" in "\n".join(config.lines())
    assert XPressConfig.from_dict(XPRESS | {"xpress_topc": 512}).choices == 512


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlashDraftModel"]}, "algorithm='xpress': the draft has no head of its own; use 'dflash'"),
    ({"architectures": ["LiLiCorrDraftModel"]}, "algorithm='xpress': the draft has a LiLiCorr head; use 'lilicorr'"),
    ({"architectures": ["XPressDraftModel"], "speculators_model_type": "xpress"}, "speculators_model_type='xpress'"),
    ({"sample_from_anchor": True}, "sample_from_anchor=True: the row of the newest token of a block drafts nothing"),
    ({"xpress_block_size": 8}, "xpress_block_size=8: the refiner must mix the rows of a block, block_size=16"),
    ({"xpress_num_passes": 0}, "xpress_num_passes=0"),
    ({"xpress_topc": -1}, "xpress_topc=-1"),
    ({"xpress_topc": 200000}, "xpress_topc=200000: .* up to 151936"),
    ({"selector_rank": 8}, "selector_rank=8: not supported"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    check_refused(XPressConfig, XPRESS, changes, message)


def test_a_draft_with_a_refiner_is_none_of_another_algorithm() -> None:
    with pytest.raises(SpecbatchError, match="algorithm='dflash': the draft has a refiner; use 'xpress'"):
        DFlashConfig.from_dict(XPRESS)


def test_dummy_has_the_default_shape() -> None:
    target = open_checkpoint("qwen3-8b", "dummy").config
    ours, theirs = vars(XPressConfig.from_dict(published_shape(target))), vars(XPressConfig.from_dict(XPRESS))
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing <= {"eos_ids", "bos_id", "dtype", "rope", "features"}


def test_plan_and_log_of_a_dummy() -> None:
    plan, text = planned("xpress", "qwen3-8b")
    assert (plan.num_drafts, plan.kv_layers, plan.aux) == (15, 5, (1, 9, 17, 25, 33))
    assert "a refiner of rank 256" in text


def test_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    check_another_target("xpress", XPRESS, tmp_path)


def test_folder_is_read_and_checked(tmp_path: Path) -> None:
    described = XPRESS | SMALL | {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 2]}}
    described |= {"xpress_block_size": 4, "xpress_rank": 6}
    tensors = random_tensors(XPressConfig.from_dict(described))
    assert len(tensors) == 2 * 11 + 3 + 9
    assert sorted(opened(tmp_path, described, tensors, XPressConfig).names()) == sorted(tensors)
    left = {key: value for key, value in tensors.items() if key != "xpress_head.mix.L"}
    with pytest.raises(SpecbatchError, match=r"tensor xpress_head.mix.L is missing"):
        opened(tmp_path, described, left, XPressConfig)
    with pytest.raises(SpecbatchError, match=r"its config requires \[6, 4, 4\]"):
        opened(tmp_path, described, tensors | {"xpress_head.mix.L": torch.randn(6, 5, 5)}, XPressConfig)
