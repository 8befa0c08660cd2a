"""Published DFlash drafts: every config spelling, files on disk, and refusals."""

from __future__ import annotations

import json
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

from specbatch.drafters.base import DraftPlan
from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.queries import Mask
from specbatch.models.heads.dflash import DFlashConfig, published_layers, published_shape
from specbatch.models.weight_shapes import parameter_count, tensor_shapes
from specbatch.weights import open_checkpoint

QWEN3_8B_B16: dict[str, Any] = QWEN3_8B | {  # as z-lab publishes it
    "architectures": ["DFlashDraftModel"], "block_size": 16, "max_window_layers": 5, "rope_scaling": None,
    "rope_theta": 1000000, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": LAYERS_READ},
}  # fmt: skip
SLIDING = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}


def read(**changes: Any) -> DFlashConfig:
    return DFlashConfig.from_dict({**QWEN3_8B_B16, **changes})


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in QWEN3_8B_B16.items() if key not in keys}


def test_published_config() -> None:
    config = read()
    assert (config.block_size, config.mask_token, config.target_depth) == (16, 151669, 36)
    assert config.target_layers == (1, 9, 17, 25, 33)
    assert config.masks == (Mask(causal=False, window=None),) * 5
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope.theta) == (32, 8, 128, 1e6)
    weights = parameter_count(config) - 5 * 2 * 1024 * 4096  # keys and values are counted twice
    assert weights == pytest.approx(1.05e9, rel=0.01)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"])
@pytest.mark.parametrize("inside", [True, False])
def test_keys_may_be_top_level_or_nested(key: str, inside: bool) -> None:
    own = {"block_size": 16, **QWEN3_8B_B16["dflash_config"], "num_target_layers": 36}
    rest = without("block_size", "dflash_config", "num_target_layers")
    if not inside:
        rest[key] = own.pop(key)
    assert DFlashConfig.from_dict(rest | {"dflash_config": own}) == read()


