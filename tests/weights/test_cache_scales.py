"""Scales of FP8 KV caches in checkpoints: every spelling is read, and what cannot be used is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from quantized_models import E2B, LLAMA, NEXT, change, write
from quantized_weights import FORMATS
from safetensors.torch import load_file, save_file
from targets import TargetCheckpoint

from specbatch.config.engine_config import EngineConfig
from specbatch.engine.setup.prepare import choose_kv_dtype
from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.formats.cache_scales import cache_type
from specbatch.weights import Checkpoint, open_checkpoint
from specbatch.weights.cache_scales import CacheScales, read_cache_scales

SELF = "model.layers.{}.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
Tensors = dict[str, torch.Tensor]


def write_scales(folder: Path, scales: Tensors, model: dict[str, Any] = LLAMA, scheme: Any = SCHEME) -> None:
    """A checkpoint with these tensors besides its weights."""
    quantization, store = FORMATS["channel"]
    write(folder, model, quantization | {"kv_cache_scheme": scheme}, store)
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")


def scales_of(k: str, v: str, *shape: int, layers: tuple[int, ...] = (0, 1)) -> Tensors:
    """0.5, 0.75, ... in the order of layers and of keys before values."""
    names = [name.format(SELF.format(layer)) for layer in layers for name in (k, v)]
    return {name: torch.full(shape, 0.5 + 0.25 * index) for index, name in enumerate(dict.fromkeys(names))}


def read(folder: Path) -> CacheScales | None:
    return read_cache_scales(open_checkpoint(str(folder)))


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("{}.k_scale", "{}.v_scale"),
        ("{}.attn.k_scale", "{}.attn.v_scale"),
        ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
        ("{}.qkv_proj.k_scale", "{}.qkv_proj.v_scale"),
        ("{}.k_proj.output_scale", "{}.v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_per_tensor_in_every_spelling(k: str, v: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    write_scales(tmp_path, scales_of(k, v, *shape))
    found = read(tmp_path)
    assert found is not None
    assert found.k.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert found.v.tolist() == [[0.75, 0.75], [1.25, 1.25]]


def test_one_scale_for_both_gives_way_to_two(tmp_path: Path) -> None:
    write_scales(tmp_path, scales_of("{}.kv_scale", "{}.kv_scale") | {SELF.format(1) + ".v_scale": torch.tensor(3.0)})
    found = read(tmp_path)
    assert found is not None
    assert found.k.tolist() == [[0.5, 0.5], [0.75, 0.75]]
    assert found.v.tolist() == [[0.5, 0.5], [3.0, 3.0]]


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)])
def test_scales_per_head(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = {name: torch.tensor([1.0, 2.0]).view(shape) * value
              for name, value in scales_of("{}.k_scale", "{}.v_scale").items()}  # fmt: skip
    write_scales(tmp_path, values)
    found = read(tmp_path)
    assert found is not None
    assert found.k.tolist() == [[0.5, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [
        (".k_scale", torch.zeros(1), r"0\.self_attn\.k_scale.*its value is 0; scales .* positive and finite; use kv"),
        (".v_scale", torch.tensor(-2.0), r"v_scale.*its value is -2"),
        (".v_scale", torch.tensor(1e-39), r"v_scale.*its value is 1e-39"),
        (".k_scale", torch.tensor([0.5, torch.nan]), r"k_scale.*its value is nan"),
        (".k_scale", torch.tensor(torch.inf), r"k_scale.*its value is inf"),
        (".k_scale", torch.ones(3), r"k_scale.*its shape is \[3\]; it must hold one scale, or 2 for the KV heads"),
        (".k_scale", torch.ones(1, 2), r"k_scale.*its shape is \[1, 2\]"),
        (".k_scale", torch.ones(0), r"k_scale.*its shape is \[0\]"),
        (".k_scale", None, r"0\.self_attn\.v_scale.*no scale of the keys of layer 0 beside it; every layer needs both"),
        (".v_scale", None, r"no scale of the values of layer 0"),
        (".k_zero_point", torch.tensor([0.0, 3.0]), r"k_zero_point.*a zero point is 3.*it must be 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(changed: str, value: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    scales = scales_of("{}.k_scale", "{}.v_scale")
    name = SELF.format(0) + changed
    if value is None:
        del scales[name]
    else:
        scales[name] = value
    write_scales(tmp_path, scales)
    with pytest.raises(SpecbatchError, match=message):
        read(tmp_path)


def test_zero_points_of_zero_and_scales_beside_the_cache_are_not_needed(tmp_path: Path) -> None:
    others = {SELF.format(0) + end: torch.tensor(2.0) for end in (".q_scale", ".prob_scale", ".q_proj.output_scale")}
    others[SELF.format(1) + ".v_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    write_scales(tmp_path, scales_of("{}.k_scale", "{}.v_scale") | others)
    assert read(tmp_path) is not None


def test_layers_without_a_cache_of_their_own_need_no_scales(tmp_path: Path) -> None:
    """Recurrent layers have none, and layers with shared keys use those of earlier ones."""
    for name, model, layers in (("next", NEXT, (1,)), ("e2b", E2B, (0, 1, 2))):
        (tmp_path / name).mkdir()
        write_scales(tmp_path / name, scales_of("{}.k_scale", "{}.v_scale", layers=layers), model)
        found = read(tmp_path / name)
        assert found is not None
        assert len(found.k) == (1 if name == "next" else 2)


def test_latents_have_one_scale_that_of_keys() -> None:
    """As in vLLM; scales of values, which are no part of the cache, are not needed."""
    names = [SELF.format(layer) + ".k_scale" for layer in range(4)]
    files = SimpleNamespace(
        config=TargetCheckpoint("deepseek-v2").config,
        cache=dict.fromkeys([*names, SELF.format(0) + ".v_scale"], ()),
        tensor=lambda name: torch.tensor(0.25 if name.endswith("k_scale") else 9.0),
    )
    found = read_cache_scales(cast(Checkpoint, files))
    assert found is not None
    assert (found.k.tolist(), found.v.tolist()) == ([[0.25]] * 4, [[0.25]] * 4)


def test_config_of_an_fp8_cache() -> None:
    quark = {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}
    for fp8 in (
        {"kv_cache_scheme": SCHEME},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},  # ModelOpt
        {"kv_cache_scheme": "static"},
        {"kv_cache_quant_algo": "FP8"},
        {"kv_cache_quant_config": quark},
        {"export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": quark},
    ):
        assert cache_type(fp8) == "FP8"
    assert cache_type({"kv_cache_scheme": None, "kv_cache_quant_config": {}}) is None
    assert cache_type({"kv_cache_scheme": SCHEME | {"type": "int"}}) == "int 8"
    assert cache_type({"kv_cache_scheme": SCHEME | {"symmetric": False}}) == "float 8"
    assert cache_type({"kv_cache_quant_algo": "NVFP4"}) == "NVFP4"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_the_cache_alone_may_be_quantized(quantization: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": quantization})
    assert (config.quantization, config.cache_type) == (None, "FP8")


def test_auto_follows_the_checkpoint_on_a_gpu(tmp_path: Path) -> None:
    write_scales(tmp_path, scales_of("{}.k_scale", "{}.v_scale"))
    checkpoint, lines, gpu = open_checkpoint(str(tmp_path)), list[str](), torch.device("cuda")

    def chosen(kv_dtype: str, device: torch.device = gpu) -> str:
        return choose_kv_dtype(EngineConfig(model="x", kv_dtype=kv_dtype), checkpoint, device, lines.append)

    assert (chosen("auto"), chosen("fp8"), lines) == ("fp8", "fp8", [])
    change(tmp_path, SELF.format(1) + ".v_scale", torch.tensor(torch.nan))
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(SpecbatchError, match=r"v_scale.*its value is nan"):  # before anything is loaded
        chosen("auto")
    assert (chosen("model"), chosen("auto", torch.device("cpu"))) == ("model", "auto")
    assert len(lines) == 2
    assert all(re.match("KV cache: in the model's dtype; the checkpoint was made for FP8", line) for line in lines)


def test_scales_of_another_type_of_cache_are_refused(tmp_path: Path) -> None:
    write_scales(tmp_path, scales_of("{}.k_scale", "{}.v_scale"), scheme=SCHEME | {"type": "int"})
    checkpoint = open_checkpoint(str(tmp_path))
    for kv_dtype in ("auto", "model"):
        config = EngineConfig(model="x", kv_dtype=kv_dtype)
        assert choose_kv_dtype(config, checkpoint, torch.device("cuda"), print) == kv_dtype
    with pytest.raises(SpecbatchError, match=r"kv_dtype='fp8': the checkpoint's scales .* in int 8; use model"):
        choose_kv_dtype(EngineConfig(model="x", kv_dtype="fp8"), checkpoint, torch.device("cuda"), print)
