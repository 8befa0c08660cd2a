"""Domino drafts in the layout of SpecForge: config, files on disk, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_configs import QWEN3_8B, SMALL, check_another_target, check_refused, opened, planned, random_tensors

from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.domino import DominoConfig, published_shape
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights import open_checkpoint

INSIDE: dict[str, Any] = {  # as in SpecForge's configs/qwen3-8b-domino.json
    "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "domino",
    "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True,
}  # fmt: skip
DOMINO: dict[str, Any] = QWEN3_8B | {
    "architectures": ["DominoDraftModel"], "block_size": 16, "emb_dim": 256, "dflash_config": INSIDE,
    "rope_theta": 1000000,
}  # fmt: skip


def changed(**inside: Any) -> dict[str, Any]:
    return {"dflash_config": INSIDE | inside}


@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"])
def test_published_config(architecture: str) -> None:
    config = DominoConfig.from_dict(DOMINO | {"architectures": [architecture]})
    assert (config.most_drafts, config.from_anchor, config.gru_size, config.correction_rank, config.plain) == (
        16, True, 1024, 256, 1,
    )  # fmt: skip
    shapes = weight_shapes(config)
    assert (shapes["prefix_gru.weight_ih_l0"], shapes["prefix_gru.weight_hh_l0"]) == ((3072, 4096), (3072, 1024))
    assert (shapes["embed_proj.0.weight"], shapes["embed_proj.2.weight"]) == ((256, 5120), (151936, 256))
    assert weight_shapes(config.divided(8))["embed_proj.2.weight"] == (151936 // 8, 256)
    assert "a GRU of size 1024 corrects the logits with rank 256, from the second draft on" in config.lines()[-1]
    assert DominoConfig.from_dict(DOMINO | changed(shift_label=False)).most_drafts == 15


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dflash_config": {}}, r"architectures=\['DominoDraftModel'\]"),
    (
        {"architectures": ["DFlashDraftModel"], "dflash_config": INSIDE | {"projector_type": None}},
        "algorithm='domino': the draft has no head of its own; use 'dflash'",
    ),
    (changed(shift_label=None), "shift_label=None: the config must say"),
    (changed(pure_draft_prefix_len=2), "pure_draft_prefix_len=2: .* up to 1"),
    (changed(gru_hidden_dim=None), "gru_hidden_dim=None"),
    (changed(emb_dim=0), "emb_dim=0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    check_refused(DominoConfig, DOMINO, changes, message)


def test_a_draft_with_a_gru_is_none_of_another_algorithm() -> None:
    with pytest.raises(SpecbatchError, match="algorithm='dflash': the draft has a GRU over the block; use 'domino'"):
        DFlashConfig.from_dict(DOMINO | {"architectures": ["DFlashDraftModel"]})


def test_dummy_has_the_published_shape() -> None:
    target = open_checkpoint("qwen3-8b", "dummy").config
    ours, theirs = vars(DominoConfig.from_dict(published_shape(target))), vars(DominoConfig.from_dict(DOMINO))
    assert {key for key in ours if ours[key] != theirs[key]} <= {"eos_ids", "bos_id", "dtype", "rope", "features"}


def test_plan_and_log_of_a_dummy() -> None:
    plan, text = planned("domino", "qwen3-8b")
    assert (plan.num_drafts, plan.kv_layers, plan.aux) == (16, 5, (1, 9, 17, 25, 33))
    assert "a GRU of size 1024" in text


def test_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    check_another_target("domino", DOMINO, tmp_path)


def test_folder_is_read_and_checked(tmp_path: Path) -> None:
    inside = INSIDE | {"mask_token_id": 9, "target_layer_ids": [0, 2], "gru_hidden_dim": 6, "emb_dim": 5}
    described = DOMINO | SMALL | {"dflash_config": inside}
    tensors = random_tensors(DominoConfig.from_dict(described))
    assert len(tensors) == 2 * 11 + 3 + 4
    assert sorted(opened(tmp_path, described, tensors, DominoConfig).names()) == sorted(tensors)
    left = {key: value for key, value in tensors.items() if key != "prefix_gru.weight_hh_l0"}
    with pytest.raises(SpecbatchError, match=r"tensor prefix_gru.weight_hh_l0 is missing"):
        opened(tmp_path, described, left, DominoConfig)
    with pytest.raises(SpecbatchError, match=r"its config requires \[5, 70\]"):
        opened(tmp_path, described, tensors | {"embed_proj.0.weight": torch.randn(5, 64)}, DominoConfig)