def test_rope_in_both_spellings() -> None:
    new = {**without("rope_theta", "rope_scaling"), "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
    found = DFlashConfig.from_dict(new).rope
    assert (found.theta, found.source) == (1e7, "rope_parameters")
    assert read(rope_theta=1e7).rope.theta == 1e7
    assert DFlashConfig.from_dict(without("rope_theta")).rope.source == "class default"
    nested = {kind: {"rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}
    with pytest.raises(SpecbatchError, match="share one rope"):
        read(rope_theta=None, rope_parameters=nested)


def test_default_feature_layers() -> None:
    assert published_layers(36, 5) == [1, 9, 17, 25, 33]
    assert published_layers(64, 5) == [1, 16, 31, 46, 61]
    assert published_layers(32, 5) == [1, 8, 15, 22, 29]
    assert published_layers(36, 1) == [18]
    assert read(dflash_config={"mask_token_id": 3}).target_layers == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        (SLIDING, [Mask(True, 2048)] * 4 + [Mask(False)]),
        ({**SLIDING, "is_causal": False}, [Mask(False, 2048)] * 4 + [Mask(False)]),
        ({**SLIDING, "is_causal": True}, [Mask(True, 2048)] * 4 + [Mask(True)]),
        ({"is_causal": True}, [Mask(True)] * 5),
        ({**SLIDING, "layer_types": None, "max_window_layers": 3}, [Mask(False)] * 3 + [Mask(True, 2048)] * 2),
        ({**SLIDING, "layer_types": None, "max_window_layers": 28}, [Mask(False)] * 5),
        ({"layer_types": None, "sliding_window": 2048}, [Mask(False)] * 5),
    ],
)
def test_attention_masks_of_a_block(changes: dict[str, Any], masks: list[Mask]) -> None:
    assert read(**changes).masks == tuple(masks)
    if "is_causal" in changes:
        inside = {**QWEN3_8B_B16["dflash_config"], "is_causal": changes["is_causal"]}
        assert read(**{**changes, "is_causal": None}, dflash_config=inside).masks == tuple(masks)


def speculators(**changes: Any) -> dict[str, Any]:
    """The same draft in the format of vllm-project/speculators, which leaves its class's defaults out."""
    left_out = ("architectures", "block_size", "dflash_config", "num_target_layers", "hidden_size", "head_dim")
    inner = without(*left_out, "layer_types", "rope_theta", "rope_scaling", "rms_norm_eps", "num_attention_heads")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 16,
        "draft_vocab_size": 151936,
        "mask_token_id": 151669,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "transformer_layer_config": {**inner, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    } | changes


def test_speculators_format() -> None:
    found, same = (vars(config) for config in (DFlashConfig.from_dict(speculators()), read()))
    differ = {key for key in same if found[key] != same[key]}
    assert differ == {"features", "rope", "target_depth", "whole_file"}  # rope: where it was read
    inner = {**speculators()["transformer_layer_config"], **SLIDING}
    both = [
        DFlashConfig.from_dict(speculators(transformer_layer_config=inner, sliding_window_non_causal=free)).masks
        for free in (False, True)
    ]
    assert both == [(Mask(causal, 2048),) * 4 + (Mask(False),) for causal in (True, False)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures=.*DFlashDraftModel"),
    ({"architectures": ["DFlash2DraftModel"]}, "algorithm='dflash': the draft has a selector; use 'dflash2'"),
    ({"model_type": "llama"}, "model_type='llama'"),
    ({"block_size": None}, "block_size=None"),
    ({"block_size": 1}, "block_size=1: use 2 to 64"),
    ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id=None"),
    ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, r"each layer may occur once"),
    ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1]}}, "whole numbers from 0"),
    ({"dflash_config": {"mask_token_id": 3}, "num_target_layers": None}, "or num_target_layers"),
    ({"dflash_config": {"mask_token_id": 3, "conv_kernel_size": 3}}, "conv_kernel_size=3"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ({"input_embedding_scale": 64.0}, "input_embedding_scale=64.0"),
    ({"layer_types": ["full_attention"]}, "layer_types='1 entries'"),
    ({"layer_types": ["linear_attention"] * 5}, "layer_types='linear_attention'"),
    ({**SLIDING, "use_sliding_window": False}, "use_sliding_window=False"),
    ({**SLIDING, "sliding_window": None}, "sliding_window=None"),
    ({**SLIDING, "sliding_window": 9, "is_causal": False}, "at least block_size=16"),
    ({"is_causal": 1}, "is_causal=1"),
    (speculators(draft_vocab_size=200000), "draft_vocab_size=200000: the target's vocabulary has 151936"),
    (speculators(target_hidden_size=64), "target_hidden_size=64"),
    (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None"),
    (speculators(aux_hidden_state_layer_ids=[0, 3]), r"aux_hidden_state_layer_ids=\[0, 3\]: list .* from 1 on"),
    (speculators(aux_hidden_state_layer_ids=[3, 3]), r"aux_hidden_state_layer_ids=\[3, 3\]: each layer may occur once"),
    (speculators(sample_from_anchor=1), "sample_from_anchor=1"),
    (speculators(sample_from_anchor=True, block_size=64), "use 2 to 63"),
    ({"markov_rank": 256}, "markov_rank=256: a draft with a Markov head has architectures=.*Qwen3DSparkModel"),
    (speculators(speculators_model_type="eagle3"), "speculators_model_type='eagle3'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    check_refused(DFlashConfig, QWEN3_8B_B16, changes, message)


def test_dummy_has_the_published_shape() -> None:
    target = open_checkpoint("qwen3-8b", "dummy").config
    dummy = DFlashConfig.from_dict(published_shape(target))
    assert dummy.target_layers == read().target_layers
    ours, theirs = vars(dummy), vars(read())
    assert {key for key in ours if ours[key] != theirs[key]} <= {"eos_ids", "bos_id", "dtype", "features"}


def test_layers_that_do_not_fit_are_named_as_in_the_file() -> None:
    """With the key and the numbers of each format."""
    target = open_checkpoint("toy", "dummy").config
    boundaries = (
        "aux_hidden_state_layer_ids=[2, 10, 18, 26, 34], and of the target's 4 layers list 1 to 3 (k is the input"
    )
    assert any(line.startswith(boundaries) for line in DFlashConfig.from_dict(speculators()).differences(target))
    assert DFlashConfig.from_dict(speculators(aux_hidden_state_layer_ids=[1, 3])).features.within(3)
    assert not DFlashConfig.from_dict(speculators(aux_hidden_state_layer_ids=[1, 4])).features.within(3)
    usual = (
        "num_target_layers=36, the usual target_layer_ids=[1, 9, 17, 25, 33], and of the target's 4 layers list 0 to 2"
    )
    found = read(dflash_config={"mask_token_id": 3}).differences(target)
    assert any(line.startswith(usual) for line in found)
    with pytest.raises(SpecbatchError, match=r"num_target_layers=2, the usual target_layer_ids=\[1, .*list layers"):
        read(dflash_config={"mask_token_id": 3}, num_target_layers=2)


def test_plan_and_log_of_a_dummy() -> None:
    plan, text = planned("dflash", "qwen3-8b")
    assert (plan.num_drafts, plan.kv_layers, plan.needs_all_hidden, plan.aux) == (15, 5, False, (1, 9, 17, 25, 33))
    for part in ("layers 1, 9, 17, 25, 33", "block of 16", "151669", "theta 1e+06", "32 heads of 128, 8 for keys"):
        assert part in text
    assert planned("dflash", "qwen3-8b", draft_tokens=7)[0].num_drafts == 7
    for asked, message in (
        ({"draft_tokens": 7, "draft_steps": 7}, "draft_steps=7: a block is drafted in one pass"),
        ({"draft_tokens": 16}, "draft_tokens=16: the draft's block size is 16; use at most 15"),
    ):
        with pytest.raises(SpecbatchError, match=message):
            planned("dflash", "qwen3-8b", **asked)


@pytest.mark.parametrize(
    ("count", "asked", "drafted", "logged"),
    [
        (7, {}, 7, "speculative_tokens=7 of its config"),
        (16, {}, 15, "speculative_tokens=16 of its config, of which it can make 15"),
        (7, {"draft_tokens": 9}, 9, "up to 9 drafts as asked, not speculative_tokens=7 of its config"),
        (7, {"draft_tokens": "auto"}, 7, "speculative_tokens=7 of its config"),
        (7, {"draft_tokens": "auto", "draft_steps": 4}, 4, "up to 4 drafts as asked"),
        (7, {"draft_topk": 2}, None, "features of layers"),
        (None, {}, 15, "features of layers"),
    ],
)
def test_number_of_drafts_that_it_was_published_with(
    tmp_path: Path, count: int | None, asked: dict[str, Any], drafted: int | None, logged: str
) -> None:
    method = {"proposal_type": "greedy", "speculative_tokens": count}
    table = {"proposal_methods": [method], "default_proposal_method": "greedy"}
    (tmp_path / "config.json").write_text(json.dumps(speculators(speculators_config=table)))
    plan, text = planned("dflash", "qwen3-8b", draft=str(tmp_path / "config.json"), **asked)
    assert plan.num_drafts == drafted
    assert logged in text


def test_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    assert "hidden_size" not in check_another_target("dflash", QWEN3_8B_B16, tmp_path)
    with pytest.raises(SpecbatchError, match="architectures"):
        planned("dflash", "toy", draft="toy")


SMALL_DRAFT = QWEN3_8B_B16 | SMALL | {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 2]}}
OUTER = ("dflash_config", "num_target_layers", "layer_types")
SMALL_SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": {key: value for key, value in SMALL_DRAFT.items() if key not in OUTER},
    "block_size": 4,
    "mask_token_id": 9,
    "aux_hidden_state_layer_ids": [1, 3],
}


