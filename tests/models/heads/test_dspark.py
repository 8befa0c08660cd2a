"""Published DSpark drafts: every config spelling, files on disk, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_configs import (
    COPIES,
    LAYERS_READ,
    QWEN3_8B,
    SMALL,
    check_another_target,
    check_refused,
    opened,
    planned,
    random_tensors,
)

from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.queries import Mask
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dspark import DSparkConfig, published_shape
from specbatch.models.weight_shapes import weight_shapes
from specbatch.weights import open_checkpoint

QWEN3_8B_B7: dict[str, Any] = QWEN3_8B | {  # as DeepSeek publishes it, without keys that have no meaning here
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "confidence_head_with_markov": True,
    "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 151669,
    "max_window_layers": 36, "num_anchors": 512, "target_layer_ids": LAYERS_READ,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}  # fmt: skip


def read(**changes: Any) -> DSparkConfig:
    return DSparkConfig.from_dict({**QWEN3_8B_B7, **changes})


def test_published_config() -> None:
    config = read()
    assert (config.block_size, config.most_drafts, config.mask_token, config.target_depth) == (7, 7, 151669, 36)
    assert (config.target_layers, config.masks) == ((1, 9, 17, 25, 33), (Mask(causal=False, window=None),) * 5)
    assert (config.markov_rank, config.markov_head, config.confidence_inputs) == (256, "vanilla", 4096 + 256)
    shapes = weight_shapes(config)
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert (shapes["confidence_head.proj.weight"], shapes["confidence_head.proj.bias"]) == ((1, 4352), (1,))
    assert weight_shapes(config.divided(8))["markov_head.markov_w2.weight"] == (151936 // 8, 256)
    assert "vanilla Markov head of rank 256; a confidence head" in "\n".join(config.lines())


@pytest.mark.parametrize("inside", ["dflash_config", "dspark_config"])
def test_keys_may_be_nested(inside: str) -> None:
    """As SpecForge writes them."""
    keys = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    keys += ("enable_confidence_head", "confidence_head_with_markov")
    rest = {key: value for key, value in QWEN3_8B_B7.items() if key not in keys}
    nested = {key: QWEN3_8B_B7[key] for key in keys} | {"projector_type": "dspark", "attention_mode": "gqa"}
    assert DSparkConfig.from_dict(rest | {"architectures": ["DSparkDraftModel"], inside: nested}) == read()


def speculators(**changes: Any) -> dict[str, Any]:
    """The same draft in the format of vllm-project/speculators."""
    own = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    own += ("confidence_head_with_markov",)
    left_out = (*own, "architectures", "target_layer_ids", "num_target_layers", "num_anchors", "layer_types")
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        **{key: QWEN3_8B_B7[key] for key in own},
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "draft_vocab_size": 151936,
        "sample_from_anchor": True,
        "transformer_layer_config": {key: value for key, value in QWEN3_8B_B7.items() if key not in left_out},
    } | changes


def test_speculators_format() -> None:
    found, same = (vars(config) for config in (DSparkConfig.from_dict(speculators()), read()))
    assert {key for key in same if found[key] != same[key]} == {"features", "target_depth"}
    fewer = DSparkConfig.from_dict(speculators(sample_from_anchor=False, draft_vocab_size=32000))
    assert (fewer.most_drafts, weight_shapes(fewer)["markov_head.markov_w2.weight"]) == (6, (32000, 256))
    plain = DSparkConfig.from_dict(speculators(confidence_head_bias=False, confidence_head_with_markov=False))
    shapes = weight_shapes(plain)
    assert shapes["confidence_head.proj.weight"] == (1, 4096)
    assert "confidence_head.proj.bias" not in shapes


def test_without_a_markov_head_it_is_a_dflash_draft() -> None:
    """DeepSeek publishes DFlash drafts in this format, which draft from the anchor's row, too."""
    plain = QWEN3_8B_B7 | {"markov_rank": 0, "enable_confidence_head": False}
    config = DFlashConfig.from_dict(plain)
    assert (config.most_drafts, config.from_anchor, config.is_spare("lm_head.weight")) == (7, True, True)
    assert not any(name.startswith("markov") for name in weight_shapes(config))
    assert DFlashConfig.from_dict(speculators(markov_rank=0)).most_drafts == 7
    for reader, raw, message in (
        (DSparkConfig, plain, "algorithm='dspark': the draft has no head of its own; use 'dflash'"),
        (DSparkConfig, QWEN3_8B_B7 | {"architectures": ["DFlashDraftModel"], "markov_rank": None}, "'dflash'"),
        (DFlashConfig, QWEN3_8B_B7, "algorithm='dflash': the draft has a Markov head; use 'dspark'"),
        (DFlashConfig, speculators(), "use 'dspark'"),
    ):
        with pytest.raises(SpecbatchError, match=message):
            reader.from_dict(raw)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma4DSparkModel"]}, r"architectures=\['Gemma4DSparkModel'\]: .*Qwen3DSparkModel"),
    ({"model_type": "gemma4"}, "model_type='gemma4'"),
    ({"block_size": 64}, "block_size=64: use 2 to 63"),
    ({"markov_rank": None}, "markov_rank=None"),
    ({"markov_rank": -1}, "markov_rank=-1"),
    ({"markov_head_type": "lstm"}, "markov_head_type='lstm': use vanilla, gated, rnn"),
    ({"markov_head_type": 3}, "markov_head_type=3"),
    ({"enable_confidence_head": "yes"}, "enable_confidence_head='yes'"),
    ({"target_layer_ids": [-1, 3]}, "target_layer_ids="),
    (speculators(enable_correction_head=True), "enable_correction_head=True"),
    ({"dflash_config": {"attention_mode": "mla"}}, "attention_mode='mla'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    check_refused(DSparkConfig, QWEN3_8B_B7, changes, message)


def test_dummy_has_the_published_shape() -> None:
    target = open_checkpoint("qwen3-8b", "dummy").config
    ours, theirs = vars(DSparkConfig.from_dict(published_shape(target))), vars(read())
    assert {key for key in ours if ours[key] != theirs[key]} <= {"eos_ids", "bos_id", "dtype", "rope"}


def test_plan_and_log_of_a_dummy() -> None:
    plan, text = planned("dspark", "qwen3-8b")
    assert (plan.num_drafts, plan.kv_layers, plan.needs_all_hidden, plan.aux) == (7, 5, False, (1, 9, 17, 25, 33))
    for part in ("layers 1, 9, 17, 25, 33", "block of 7", "151669", "7 drafts", "rank 256"):
        assert part in text
    with pytest.raises(SpecbatchError, match="draft_tokens=8: the draft's block size is 7; use at most 7"):
        planned("dspark", "qwen3-8b", draft_tokens=8)


def test_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    check_another_target("dspark", QWEN3_8B_B7, tmp_path)
    with pytest.raises(SpecbatchError, match="the draft has a Markov head; use 'dspark'"):
        planned("dflash", "toy", draft=str(tmp_path))


@pytest.mark.parametrize(("kind", "own"), [("vanilla", 0), ("gated", 2), ("rnn", 2)])
def test_folder_is_read_and_checked(tmp_path: Path, kind: str, own: int) -> None:
    described = QWEN3_8B_B7 | SMALL | {"mask_token_id": 9, "target_layer_ids": [0, 2], "markov_rank": 6}
    described["markov_head_type"] = kind
    tensors = random_tensors(DSparkConfig.from_dict(described))
    assert len(tensors) == 2 * 11 + 3 + 4 + own

    def read_with(found: dict[str, torch.Tensor]) -> Any:
        return opened(tmp_path, described, found, DSparkConfig)

    copies = {name: torch.randn(shape) for name, shape in COPIES.items()}
    assert sorted(read_with(tensors | copies).names()) == sorted(tensors)
    for name in ("markov_head.markov_w2.weight", "confidence_head.proj.bias"):
        with pytest.raises(SpecbatchError, match=f"tensor {name} is missing"):
            read_with({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(SpecbatchError, match=r"its config requires \[257, 6\]"):
        read_with(tensors | {"markov_head.markov_w1.weight": torch.randn(257, 7)})
