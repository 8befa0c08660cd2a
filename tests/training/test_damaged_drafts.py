"""Damaged draft checkpoints are refused at load, and the error names the draft and not the model."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from crossed import slow_but
from safetensors.torch import load_file, save_file

from specbatch import Engine, EngineConfig, Speculation
from specbatch.errors import SpecbatchError

WEIGHTS = {
    "eagle3": ["midlayer.hidden_norm.weight", "lm_head.weight", "fc.weight", "midlayer.mlp.up_proj.weight"],
    "dflash": ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"],
    "dspark": ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"],
    "domino": ["prefix_gru.weight_hh_l0", "embed_proj.2.weight"],
    "lilicorr": ["lilicorr.layers.1.attn.in_proj_weight", "lilicorr.rank_embedding", "lilicorr.out_head.bias"],
    "xpress": ["xpress_head.w1.weight", "xpress_head.mix.L"],
    "mtp": ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"],
    "standalone": ["model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
}


@pytest.fixture
def draft(trained, target_folder, tmp_path):
    """Copies a draft, so that a test may damage it."""

    def copy(algorithm: str) -> Path:
        source = target_folder if algorithm == "standalone" else trained[algorithm][0]
        return Path(shutil.copytree(source, tmp_path / "draft"))

    return copy


def load(algorithm: str, folder: Path, target: Path) -> None:
    model, of_its_own = (folder, None) if algorithm == "mtp" else (target, str(folder))
    speculation = Speculation(algorithm, draft=of_its_own, draft_tokens=2)
    Engine(EngineConfig(model=str(model), device="cpu", max_running=2, page_size=4, speculation=speculation)).close()


def refused(*load_it) -> str:
    with pytest.raises(SpecbatchError) as caught:
        load(*load_it)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NOT_FINITE = float("nan"), float("-inf")


@pytest.mark.parametrize(
    ("algorithm", "value"), slow_but([*zip(("eagle3", "mtp"), NOT_FINITE, strict=True)], product(WEIGHTS, NOT_FINITE))
)
def test_non_finite_weights_are_refused(draft, target_folder, algorithm, value):
    """Verification would hide bad drafts. Undamaged, all of these drafts load."""
    folder = draft(algorithm)
    load(algorithm, folder, target_folder)
    path = folder / ("model-mtp.safetensors" if algorithm == "mtp" else "model.safetensors")
    valid = load_file(path)
    for name in WEIGHTS[algorithm]:
        broken = valid[name].clone()
        broken.view(-1)[-1] = value
        save_file(valid | {name: broken}, path)
        message = refused(algorithm, folder, target_folder)
        ours = name.replace("midlayer", "layers.0")
        assert message.startswith(
            (f"draft='{ours}': ", f"draft='{ours.removeprefix('model.')}': ", f"draft='model.{ours}")
        )
        assert "not finite" in message


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "standalone"])
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", ""),
        ("config.json", "[]", ""),
        ("config.json", '{"hidden_size": "large"}', "': hidden_size='large': "),
        ("config.json", None, ""),
        ("model.safetensors", "no tensors", ""),
    ],
)
def test_damaged_draft_files_are_attributed_to_the_draft(draft, target_folder, algorithm, file, content, message):
    folder = draft(algorithm)
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(content)) if message else content)
    assert refused(algorithm, folder, target_folder).startswith(f"draft='{folder}{message}")


def test_damaged_target_files_are_attributed_to_the_model(draft, target_folder):
    folder = draft("standalone")
    (folder / "config.json").write_text("{")
    speculation = Speculation("standalone", draft=str(target_folder))
    with pytest.raises(SpecbatchError, match=f"^model='{folder}"):
        Engine(EngineConfig(model=str(folder), device="cpu", speculation=speculation))


def test_fp8_weights_are_checked():
    from specbatch.models.config import ModelConfig
    from specbatch.models.weight_reader import Reader
    from specbatch.weights.dummy import SHAPES

    quantized = {"quantization_config": SHAPES["qwen3-8b-fp8"]["quantization_config"]}
    config = ModelConfig.from_dict(SHAPES["toy"] | quantized)
    tensors = {"w": torch.ones(128, 128).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}

    def read(of_draft: bool) -> None:
        reader = Reader(config, tensors.__getitem__, torch.float32, torch.device("cpu"), of_draft=of_draft)
        reader.weight({"w": 128}, 128)

    read(True)
    for name in tensors:
        kept, tensors[name] = tensors[name], tensors[name].float().mul(float("nan")).to(tensors[name].dtype)
        for of_draft, whose in ((False, "model"), (True, "draft")):  # GEMMs would read the values as finite numbers
            with pytest.raises(SpecbatchError, match=f"{whose}='{name}'.*not finite"):
                read(of_draft)
        tensors[name] = kept
