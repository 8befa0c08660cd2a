"""Configs of published block drafts (DFlash, DSpark) for Qwen3-8B, and what holds for all of them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbatch import EngineConfig, Speculation
from specbatch.algorithms import ALGORITHMS
from specbatch.drafters.base import DraftPlan
from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights import open_checkpoint

LAYERS_READ = [1, 9, 17, 25, 33]
# The keys that z-lab and DeepSeek publish alike.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "num_attention_heads": 32,
    "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SMALL: dict[str, Any] = {  # for a target of 4 layers with 257 tokens
    "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
    "num_hidden_layers": 2, "layer_types": None, "num_target_layers": 4, "vocab_size": 257, "block_size": 4,
}  # fmt: skip
COPIES = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (257, 64))  # of the target's, of small ones


def planned(algorithm: str, target: str, load_format: str = "dummy", **speculation: Any) -> tuple[DraftPlan, str]:
    """The plan and the log of a draft, by default of random weights."""
    lines: list[str] = []
    asked = Speculation(**{"algorithm": algorithm, "draft": "dummy"} | speculation)
    config = EngineConfig(model=target, load_format=load_format, device="cpu", speculation=asked)
    plan = import_module(ALGORITHMS[algorithm].module).plan(open_checkpoint(target, "dummy"), config, lines.append)
    return plan, "\n".join(lines)


def check_refused(config: type[DFlashConfig], published: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """changes: of the published config, or a whole config of vllm-project/speculators."""
    with pytest.raises(SpecbatchError, match=message):
        config.from_dict(changes if "speculators_model_type" in changes else {**published, **changes})


def check_another_target(algorithm: str, published: dict[str, Any], folder: Path) -> str:
    """A published draft with another hidden size and depth does not fit a toy. Returns the message."""
    (folder / "config.json").write_text(json.dumps({**published, "hidden_size": 64, "num_target_layers": 3}))
    with pytest.raises(SpecbatchError) as caught:
        planned(algorithm, "toy", draft=str(folder))
    for part in (
        "not trained for toy",
        "vocab_size is 151936 and the target has 257",
        "num_target_layers is 3 and the target has 4",
        "target_layer_ids=[1, 9, 17, 25, 33], and of the target's 4 layers list 0 to 2 (k is the output of layer k, ",
        "mask_token_id is 151669, outside the target's vocabulary of 257",
    ):
        assert part in str(caught.value)
    return str(caught.value)


def random_tensors(config: DFlashConfig) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}


def opened(
    folder: Path, described: dict[str, Any], tensors: dict[str, torch.Tensor], config: type[DFlashConfig]
) -> Any:
    """The checkpoint of a folder with this config and these tensors."""
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(str(folder), read=config.from_dict)