def test_folder_is_read_and_checked(tmp_path: Path) -> None:
    config = DFlashConfig.from_dict(SMALL_DRAFT)
    tensors = random_tensors(config)
    assert len(tensors) == 2 * 11 + 3
    assert tensors["fc.weight"].shape == (64, 128)

    def read_with(described: dict[str, Any] = SMALL_DRAFT, **shapes: tuple[int, ...]) -> Any:
        more = {name: torch.randn(shape) for name, shape in shapes.items()}
        return opened(tmp_path, described, tensors | more, DFlashConfig)

    found = read_with()
    assert found.config == config
    assert all(torch.equal(found.tensor(name), value) for name, value in tensors.items())
    with pytest.raises(SpecbatchError, match=r"describes no tensor embed_tokens\.weight"):
        read_with(**COPIES)
    copied = read_with(SMALL_SPECULATORS, **COPIES)
    assert sorted(copied.names()) == sorted(tensors)
    assert copied.config.draft_vocab is None
    with pytest.raises(SpecbatchError, match="describes no tensor mask_embedding"):
        read_with(mask_embedding=(64,))


def test_reduced_vocabulary_is_read_and_checked(tmp_path: Path) -> None:
    described = SMALL_SPECULATORS | {"draft_vocab_size": 50}
    tensors = random_tensors(DFlashConfig.from_dict(described))
    tensors |= {"t2d": torch.zeros(257, dtype=torch.bool), "embed_tokens.weight": torch.randn(257, 64)}
    ids = torch.arange(0, 250, 5)

    def planned_with(ids: torch.Tensor) -> tuple[DraftPlan, str]:
        opened(tmp_path, described, tensors | {"d2t": ids - torch.arange(50)}, DFlashConfig)
        return planned("dflash", "toy", draft=str(tmp_path), load_format="auto")

    plan, text = planned_with(ids)
    assert tensor_shapes(plan.config)["lm_head.weight"] == (50, 64)
    assert "50 of 257 tokens drafted" in text
    for wrong in (ids.clamp(min=7), ids + 200):
        with pytest.raises(SpecbatchError, match="d2t must have offsets to 50 different tokens of 257"):
            planned_with(wrong)
