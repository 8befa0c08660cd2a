"""Tables of layers with other settings in GPTQ, AWQ and auto-round: each layer computes what its weights mean, the
right entry counts, and what cannot be read is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import LLAMA, MODELS, change, check_model, load, logits, on_devices, write
from quantized_weights import Store, Stored, int4, int8

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.formats.eight_bits import Int8Weights
from specbatch.models.formats.format import Format
from specbatch.models.formats.int4 import Int4Weights
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights import open_checkpoint

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": True, "act_bits": 16,
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"


def stored(packing: str, layer: dict[str, Any]) -> Store:
    size, symmetric = layer["group_size"], layer.get("sym", False)
    if layer["bits"] == 8:
        return int8(size, symmetric=symmetric, gptq=1 if packing == "gptq" else 0)
    return int4(packing, size, symmetric=symmetric)


def by_layer(config: dict[str, Any], packing: str, settings: dict[str, dict[str, Any]]) -> Store:
    """settings: by the end of the full name of a layer, or of a module around it, those that differ."""

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        own = next((layer for part, layer in settings.items() if f"{part}." in name), {})
        return stored(packing, config | own)(name, weight)

    return store


# Rules or entries, and what they mean: by parts of names, the first that fits.
DYNAMIC: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {
            r"+:.*(q|gate)_proj": {"bits": 8, "mse": 2.4},  # a part of a matrix of several
            r".*layers\.1\.mlp": {"group_size": 64, "sym": False},
            r"+:.*v_proj": {"bits": 8, "sym": False, "group_size": 64},
            r"-:.*\.0\.self_attn\.o_proj": {},
        },
        {
            "q_proj": {"bits": 8}, "gate_proj": {"bits": 8}, "layers.1.mlp": {"group_size": 64, "sym": False},
            "v_proj": {"bits": 8, "sym": False, "group_size": 64},
        },
    ),
    "moe": (
        {r"+:.*experts\.1\.": {"bits": 8}, r".*experts.*down": {"sym": False}, "+:model.layers.1.mlp": {"bits": 8}},
        {"experts.1": {"bits": 8}, "layers.0.mlp.experts.0.down_proj": {"sym": False},
         "layers.0.mlp.experts.2.down_proj": {"sym": False}, "layers.1.mlp": {"bits": 8}},
    ),
}  # fmt: skip
EXTRA = {
    r"self_attn\.[qo]_proj": {"bits": 8, "sym": None},  # anywhere in the name
    r".*layers\.0\.self_attn.*": {"bits": 8, "group_size": 64, "sym": False},
    "model.layers.0.self_attn.o_proj": {"group_size": 64},
    UP: {"bits": 16, "data_type": "float"},
    r".*1\.mlp.gate.*": {"bits": 16},
}
MEANT = {
    "layers.0.self_attn.o_proj": {"group_size": 64}, "q_proj": {"bits": 8}, "o_proj": {"bits": 8},
    "layers.0.self_attn": {"bits": 8, "group_size": 64, "sym": False},
}  # fmt: skip
ROUNDS = [("auto_round:auto_gptq", "gptq"), ("auto_round:gptqmodel", "gptq_v2")]
CASES: dict[str, tuple[str, dict[str, Any], Store]] = {
    **{
        f"dynamic, {model}": (model, GPTQ | {"dynamic": rules}, by_layer(GPTQ, "gptq", settings))
        for model, (rules, settings) in DYNAMIC.items()
    },
    "dynamic of AWQ": (
        "llama",
        AWQ | {"dynamic": {"+:.*(mlp|q_proj)": {"group_size": 64, "sym": True}}},
        by_layer(AWQ, "awq", {"mlp": {"group_size": 64}, "q_proj": {"group_size": 64}}),
    ),
    **{
        f"extra_config, {name}": (
            "llama",
            AUTO_ROUND | {"packing_format": name, "extra_config": EXTRA},
            by_layer(AUTO_ROUND, packing, MEANT),
        )
        for name, packing in ROUNDS
    },
    "extra_config of AWQ": (
        "llama",
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {".*mlp.*": {"group_size": 64}}},
        by_layer(AUTO_ROUND, "awq", {"mlp": {"group_size": 64}}),
    ),
}


@on_devices(("case",), CASES)
def test_model_matches_dequantized_model(
    case: str, device: str, keeps: bool, bound: float, tmp_path: Path, stay_quantized: Callable[..., None]
) -> None:
    check_model(tmp_path, *CASES[case], stay_quantized, device, keeps, bound, splits=True)


def form_of(config: dict[str, Any], name: str) -> Format:
    found = ModelConfig.from_dict(LLAMA | {"quantization_config": config}).quantization
    assert found is not None
    return found.of(f"{name}.weight")


@pytest.mark.parametrize(
    ("rules", "bits"),
    [
        ({"+:.*up": {"bits": 8}, ".*mlp": {"bits": 4}}, 8),
        ({".*mlp": {"bits": 4}, "+:.*up": {"bits": 8}}, 4),
        ({"+:mlp": {"bits": 8}}, 4),  # it does not begin the name
        ({r"+:model\.layers\.0\.mlp": {"bits": 8}}, 8),
        ({r"+:^model\.layers\.0\.mlp$": {"bits": 8}}, 4),
        ({"+:.*": {}}, 4),
    ],
)
def test_the_first_rule_that_fits_counts(rules: dict[str, Any], bits: int) -> None:
    assert isinstance(form_of(GPTQ | {"dynamic": rules}, UP), Int8Weights if bits == 8 else Int4Weights)


@pytest.mark.parametrize(
    ("layers", "bits"),
    [
        ({".*mlp.*": {"bits": 8}, UP: {"bits": 4, "group_size": 64}}, 4),
        ({UP: {"bits": 8}, ".*mlp.*": {"bits": 4, "group_size": 64}}, 8),
        ({"up_(proj|p)": {"bits": 8}}, 8),  # anywhere
        ({"model.layers.0.mlp.up": {"bits": 8}}, 4),  # a name of another module
        ({r"layers\.0$": {"bits": 8}}, 4),
        ({"(mlp)": {}, "(up)": {"bits": 8}}, 8),  # nothing of an empty entry
        ({UP: {"bits": 16}}, 4),  # whose weight is quantized all the same, if it has scales
    ],
)
def test_names_of_auto_round_count_before_expressions(layers: dict[str, Any], bits: int) -> None:
    assert isinstance(form_of(AUTO_ROUND | {"extra_config": layers}, UP), Int8Weights if bits == 8 else Int4Weights)


def test_layers_that_auto_round_left_unquantized() -> None:
    """By name or regular expression."""
    layers = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*layers\.1\.(mlp|self).*": {"bits": 16},
    }
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": AUTO_ROUND | {"extra_config": layers}})
    scaled = {name.removesuffix(".scales") for name in tensor_shapes(config) if name.endswith(".scales")}
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_proj", "mlp.down_proj"]
    assert scaled == {f"model.layers.0.{part}" for part in parts}


def test_layers_that_are_quantized_contrary_to_a_pattern(tmp_path: Path) -> None:
    """auto-round 0.16.1 writes no entry for a layer with the settings of the whole config, also where a pattern of 16
    bits fits its name."""
    write(tmp_path, LLAMA, AUTO_ROUND, int4("gptq", 32, symmetric=True))
    before = open_checkpoint(str(tmp_path))
    described = LLAMA | {"quantization_config": AUTO_ROUND | {"extra_config": {".*mlp.*": {"bits": 16}}}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    after = open_checkpoint(str(tmp_path))
    assert after.names() == before.names()
    assert isinstance(after.config.quantization, Int4Weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_of_another_size_of_groups_is_refused(bits: int, tmp_path: Path) -> None:
    config = GPTQ | {"bits": bits, "dynamic": {r"+:.*up_proj": {"group_size": 64}}}
    write(tmp_path, LLAMA, config, stored("gptq", GPTQ | {"bits": bits}))
    with pytest.raises(SpecbatchError, match=r"up_proj\.scales is \[2, 128\]; its config requires \[1, 128\]"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_symmetric_weights_must_not_differ(bits: int, tmp_path: Path) -> None:
    """Files whose rules overlap and differ in `sym` only, so that another one counts than for their tool."""
    written = GPTQ | {"bits": bits, "dynamic": {".*up_proj": {"sym": False}, ".*mlp": {"sym": True}}}
    write(tmp_path, LLAMA, written, by_layer(written, "gptq", {"up_proj": {"sym": False}}))
    open_checkpoint(str(tmp_path))
    described = LLAMA | {"quantization_config": GPTQ | {"bits": bits}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(SpecbatchError, match=r"up_proj.qzeros': its zero points differ, .* \"sym\": false"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_0_borrow_from_the_next(bits: int, tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each zero point of a word at once. Outputs whose weights are above 0 have such."""
    config = GPTQ | {"bits": bits, "sym": False}

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        above = (torch.arange(len(weight)) % 3 == 0)[:, None]
        return stored("gptq", config)(name, torch.where(above, weight.abs(), weight))

    meant = write(tmp_path, LLAMA, config, store)
    checkpoint = open_checkpoint(str(tmp_path))
    found = load(checkpoint.config, checkpoint.tensor)
    expected = logits(load(ModelConfig.from_dict(LLAMA), meant.__getitem__))
    assert (logits(found) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_order_and_zero_points_of_8_bits(tmp_path: Path) -> None:
    """Zero points of symmetric weights do not count; another order of the inputs is refused."""
    config = GPTQ | {"dynamic": {r"+:.*up_proj$": {"bits": 8}}}
    meant = write(tmp_path, LLAMA, config, by_layer(GPTQ, "gptq", {"up_proj": {"bits": 8}}))
    change(tmp_path, f"{UP}.qzeros", torch.zeros(2, 32, dtype=torch.int32))
    checkpoint = open_checkpoint(str(tmp_path))
    source: Any = type("Source", (), {"whole": staticmethod(checkpoint.tensor)})
    form = form_of(config, UP)
    assert isinstance(form, Int8Weights)
    values, scales, offsets = form.read(f"{UP}.weight", source)
    assert offsets is None
    found = values.float().view(128, 2, 32) * scales[..., None]
    assert (found.view(128, 64) - meant[f"{UP}.weight"]).abs().max() < 1e-6
    change(tmp_path, f"{UP}.g_idx", torch.arange(64).int() % 2)
    with pytest.raises(SpecbatchError, match=re.escape(f"{UP}.g_idx") + ".*8-bit .* in the order of the inputs"):
        open_checkpoint(str(tmp_path))


def test_random_weights_follow_the_tables(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": CASES["dynamic, llama"][1]}))
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    shapes = {name: tuple(checkpoint.tensor(name).shape) for name in checkpoint.names()}
    assert shapes["model.layers.0.self_attn.q_proj.qweight"] == (16, 128)
    assert shapes["model.layers.0.self_attn.k_proj.qweight"] == (8, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 128)
    assert shapes["model.layers.1.mlp.up_proj.scales"] == (1, 128)


def test_random_experts_follow_the_tables(tmp_path: Path) -> None:
    """They are not stacked in one tensor, which has no packing and could not have several formats."""
    model, config, store = CASES["dynamic, moe"]
    write(tmp_path, MODELS[model], config, store)
    shapes = [
        {name: checkpoint.tensor(name).shape for name in checkpoint.names() if not name.endswith(".qzeros")}
        for checkpoint in (open_checkpoint(str(tmp_path)), open_checkpoint(str(tmp_path), "dummy"))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 3}, "config.bits=3: it must be 4 or 8"),
        (GPTQ | {"bits": 8, "group_size": 256}, "config.group_size=256: it must be 16 or 32"),
        (GPTQ | {"dynamic": {"+:.*up": {"bits": 3}}}, r"dynamic\.\+:\.\*up\.bits=3: it must be 4 or 8; else"),
        (GPTQ | {"dynamic": {".*up": {"group_size": 48}}}, r"dynamic\.\.\*up\.group_size=48: it must be 32 or 64"),
        (GPTQ | {"dynamic": {"a": {"bit": 8}}}, "dynamic.a.bit=8: use bits, group_size, sym, desc_act, pack_dtype;"),
        (GPTQ | {"dynamic": {"a": {"pack_dtype": "int8"}}}, "dynamic.a.pack_dtype='int8': it must be 'int32'"),
        (GPTQ | {"dynamic": {"a": {"sym": "no"}}}, "dynamic.a.sym='no': use true or false"),
        (GPTQ | {"dynamic": {"+:(a": {}}}, r"dynamic='re:\(a': it is no regular expression"),
        (GPTQ | {"dynamic": {"-:(a": {}}}, r"dynamic='re:\(a': it is no regular expression"),
        (GPTQ | {"dynamic": True}, "dynamic=True: the config must give a table"),
        (GPTQ | {"dynamic": [".*up"]}, r"dynamic=\['\.\*up'\]: the config must give a table"),
        (AWQ | {"dynamic": {".*up": {"bits": 8}}}, r"dynamic\.\.\*up\.bits=8: it must be 4"),
        (AUTO_ROUND | {"bits": 2}, "config.bits=2: it must be 4 or 8"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "config.data_type='mx_fp': it must be 'int'"),
        (AUTO_ROUND | {"act_bits": 8}, "config.act_bits=8: it must be 16 or 32"),
        (AUTO_ROUND | {"packing_format": "auto_round:mlx"}, "packing_format='auto_round:mlx': it must be 'auto_round"),
        (AUTO_ROUND | {"packing_format": None}, "packing_format=None: it must be 'auto_round:auto_gptq' or"),
        (AUTO_ROUND | {"rotation_config": {"a": 1}}, "config.rotation_config="),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 3}}}, "extra_config.a.bits=3: it must be 4 or 8"),
        (AUTO_ROUND | {"extra_config": {"a": {"bit": 3}}}, "extra_config.a.bit=3: use bits, group_size, sym, data_ty"),
        (AUTO_ROUND | {"extra_config": {"a": {"data_type": "mx_fp"}}}, "extra_config.a.data_type='mx_fp': it must be"),
        (AUTO_ROUND | {"extra_config": {"a": {"act_bits": 8}}}, "extra_config.a.act_bits=8: it must be 16 or 32"),
        (AUTO_ROUND | {"extra_config": {"(a": {"bits": 8}}}, r"extra_config='re:\(a': it is no regular expression"),
        (AUTO_ROUND | {"extra_config": {"(?i)A": {"bits": 8}}}, r"extra_config='re:.*\(\?i\)A\)': it is no regular"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
            "extra_config.a.bits=8: it must be 4",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        ModelConfig.from_dict(LLAMA | {"quantization_config": config})
