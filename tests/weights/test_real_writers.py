"""Checkpoints that quantization tools and trainers of drafts wrote: each computes what its tool's own dequantization
does, or is refused by name. `real_writers/make.sh` wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from uncached import logits_of

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.drafters import eagle3
from specbatch.drafters.base import DraftPlan
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.weights import open_checkpoint
from specbatch.weights.cache_scales import read_cache_scales
from specbatch.weights.checkpoint import read_config

FILES = Path(__file__).parent / "real_writers" / "files"
TOKENS = torch.arange(3, 36, 3)  # as tiny_llama.py has them
HEADS = ("specforge-eagle3", "speculators-dflash", "speculators-eagle3")
REFUSED = {  # name of the folder -> message
    "modelopt-w4a8-awq": "quant_algo='W4A8_AWQ': it must be 'FP8'",
}
FLOAT32_SCALES = ("modelopt-int4-awq", "modelopt-mixed")  # of INT4, which a GPU rounds to 16 bits
READ = sorted({path.name for path in FILES.iterdir()} - {*REFUSED, *HEADS})
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"))


@pytest.mark.parametrize(
    ("device", "keeps", "bound"),
    [
        pytest.param("cpu", False, 2e-6, id="dequantized"),
        pytest.param("cpu", True, 2e-6, id="kept"),
        pytest.param("cuda", True, 1e-3, id="kernels", marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize("name", READ)
def test_weights_are_those_of_the_tool(
    name: str, device: str, keeps: bool, bound: float, stay_quantized: Callable[..., None]
) -> None:
    if device == "cpu":
        stay_quantized(keeps)
    checkpoint = open_checkpoint(str(FILES / name))
    where = torch.device(device)
    model = Decoder(checkpoint.config, checkpoint.tensor, dtype=torch.float32, device=where, max_positions=64)
    expected = load_file(FILES / name / "reference.safetensors")["logits"].to(where)
    found = logits_of(model, TOKENS.to(where))
    bound = 1e-3 if keeps and name in FLOAT32_SCALES else bound
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("name", ["auto-round-awq", "auto-round-gptq", "auto-round-mixed"])
def test_half_of_the_symmetric_scales_of_auto_round_are_negative(name: str) -> None:
    tensors = load_file(FILES / name / "model.safetensors")
    scales = torch.cat([tensor.flatten() for part, tensor in tensors.items() if part.endswith(".scales")])
    assert 0.4 < (scales < 0).float().mean() < 0.6


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("llm-compressor-cache", [[0.00946044921875] * 2, [0.00994873046875, 0.00982666015625]], 0.00946044921875),
        ("llm-compressor-fp8-cache", [[0.00946044921875] * 2, [0.01007080078125] * 2], 0.01043701171875),
        ("modelopt-fp8-cache", [[0.01178850419819355] * 2, [0.0107421875] * 2], 0.01081194169819355),
        ("quark-fp8-cache", [[0.0093994140625] * 2, [0.01153564453125] * 2], 0.01251220703125),
    ],
)
def test_scales_of_caches(name: str, k: list[list[float]], v: float) -> None:
    """As the files have them: per KV head, and per tensor. v: of the last layer and head."""
    checkpoint = open_checkpoint(str(FILES / name))
    found = read_cache_scales(checkpoint)
    assert found is not None
    assert checkpoint.config.cache_type == "FP8"
    assert found.k.tolist() == k
    assert found.v[-1, -1].item() == v


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_is_not_read_is_refused_by_name(name: str, message: str) -> None:
    """Most of them without tensors: the config is enough."""
    folder = FILES / name

    def read() -> None:
        if (folder / "model.safetensors").is_file():
            open_checkpoint(str(folder))
        ModelConfig.from_dict(read_config(folder / "config.json"))

    with pytest.raises(SpecbatchError, match=message):
        read()


def planned(name: str, layers: int, **asked: Any) -> tuple[DraftPlan, list[str]]:
    """The plan and the log of an EAGLE-3 head, for a Llama of the sizes of tiny_llama.py."""
    described = read_config(FILES / "gptqmodel" / "config.json") | {"num_hidden_layers": layers}
    target: Any = SimpleNamespace(name="target", origin="memory", config=ModelConfig.from_dict(described))
    config = EngineConfig("target", speculation=Speculation("eagle3", draft=str(FILES / name), **asked))
    lines: list[str] = []
    return eagle3.plan(target, config, lines.append), lines


def test_eagle3_heads() -> None:
    """With embeddings of their own; speculators lists boundaries, SpecForge outputs of layers."""
    plan, lines = planned("speculators-eagle3", 2)
    assert (plan.aux, plan.num_drafts) == ((0, 1), 5)
    assert "draft: the number of drafts is speculative_tokens=5 of its config" in lines
    assert planned("speculators-eagle3", 2, draft_tokens=2)[0].num_drafts is None
    plan, lines = planned("specforge-eagle3", 8)
    assert (plan.aux, plan.num_drafts) == ((1, 3, 5), None)
    assert not [line for line in lines if "speculative_tokens" in line]
    wrong = r"eagle_config.eagle_aux_hidden_state_layer_ids=\[1, 3, 5\]: the head reads 3 .* list 0 to 3"
    with pytest.raises(SpecbatchError, match=wrong):
        planned("specforge-eagle3", 4)


def test_block_of_speculators() -> None:
    config = DFlashConfig.from_dict(read_config(FILES / "speculators-dflash" / "config.json"))
    assert (config.stated_drafts, config.most_drafts, str(config.features)) == (5, 5, "aux_hidden_state_layer_ids=[1]")
