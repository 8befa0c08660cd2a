"""Draft-head compatibility checks: mismatches are refused before loading, and the log describes a head that fits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.drafters import eagle, eagle3, mtp
from specbatch.models.config import ModelConfig
from specbatch.weights import open_checkpoint
from specbatch.weights.draft_heads import open_draft
from specbatch.weights.dummy import SHAPES

PLANS = {"eagle": eagle.plan, "eagle3": eagle3.plan, "mtp": mtp.plan}
Plan = Callable[..., list[str]]


@pytest.fixture
def plan(kit: Any) -> Plan:
    """Plans a drafter for a target of 8 layers; returns the log."""

    def run(algorithm: str, draft: str | None = None, stub: Any = None, **asked: Any) -> list[str]:
        lines: list[str] = []
        config = EngineConfig(model="target", speculation=Speculation(algorithm, draft=draft, **asked))
        PLANS[algorithm](stub or kit.TargetStub(8), config, lines.append)
        return lines

    return run


def refusal(plan: Plan, *rest: Any, **asked: Any) -> str:
    with pytest.raises(SpecbatchError) as caught:
        plan(*rest, **asked)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_head_of_another_algorithm_is_refused(kit: Any, write: Any, plan: Plan) -> None:
    folder = write(kit.llama(draft_vocab_size=9), kit.eagle3(), "midlayer")
    message = refusal(plan, "eagle", folder)
    assert "algorithm='eagle'" in message
    assert "has a tensor layers.0.hidden_norm, so it is for algorithm 'eagle3'" in message
    folder = write(kit.llama(), kit.eagle())
    message = refusal(plan, "eagle3", folder)
    assert "algorithm='eagle3'" in message
    assert "has no tensor layers.0.hidden_norm, so it is for algorithm 'eagle'" in message


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", [True, False])
def test_checkpoints_that_are_not_heads_are_refused(
    kit: Any, write: Any, plan: Plan, algorithm: str, model: bool
) -> None:
    """A complete model, and a draft that has fc but plain layers."""
    tensors = kit.eagle() | {"layer.input_layernorm.weight": torch.ones(kit.HIDDEN)}
    if model:
        del tensors["fc.weight"]
    message = refusal(plan, algorithm, write(kit.llama(), tensors))
    assert "these are not tensors of an EAGLE head" in message


OF_CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"vocab_size": 14}, "vocabulary is 14 and that of target is 13", "layers.0"),
    ({"target_hidden_size": 36}, "features is 36", "layers.0"),
    ({"num_hidden_layers": 2}, "num_hidden_layers=2", "layers.0"),
    ({"draft_vocab_size": 10}, "lm_head.weight is [9, 24]; its config requires [10, 24]", "midlayer"),
    ({"draft_vocab_size": None}, "lm_head.weight is [9, 24]; its config requires [13, 24]", "midlayer"),
    ({"norm_before_fc": True}, "input_norm.weight is missing", "layers.0"),
    ({"fc_norm": True}, "fc_norm.0.weight is missing", "layers.0"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc is true, too", "layers.0"),
    ({"norm_output": "no"}, "norm_output='no': use true or false", "layers.0"),
    ({"draft_vocab_size": "9"}, "draft_vocab_size='9'", "layers.0"),
    ({"target_hidden_size": 0}, "target_hidden_size=0", "layers.0"),
    ({"norm_after_fc": True}, "norm_after_fc=True", "layers.0"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm=True", "layers.0"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False", "layers.0"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "the head reads 3 different features", "layers.0"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "boundaries from 1 to 8", "layers.0"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}, "boundaries from 1 to 8", "layers.0"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 2, 8]}, "3 different features", "layers.0"),
    ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "must list whole numbers from 0", "layers.0"),
    ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'", "layers.0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config", "layers.0"),
    ({"architectures": ["DeepseekV3ForCausalLMEagle3"]}, "architectures", "layers.0"),
]


@pytest.mark.parametrize(("changes", "message", "stem"), OF_CONFIGS, ids=[row[1] for row in OF_CONFIGS])
def test_mismatched_eagle3_configs_are_refused(
    kit: Any, write: Any, plan: Plan, changes: dict[str, Any], message: str, stem: str
) -> None:
    config = kit.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=9) | changes
    folder = write(config, kit.eagle3(), stem)
    found = refusal(plan, "eagle3", folder)
    assert message in found
    assert found.startswith((f"draft='{folder}': ", "aux_layers="))


@pytest.mark.parametrize("asked", [(2, 4), (2, 2, 4), (2, 4, 9)])
def test_requested_layers_must_exist(kit: Any, write: Any, plan: Plan, asked: tuple[int, ...]) -> None:
    message = refusal(plan, "eagle3", write(kit.llama(draft_vocab_size=9), kit.eagle3()), aux_layers=asked)
    assert message.startswith(f"aux_layers={asked}: from aux_layers: the head reads 3 different features")


def test_too_few_layers_for_the_default_are_refused(kit: Any, write: Any, plan: Plan) -> None:
    folder = write(kit.llama(draft_vocab_size=9), kit.eagle3())
    assert "aux_layers=(2, 2, 1)" in refusal(plan, "eagle3", folder, kit.TargetStub(4))


@pytest.mark.parametrize("wrong", ["above", "below", "twice"])
def test_vocabulary_map_must_hold_distinct_target_tokens(kit: Any, write: Any, plan: Plan, wrong: str) -> None:
    tensors = kit.eagle3()
    tensors["d2t"][8 if wrong == "above" else 0] = {"above": 5, "below": -1, "twice": kit.ids(tensors)[1]}[wrong]
    message = refusal(plan, "eagle3", write(kit.llama(draft_vocab_size=9), tensors))
    assert "offsets to 9 different tokens of 13" in message


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
@pytest.mark.parametrize("wrong", ["more", "less", "shape"])
def test_tensors_must_match_the_config(kit: Any, write: Any, plan: Plan, algorithm: str, wrong: str) -> None:
    folder = write(kit.llama(draft_vocab_size=9), getattr(kit, algorithm)())
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    if wrong == "more":
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif wrong == "less":
        del tensors["layers.0.mlp.up_proj.weight"]
    else:
        tensors["layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
    message = refusal(plan, algorithm, folder)
    assert f"draft='{folder}'" in message
    assert f"layers.{int(wrong == 'more')}.mlp.up_proj.weight" in message


def test_mismatched_eagle_heads_are_refused(kit: Any, write: Any, plan: Plan) -> None:
    assert "vocabulary is 14" in refusal(plan, "eagle", write(kit.llama(vocab_size=14), kit.eagle()))
    assert "num_hidden_layers=2" in refusal(plan, "eagle", write(kit.llama(num_hidden_layers=2), kit.eagle()))
    narrow = {name: tensor[..., :16] for name, tensor in kit.eagle().items()}
    assert "fc.weight is [24, 16]" in refusal(plan, "eagle", write(kit.llama(), narrow))


def test_log_describes_the_head(kit: Any, write: Any, plan: Plan) -> None:
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}
    folder = write(kit.llama(draft_vocab_size=9, rope_theta=500.0, **nested), kit.eagle3())
    lines = plan("eagle3", folder)
    assert len(lines) == 4
    assert "hidden size 24, 4 heads (2 KV) of 8; the target's embedding" in lines[0]
    assert "rope theta 500 (from rope_theta), the target's theta is 77; trained for 64 positions" in lines[1]
    assert "inputs of layers 2, 3, 4 of 8" in lines[2]
    assert "read as inputs of layers: a guess, see --aux-layers" in lines[2]
    assert "drafts 9 of the target's 13 tokens" in lines[3]


def test_context_of_a_head_extends_to_the_targets(kit: Any, write: Any) -> None:
    config = EngineConfig(model="target", speculation=Speculation("eagle", draft=write(kit.llama(), kit.eagle())))
    stub = kit.TargetStub(2)
    stub.config = ModelConfig(**{**stub.config.__dict__, "max_position": 4096})
    assert eagle.plan(stub, config, print).config.max_position == 4096


def test_missing_or_unsupported_mtp_heads_are_refused(kit: Any, plan: Plan) -> None:
    message = refusal(plan, "mtp", None, kit.TargetStub(2))
    assert "algorithm='mtp': target has no tensors mtp.*" in message
    stub = kit.TargetStub(2, mtp={**kit.stored(kit.mtp()), "layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)})
    assert "describes no tensor mtp.layers.0.mlp.experts.0.up_proj.weight" in refusal(plan, "mtp", None, stub)
    stub = kit.TargetStub(2, mtp={**kit.stored(kit.mtp()), "layers.1.mlp.up_proj.weight": torch.zeros(2, 2)})
    assert "describes no tensor mtp.layers.1.mlp.up_proj.weight" in refusal(plan, "mtp", None, stub)
    plain = kit.stored(kit.mtp())
    plain["layers.0.self_attn.q_proj.weight"] = plain["layers.0.self_attn.q_proj.weight"][:32]
    assert "q_proj.weight is [32, 24]" in refusal(plan, "mtp", None, kit.TargetStub(2, mtp=plain))
    for layers, key in itertools.product((0, 2), ("mtp_num_hidden_layers", "num_nextn_predict_layers")):
        stub = kit.TargetStub(2, mtp=kit.stored(kit.mtp()))
        stub.config = ModelConfig.from_dict(kit.llama(num_hidden_layers=2, **{key: layers}))
        message = refusal(plan, "mtp", None, stub)
        assert message.startswith(f"algorithm='mtp': the config of target has a head of {layers} layers")


def test_mtp_head_is_read_from_the_targets_folder(kit: Any, tmp_path: Path, plan: Plan) -> None:
    """The head is optional: the target runs without it."""
    stub = kit.TargetStub(2, mtp=kit.stored(kit.mtp()))
    (tmp_path / "config.json").write_text(json.dumps(kit.llama(num_hidden_layers=2)))
    save_file(stub.tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.mtp == stub.mtp
    assert not any(name.startswith("mtp.") for name in checkpoint.names())
    assert torch.equal(checkpoint.tensor("mtp.fc.weight"), stub.tensors["mtp.fc.weight"])
    assert "the MTP head of" in plan("mtp", None, checkpoint)[0]


def test_mtp_head_of_a_nested_text_config(kit: Any, tmp_path: Path, plan: Plan) -> None:
    text = kit.qwen3_next(model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1)
    del text["architectures"]
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = kit.randomise(ModelConfig.from_dict(outer).tensor_shapes(), 1)
    tensors["model.visual.blocks.0.weight"] = torch.zeros(2, 2)
    head = {f"mtp.{name}": tensor for name, tensor in kit.stored(kit.mtp("fused")).items()}
    save_file(tensors | head, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert len(checkpoint.mtp) == 19  # as published
    assert "the MTP head of" in (line := plan("mtp", None, checkpoint)[0])
    assert "5 experts" in line


FILES = [
    ("missing", "no such folder"),
    ("empty", "no config.json"),
    ("bare", "neither safetensors nor a pytorch_model.bin"),
    ("damaged", "damaged or not a file of tensors"),
]


@pytest.mark.parametrize(("kind", "message"), FILES)
def test_folders_without_a_head_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    folder = tmp_path / kind
    if kind != "missing":
        folder.mkdir()
    if kind in ("bare", "damaged"):
        (folder / "config.json").write_text("{}")
    if kind == "damaged":
        (folder / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(SpecbatchError, match=message) as caught:
        open_draft(str(folder))
    assert str(caught.value).startswith("draft=")


# -- random weights ------------------------------------------------------------------------------------------------


def dummy(shape: str, algorithm: str, draft: str | None = "dummy") -> tuple[Any, list[str]]:
    lines: list[str] = []
    config = EngineConfig(model=shape, load_format="dummy", speculation=Speculation(algorithm, draft=draft))
    return PLANS[algorithm](open_checkpoint(shape, "dummy"), config, lines.append), lines


def test_published_eagle3_head_of_qwen3_8b() -> None:
    plan, lines = dummy("qwen3-8b", "eagle3")
    layer = plan.config
    assert (layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4096, 32, 8, 128)
    assert layer.intermediate_size == 12288
    assert not layer.qk_norm
    assert plan.aux == (1, 17, 32)
    assert not plan.needs_all_hidden
    hidden = 4096
    expected = 3 * hidden * hidden  # fc
    expected += 2 * hidden * (32 + 2 * 8) * 128 + 32 * 128 * hidden + 3 * hidden * 12288
    expected += 4 * hidden  # norms
    expected += 32000 * hidden
    assert plan.parameters == expected
    assert any("drafts 32000 of the target's 151936 tokens" in line for line in lines)


@pytest.mark.parametrize("algorithm", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_named_shape_has_a_dummy_head(shape: str, algorithm: str) -> None:
    plan, _ = dummy(shape, algorithm, None if algorithm == "mtp" else "dummy")
    assert (plan.weights.parameter_count() if algorithm == "mtp" else plan.parameters) > 0
    assert plan.kv_layers == 1


@pytest.mark.parametrize("as_folder", [True, False])
def test_dummy_head_from_a_config(kit: Any, tmp_path: Path, as_folder: bool) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 64, "draft_vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kit.llama(**sizes, eagle_aux_hidden_state_layer_ids=[1, 4, 2])))
    plan, _ = dummy("toy", "eagle3", str(tmp_path if as_folder else path))
    assert plan.aux == (0, 3, 1)
    assert plan.needs_all_hidden  # the last of four layers is one of them
    assert plan.config.head_dim == kit.DIM
    with pytest.raises(SpecbatchError, match=r"draft='nothing'.*config.json, its folder, or 'dummy'"):
        dummy("toy", "eagle3", "nothing")
