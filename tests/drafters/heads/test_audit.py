"""Draft-head compatibility checks: mismatches are refused before loading, and the log describes a head that fits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_heads as heads
import pytest
import torch
from crossed import crossed
from safetensors.torch import save_file

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.drafters import eagle
from specbatch.drafters.head_checks import parameters, usual_head
from specbatch.engine.setup.prepare import prepare
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights import open_checkpoint
from specbatch.weights.draft_heads import open_draft
from specbatch.weights.dummy import SHAPES

ALGORITHMS = ("eagle", "eagle3", "mtp")


def plan(algorithm: str, draft: str | None = None, stub: Any = None, **asked: Any) -> list[str]:
    """Plans a drafter, by default for a target of 8 layers; returns the log."""
    lines: list[str] = []
    config = EngineConfig(model="target", speculation=Speculation(algorithm, draft=draft, **asked))
    heads.plan_of(algorithm)(stub or heads.TargetStub(8), config, lines.append)
    return lines


def refusal(*rest: Any, **asked: Any) -> str:
    with pytest.raises(SpecbatchError) as caught:
        plan(*rest, **asked)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def usual(write: Callable[..., str]) -> str:
    """The folder of an EAGLE-3 head that fits the target."""
    return write(heads.llama(draft_vocab_size=9), heads.eagle3())


def test_head_of_another_algorithm_is_refused(write: Any) -> None:
    message = refusal("eagle", write(heads.llama(draft_vocab_size=9), heads.eagle3(), "midlayer"))
    assert "algorithm='eagle'" in message
    assert "has a tensor layers.0.hidden_norm, so it is for algorithm 'eagle3'" in message
    message = refusal("eagle3", write(heads.llama(), heads.eagle()))
    assert "algorithm='eagle3'" in message
    assert "has no tensor layers.0.hidden_norm, so it is for algorithm 'eagle'" in message


@pytest.mark.parametrize("algorithm", ["standalone", "eagle", "eagle3"])
@pytest.mark.parametrize(
    ("config", "of"),
    [
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 8}, "dspark"),
        ({"architectures": ["DSparkDraftModel"], "markov_rank": 0}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "lilicorr"),
        ({"architectures": ["Qwen3XPressModel"]}, "xpress"),
        ({"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 0}, "peagle"),
    ],
)
def test_parallel_draft_with_another_algorithm_is_refused(write: Any, algorithm: str, config: Any, of: str) -> None:
    """Also without --algorithm, where it is standalone."""
    tensors = heads.eagle() | {"layer.input_layernorm.weight": torch.ones(heads.HIDDEN)}
    message = refusal(algorithm, write(config, tensors))
    assert message == f"algorithm={algorithm!r}: the draft was trained for algorithm {of!r}; use that"


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", [True, False])
def test_checkpoints_that_are_not_heads_are_refused(write: Any, algorithm: str, model: bool) -> None:
    """A complete model, and a draft that has fc but plain layers."""
    tensors = heads.eagle() | {"layer.input_layernorm.weight": torch.ones(heads.HIDDEN)}
    if model:
        del tensors["fc.weight"]
    assert "these are not tensors of an EAGLE head" in refusal(algorithm, write(heads.llama(), tensors))


LAYERS = "eagle_aux_hidden_state_layer_ids"
OF_CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"vocab_size": 14}, "vocabulary is 14 and that of target is 13", "layers.0"),
    ({"target_hidden_size": 36}, "features is 36", "layers.0"),
    ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is missing", "layers.0"),
    ({"draft_vocab_size": 10}, "lm_head.weight is [9, 24]; its config requires [10, 24]", "midlayer"),
    ({"draft_vocab_size": None}, "lm_head.weight is [9, 24]; its config requires [13, 24]", "midlayer"),
    ({"norm_before_fc": True}, "input_norm.weight is missing", "layers.0"),
    ({"fc_norm": True}, "fc_norm.0.weight is missing", "layers.0"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc is true, too", "layers.0"),
    ({"norm_output": "no"}, "norm_output='no': use true or false", "layers.0"),
    ({"draft_vocab_size": "9"}, "draft_vocab_size='9'", "layers.0"),
    (
        {"draft_vocab_size": 2**31 - 1},
        "draft_vocab_size=2147483647: the head's vocab_size is 13; use at most that",
        "layers.0",
    ),
    ({"target_hidden_size": 0}, "target_hidden_size=0", "layers.0"),
    ({"norm_after_fc": True}, "norm_after_fc=True", "layers.0"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm=True", "layers.0"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False", "layers.0"),
    ({LAYERS: [2, 4]}, "the head reads 3 different features", "layers.0"),
    (
        {LAYERS: [2, 4, 9]},
        f"{LAYERS}=[2, 4, 9]: the head reads 3 different features of 8 layers; list 1 to 8",
        "layers.0",
    ),
    ({LAYERS: [0, 4, 8]}, f"{LAYERS}=[0, 4, 8]: the head reads 3 ", "layers.0"),
    ({"eagle_config": {LAYERS: [1, 4, 8]}}, f"eagle_config.{LAYERS}=[1, 4, 8]: the head reads 3 ", "layers.0"),
    ({"eagle_config": {LAYERS: [1, 4, 8]}}, "list 0 to 7 (k is the output of layer k, ", "layers.0"),
    ({"eagle_config": {LAYERS: [2, 4, 9]}}, "list 1 to 8 (k is the input of layer k, the output", "layers.0"),
    ({LAYERS: [2, 2, 8]}, "3 different features", "layers.0"),
    ({LAYERS: "2,4,5"}, "must list whole numbers from 0", "layers.0"),
    ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'", "layers.0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config", "layers.0"),
    ({"architectures": ["DeepseekV3ForCausalLMEagle3"]}, "architectures", "layers.0"),
]


@pytest.mark.parametrize(("changes", "message", "stem"), OF_CONFIGS, ids=[row[1] for row in OF_CONFIGS])
def test_mismatched_eagle3_configs_are_refused(write: Any, changes: dict[str, Any], message: str, stem: str) -> None:
    config = heads.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=9) | changes
    folder = write(config, heads.eagle3(), stem)
    found = refusal("eagle3", folder)
    assert message in found
    assert found.startswith((f"draft='{folder}': ", LAYERS, f"eagle_config.{LAYERS}"))


@pytest.mark.parametrize("asked", [(2, 4), (2, 2, 4), (2, 4, 9)])
def test_requested_layers_must_exist(usual: str, asked: tuple[int, ...]) -> None:
    message = refusal("eagle3", usual, aux_layers=asked)
    assert message.startswith(f"aux_layers={asked}: the head reads 3 different features")


def test_too_few_layers_for_the_default_are_refused(usual: str) -> None:
    message = refusal("eagle3", usual, heads.TargetStub(4))
    assert message.startswith("aux_layers=(2, 2, 1): the head reads 3 different features of 4 layers; list 1 to 4 ")
    assert message.endswith("the default: its config lists none")


@pytest.mark.parametrize(("place", "offset"), [(8, 5), (0, -1), (0, heads.ids(heads.eagle3())[1])])
def test_vocabulary_map_must_hold_distinct_target_tokens(write: Any, place: int, offset: int) -> None:
    tensors = heads.eagle3()
    tensors["d2t"][place] = offset
    message = refusal("eagle3", write(heads.llama(draft_vocab_size=9), tensors))
    assert "offsets to 9 different tokens of 13" in message


@pytest.mark.parametrize("head", [heads.eagle, heads.eagle3])
@pytest.mark.parametrize("wrong", ["more", "less", "shape"])
def test_tensors_must_match_the_config(write: Any, head: Any, wrong: str) -> None:
    name = f"layers.{int(wrong == 'more')}.mlp.up_proj.weight"
    tensors = heads.stored(head()) | {name: torch.zeros(2, 2)}
    if wrong == "less":
        del tensors[name]
    folder = write(heads.llama(draft_vocab_size=9), tensors)
    message = refusal(head.__name__, folder)
    assert f"draft='{folder}'" in message
    assert name in message


def test_mismatched_eagle_heads_are_refused(write: Any) -> None:
    tensors = heads.eagle()
    narrow = tensors | {"fc.weight": tensors["fc.weight"][:, :16]}
    for changes, stored, message in (
        ({"vocab_size": 14}, tensors, "vocabulary is 14"),
        ({"num_hidden_layers": 2}, tensors, "layers.1.input_layernorm.weight is missing"),
        ({}, tensors | heads.further(2), "layers.1"),
        ({}, narrow, "fc.weight is [24, 16]"),
    ):
        assert message in refusal("eagle", write(heads.llama(**changes), stored))


def test_mismatched_peagle_heads_are_refused(write: Any) -> None:
    tensors, config = heads.peagle(), heads.llama(draft_vocab_size=9)
    for algorithm, stored, changes, message in (
        ("eagle3", tensors, {}, "has a tensor mask_hidden, so it is for algorithm 'peagle'; use that"),
        ("eagle", tensors, {}, "has a tensor mask_hidden, so it is for algorithm 'peagle'; use that"),
        ("peagle", heads.eagle3(), {}, "has no tensor mask_hidden, so it is for algorithm 'eagle3'; use that"),
        ("peagle", heads.eagle(), {}, "has no tensor layers.0.hidden_norm, so it is for algorithm 'eagle'"),
        ("peagle", tensors, {}, "mask_token_id=None: the head's config must have one of pard_token, ptd_token_id"),
        ("peagle", tensors, {"ptd_token_id": 13}, "mask_token_id=13: the target has 13 tokens"),
        ("peagle", tensors, {"speculators_model_type": "eagle3"}, "algorithm 'peagle' runs 'peagle' checkpoints"),
        (
            "peagle",
            tensors | {"mask_hidden": torch.zeros(1, 48)},
            {"ptd_token_id": 11},
            "mask_hidden is [1, 48]; its config requires [1, 1, 72]",
        ),
        (
            "peagle",
            tensors | {"mask_hidden": torch.full((1, 1, 72), torch.nan)},
            {"ptd_token_id": 11},
            "draft='mask_hidden': the tensor holds values that are not finite",
        ),
    ):
        described = {"transformer_layer_config": config} | config | changes
        assert message in refusal(algorithm, write(described, stored))


def test_peagle_drafts_at_most_half_of_a_verify(write: Any) -> None:
    folder = write(heads.llama(draft_vocab_size=9, ptd_token_id=11), heads.peagle())
    assert "draft_tokens=33: the pass of a P-EAGLE head has two rows for each; use at most 32" in refusal(
        "peagle", folder, draft_tokens=33
    )


def test_log_describes_the_head(write: Any) -> None:
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}
    folder = write(heads.llama(draft_vocab_size=9, rope_theta=500.0, **nested), heads.eagle3())
    lines = plan("eagle3", folder)
    assert len(lines) == 4
    assert "hidden size 24, 4 heads (2 KV) of 8; the target's embedding" in lines[0]
    assert "rope theta 500 (from rope_theta), the target's theta is 77; trained for 64 positions" in lines[1]
    assert "inputs of layers 2, 3, 4 of 8" in lines[2]
    assert "read as inputs of layers: a guess, see --aux-layers" in lines[2]
    assert "drafts 9 of the target's 13 tokens" in lines[3]


def test_context_of_a_head_extends_to_the_targets(write: Any) -> None:
    config = EngineConfig(model="target", speculation=Speculation("eagle", draft=write(heads.llama(), heads.eagle())))
    stub = heads.TargetStub(2)
    stub.config = ModelConfig(**{**stub.config.__dict__, "max_position": 4096})
    assert eagle.plan(stub, config, print).config.max_position == 4096


def test_missing_or_unsupported_mtp_heads_are_refused() -> None:
    assert "algorithm='mtp': target has no tensors of an MTP head" in refusal("mtp", None, heads.TargetStub(2))
    tensors = heads.stored(heads.mtp())
    name = "layers.0.mlp.experts.0.up_proj.weight"
    stub = heads.TargetStub(2, mtp=tensors | {name: torch.zeros(2, 2)})
    assert f"describes no tensor mtp.{name}" in refusal("mtp", None, stub)
    incomplete = heads.TargetStub(2, mtp=tensors | {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)})
    assert "tensor mtp.layers.1.post_attention_layernorm.weight is missing" in refusal("mtp", None, incomplete)
    query = "layers.0.self_attn.q_proj.weight"
    stub = heads.TargetStub(2, mtp=tensors | {query: tensors[query][:32]})
    assert "q_proj.weight is [32, 24]" in refusal("mtp", None, stub)
    stub = heads.TargetStub(2, mtp=tensors)
    wrong = {0: "target has no tensors of an MTP head", 2: "mtp.layers.1.post_attention_layernorm.weight is missing"}
    keys = "mtp_num_hidden_layers", "num_nextn_predict_layers"
    for (layers, message), key in itertools.product(wrong.items(), keys):
        stub.config = ModelConfig.from_dict(heads.llama(num_hidden_layers=2, **{key: layers}))
        assert message in refusal("mtp", None, stub)


def test_drafts_that_the_layers_of_an_mtp_head_cannot_make_are_refused() -> None:
    """Without a number there are as many drafts as layers."""
    stub, *_ = heads.usual("mtp of 2", str)
    has = "the MTP head of target has 2 layers, one for each draft of a chain; use"
    assert refusal("mtp", None, stub, draft_tokens=3) == f"draft_tokens=3: {has} at most 2"
    assert refusal("mtp", None, stub, draft_tokens="auto", draft_steps=4) == f"draft_steps=4: {has} at most 2"
    assert refusal("mtp", None, stub, draft_topk=2, draft_steps=2) == f"draft_topk=2: {has} 1"
    assert "2 of 2 layers" in plan("mtp", None, stub)[0]
    assert "1 of 2 layers" in plan("mtp", None, stub, draft_tokens=1)[0]


def test_mtp_head_is_read_from_the_targets_folder(tmp_path: Path) -> None:
    """The head is optional: the target runs without it."""
    stub = heads.TargetStub(2, mtp=heads.stored(heads.mtp()))
    (tmp_path / "config.json").write_text(json.dumps(heads.llama(num_hidden_layers=2)))
    save_file(stub.tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.mtp == stub.mtp
    assert not any(name.startswith("mtp.") for name in checkpoint.names())
    assert torch.equal(checkpoint.tensor("mtp.fc.weight"), stub.tensors["mtp.fc.weight"])
    assert "the MTP head of" in plan("mtp", None, checkpoint)[0]


def test_mtp_head_of_a_nested_text_config(tmp_path: Path) -> None:
    text = heads.qwen3_next(model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1)
    del text["architectures"]
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = heads.randomise(tensor_shapes(ModelConfig.from_dict(outer)), 1)
    tensors["model.visual.blocks.0.weight"] = torch.zeros(2, 2)
    head = {f"mtp.{name}": tensor for name, tensor in heads.stored(heads.mtp("fused")).items()}
    save_file(tensors | head, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert len(checkpoint.mtp) == 19  # as published
    assert "the MTP head of" in (line := plan("mtp", None, checkpoint)[0])
    assert "5 experts" in line


def test_dummy_drafts_need_dummy_weights() -> None:
    with pytest.raises(SpecbatchError, match=r"draft='dummy': .* add load_format='dummy'"):
        open_draft("dummy")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such folder"),
        ({}, "no config.json"),
        ({"config.json": "{}"}, "neither safetensors nor a pytorch_model.bin"),
        ({"config.json": "{}", "pytorch_model.bin": "no tensors"}, "damaged or not a file of tensors"),
    ],
)
def test_folders_without_a_head_are_refused(tmp_path: Path, files: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "head"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    with pytest.raises(SpecbatchError, match=message) as caught:
        open_draft(str(folder))
    assert str(caught.value).startswith("draft=")


# -- random weights ------------------------------------------------------------------------------------------------


def dummy(shape: str, algorithm: str, draft: str | None = "dummy") -> tuple[Any, list[str]]:
    lines: list[str] = []
    config = EngineConfig(model=shape, load_format="dummy", speculation=Speculation(algorithm, draft=draft))
    return heads.plan_of(algorithm)(open_checkpoint(shape, "dummy"), config, lines.append), lines


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
    assert parameters(plan.shapes) == expected
    alike = 3 * hidden * hidden + 4 * hidden  # on all ranks
    assert parameters(plan.divided(4).shapes) == alike + (expected - alike) // 4
    assert any("drafts 32000 of the target's 151936 tokens" in line for line in lines)


@pytest.mark.parametrize(("shape", "algorithm"), crossed(SHAPES, ALGORITHMS))
def test_every_named_shape_has_a_dummy_head(shape: str, algorithm: str) -> None:
    plan, _ = dummy(shape, algorithm, None if algorithm == "mtp" else "dummy")
    assert parameters(plan.shapes) > 0
    assert plan.kv_layers == 1


@pytest.mark.parametrize("as_folder", [True, False])
def test_dummy_head_from_a_config(tmp_path: Path, as_folder: bool) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 64, "draft_vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(heads.llama(**sizes, eagle_aux_hidden_state_layer_ids=[1, 4, 2])))
    plan, _ = dummy("toy", "eagle3", str(tmp_path if as_folder else path))
    assert plan.aux == (0, 3, 1)
    assert plan.needs_all_hidden  # the last of four layers is one of them
    assert plan.config.head_dim == heads.DIM
    with pytest.raises(SpecbatchError, match=r"draft='nothing'.*config.json, its folder, or 'dummy'"):
        dummy("toy", "eagle3", "nothing")


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "standalone"])
def test_random_weights_in_place_of_stored_ones_are_refused(tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    asked = Speculation(algorithm, draft=str(tmp_path))
    with pytest.raises(SpecbatchError) as caught:
        prepare(EngineConfig("toy", load_format="dummy", device="cpu", speculation=asked), lambda line: None)
    assert str(caught.value) == (
        f"draft='{tmp_path}': with load_format='dummy' its weights are not read; use 'dummy' or its config.json for "
        "random weights, or leave out load_format='dummy'"
    )


def methods(*counts: int | None, default: str = "1") -> dict[str, Any]:
    """A config of speculators with a proposal method for each number of drafts, of types "0", "1", ..."""
    listed = [{"proposal_type": str(place), "speculative_tokens": count} for place, count in enumerate(counts)]
    return {"speculators_config": {"proposal_methods": listed, "default_proposal_method": default}}


@pytest.mark.parametrize(
    ("stated", "asked", "drafted", "logged"),
    [
        (methods(5), {}, 5, "the number of drafts is speculative_tokens=5 of its config"),
        (methods(5, 4), {}, 4, "speculative_tokens=4 of its config"),
        (methods(5, None), {}, 5, "speculative_tokens=5 of its config"),
        (methods(1), {}, 1, "speculative_tokens=1 of its config"),
        ({"speculative_tokens": 6}, {}, 6, "speculative_tokens=6 of its config"),
        (methods(5), {"draft_topk": 1}, 5, "speculative_tokens=5 of its config"),
        (methods(5), {"draft_tokens": "auto"}, 5, "speculative_tokens=5 of its config"),
        (
            methods(5),
            {"draft_tokens": "auto", "draft_steps": 2},
            None,
            "up to 2 drafts as asked, not speculative_tokens=5",
        ),
        (methods(5), {"draft_tokens": 2}, None, "up to 2 drafts as asked, not speculative_tokens=5 of its config"),
        (methods(5), {"draft_steps": 2}, None, "up to 2 drafts as asked, not speculative_tokens=5 of its config"),
        (methods(5), {"draft_tokens": 5}, None, None),
        (methods(5), {"draft_topk": 2}, None, None),
        (methods(), {}, None, None),
        ({}, {}, None, None),
    ],
)
def test_number_of_drafts_that_a_head_was_published_with(
    write: Any, stated: dict[str, Any], asked: dict[str, Any], drafted: int | None, logged: str | None
) -> None:
    """It is the default; what the user asks for wins. Trees keep their shape."""
    folder, lines = write(heads.llama(draft_vocab_size=9) | stated, heads.eagle3()), []
    config = EngineConfig(model="target", speculation=Speculation("eagle3", draft=folder, **asked))
    found = heads.plan_of("eagle3")(heads.TargetStub(8), config, lines.append)
    assert found.num_drafts == drafted
    if drafted is not None:
        assert found.uncached_tail == drafted + 1
    assert [line for line in lines if "speculative_tokens" in line] == [
        line for line in lines if logged and logged in line
    ]
    assert logged is None or any(logged in line for line in lines)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (methods(0), "speculative_tokens=0: the config must give a positive whole number"),
        (methods(64), "speculative_tokens=64: the config must give a positive whole number up to 63"),
        ({"speculative_tokens": "5"}, "speculative_tokens='5'"),
        (
            {"speculators_config": {"proposal_methods": {"a": 1}}},
            "proposal_methods={'a': 1}: the config must list tables",
        ),
    ],
)
def test_numbers_of_drafts_that_are_none_are_refused(write: Any, stated: dict[str, Any], message: str) -> None:
    folder = write(heads.llama(draft_vocab_size=9) | stated, heads.eagle3())
    assert message in refusal("eagle3", folder)


def test_number_of_drafts_of_a_parallel_head(write: Any) -> None:
    """At most 32, as its pass has two rows for each."""
    tensors = heads.eagle3() | {"mask_hidden": torch.zeros(1, 1, 3 * heads.HIDDEN)}
    for count, drafted in ((6, 6), (40, 32)):
        folder = write(heads.llama(draft_vocab_size=9, mask_token_id=heads.MASK) | methods(count), tensors)
        config = EngineConfig(model="target", speculation=Speculation("peagle", draft=folder))
        lines: list[str] = []
        found = heads.plan_of("peagle")(heads.TargetStub(8), config, lines.append)
        assert (found.num_drafts, found.scratch_slots) == (drafted, 2 * drafted)
        note = "" if count == drafted else ", of which it can make 32"
        assert f"draft: the number of drafts is speculative_tokens={count} of its config{note}" in lines


@pytest.mark.parametrize(("asked", "shape"), [({}, "5 drafted"), ({"draft_tokens": 2}, "2 drafted")])
def test_engine_drafts_as_many_as_the_head_was_published_with(
    tmp_path: Path, asked: dict[str, int], shape: str
) -> None:
    described = usual_head(open_checkpoint("toy", "dummy").config) | methods(5)
    (tmp_path / "config.json").write_text(json.dumps(described | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    speculation = Speculation("eagle3", draft=str(tmp_path / "config.json"), **asked)
    config = EngineConfig("toy", load_format="dummy", device="cpu", speculation=speculation)
    assert str(prepare(config, lambda line: None).config.speculation.shape) == shape
