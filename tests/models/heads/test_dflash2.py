"""DFlash 2 drafts: configs, files on disk, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbatch import EngineConfig, Speculation
from specbatch.drafters import dflash2
from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dflash2 import DFlash2Config
from specbatch.models.weight_shapes import tensor_shapes, weight_shapes
from specbatch.weights import open_checkpoint

SMALL: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 48,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 2, "vocab_size": 257,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_theta": 1e6, "is_causal": False, "num_target_layers": 4,
    "dflash_config": {
        "block_size": 8, "mask_token_id": 9, "target_layer_ids": [0, 2], "conv_group_size": 16, "conv_kernel_size": 2,
        "selector_rank": 6, "selector_top_k": 5,
    },
}  # fmt: skip


def changed(**inside: Any) -> dict[str, Any]:
    return SMALL | {"dflash_config": SMALL["dflash_config"] | inside}


def test_names_and_shapes_are_those_of_published_files() -> None:
    shapes = weight_shapes(DFlash2Config.from_dict(SMALL))
    assert shapes["layers.1.attention_conv.base_kernel"] == shapes["layers.0.mlp_conv.base_kernel"] == (2, 2, 64)
    assert shapes["layers.0.mlp_conv.kernel_projection.weight"] == (2 * 2 * 4, 64)
    assert shapes["candidate_selector.predecessor_codebook"] == (257, 6)
    assert shapes["candidate_selector.successor_codebook"] == (257, 6)
    assert shapes["candidate_selector.hidden_projection.weight"] == (6, 64)
    assert len(shapes) == 2 * (11 + 4) + 3 + 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        SMALL | {"architectures": ["DFlashDraftModel"]},
        "algorithm='dflash2': .* no head of its own; use 'dfl",
    ),
    ({"speculators_model_type": "dflash2"}, "speculators_model_type='dflash2'"),
    (changed(conv_group_size=24), "conv_group_size=24: it must divide hidden_size=64"),
    (changed(conv_kernel_size=9), "conv_kernel_size=9: .* up to 8"),
    (changed(selector_rank=None), "selector_rank=None"),
    (changed(selector_top_k=65), "selector_top_k=65: .* up to 64"),
    (changed(final_logit_softcapping=20.0), "final_logit_softcapping=20.0"),
    (changed(output_multiplier=0.2), "output_multiplier=0.2"),
    (SMALL | {"markov_rank": 3}, "markov_rank=3"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        DFlash2Config.from_dict(config)


def test_dflash_refers_to_it() -> None:
    with pytest.raises(SpecbatchError, match="algorithm='dflash': the draft has a selector; use 'dflash2'"):
        DFlashConfig.from_dict(SMALL)


def test_folder_is_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    shapes = tensor_shapes(DFlash2Config.from_dict(SMALL))
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    asked = Speculation("dflash2", draft=str(tmp_path))

    def planned(found: dict[str, torch.Tensor], target: str) -> str:
        save_file(found, tmp_path / "model.safetensors")
        lines: list[str] = []
        config = EngineConfig(model=target, device="cpu", speculation=asked)
        assert dflash2.plan(open_checkpoint(target, "dummy"), config, lines.append).num_drafts == 7
        return "\n".join(lines)

    text = planned(tensors, "toy")
    assert "convolutions over 2 tokens, groups of 16 channels\n  a selector of rank 6 chooses from 5 tokens" in text
    with pytest.raises(SpecbatchError, match="not trained for qwen3-8b: hidden_size is 64"):
        planned(tensors, "qwen3-8b")
    del tensors["layers.0.mlp_conv.base_kernel"]
    with pytest.raises(SpecbatchError, match=r"tensor layers\.0\.mlp_conv\.base_kernel is missing"):
        planned(tensors, "toy")
