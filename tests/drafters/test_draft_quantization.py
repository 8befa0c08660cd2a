"""Drafts that are quantized to FP8 as they are loaded: emitted tokens, log lines, memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import slow_but
from targets import MTP, QUANTIZED, SIZES, TARGETS, TargetCheckpoint
from watched_calls import Watch

from specbatch import Engine, SpecbatchError
from specbatch.algorithms import ALGORITHMS, algorithms_with
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Linear, FP8Weight, quantize_fp8_weight
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.models import weight_reader
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import MatrixShape
from specbatch.models.heads.draft_head import HEAD
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import weight_shapes

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 260, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 260, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
PARTIAL_ROPE = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "partial_rotary_factor": 0.5,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 128, "q_lora_rank": None,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": None,
    "num_key_value_heads": 4, "first_k_dense_replace": 2,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
}  # fmt: skip
QUANTIZES = [name for name in algorithms_with("draft_quantization") if ALGORITHMS[name].alias_of is None]
PROMPTS = [[5, 6, 7, 8, 9] * 3, [3, 1, 4, 1, 5, 9, 2]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)

Build = Callable[..., Engine]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """`build(algorithm, quantization, shape=..., small=..., **settings)`: an engine with random weights. shape, small:
    changes of the target's config and of the draft model's."""
    engines: list[Engine] = []

    def build(algorithm: str = "none", quantization: str | None = None, **settings: Any) -> Engine:
        configs = {"target": SHAPE | settings.pop("shape", {}), "small": SMALL | settings.pop("small", {})}
        for name, config in configs.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        entry = ALGORITHMS[algorithm]
        draft = str(tmp_path / "small") if entry.drafts_by_model else "dummy" if entry.draft else None
        log = settings.pop("log", None)
        settings = {"device": "cpu", "dtype": "float32", "max_running": 4, "max_model_len": 60} | settings
        speculation = Speculation(algorithm, draft=draft, draft_quantization=quantization)
        config = EngineConfig(model=str(tmp_path / "target"), load_format="dummy", speculation=speculation, **settings)
        engines.append(Engine(config, log=log))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def of_target(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The target's own tokens."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", dtype="float32", max_running=4, max_model_len=60
    )
    with Engine(config) as engine:
        return tokens(engine)


@pytest.fixture
def quantized(watch: Watch) -> list[FP8Weight]:
    """The weights that are quantized at load, as they come."""
    return watch(weight_reader, "quantize_fp8_weight", after=lambda weight, values: weight)


def tokens(engine: Engine) -> list[list[int]]:
    return [list(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("algorithm", "keeps"),
    [
        *slow_but([("dflash2", True)], [(name, True) for name in QUANTIZES]),
        pytest.param("eagle3", False, id="dequantized"),
    ],
)
def test_the_tokens_are_the_targets(
    build: Build,
    of_target: list[list[int]],
    quantized: list[FP8Weight],
    stay_quantized: Callable[..., None],
    algorithm: str,
    keeps: bool,
) -> None:
    stay_quantized(keeps)
    plain = build(algorithm)
    assert not quantized
    engine = build(algorithm, "fp8")
    assert tokens(engine) == of_target == tokens(plain)
    heads = [weight for weight in quantized if weight.shape == (260, 128 if algorithm == "standalone" else 256)]
    assert len(heads) == 1
    if keeps:  # the memory plan knows what is saved; of DFlash it counts keys and values of the context in full
        saved = sum(4 * weight.values.numel() - _bytes(weight) for weight in quantized)
        saved -= 0 if algorithm == "standalone" else 4 * heads[0].values.numel()  # the target keeps its own
        planned = plain.caps["weights_bytes"] - engine.caps["weights_bytes"]
        twice = ALGORITHMS[algorithm].tree == "block"
        assert saved * (0.8 if twice else 0.99) < planned < saved * (1 if twice else 1.01)


def _bytes(weight: FP8Weight) -> int:
    return weight.values.numel() + 4 * weight.scales.numel()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("algorithm", QUANTIZES)
def test_the_tokens_are_the_targets_on_a_gpu(build: Build, algorithm: str) -> None:
    """In float32, where only the weights are quantized. In bfloat16 with graphs, activations are, too."""
    expected = tokens(build(device="cuda"))
    engine = build(algorithm, "fp8", device="cuda")
    assert tokens(engine) == expected
    graphs = Graphs(decode="whole", prefill="piecewise")
    fast = build(algorithm, "fp8", device="cuda", dtype="bfloat16", graphs=graphs)
    assert fast.caps["fp8_activations"] == "on"
    assert [len(row) for row in tokens(fast)] == [PARAMS.max_new_tokens] * len(PROMPTS)


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (3, 256, 384), (1, 5)])
def test_quantized_weights(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[-1])
    values[..., 0, :] = 0
    found = quantize_fp8_weight(values)
    *stack, out, inner = shape
    assert found.scales.shape == (*stack, math.ceil(out / 128), math.ceil(inner / 128))
    back = found.dequantize(torch.float32)
    rows = range(0, out, 128)
    for i, row in enumerate(rows):
        for j, column in enumerate(range(0, inner, 128)):
            block = (..., slice(row, row + 128), slice(column, column + 128))
            largest = values[block].abs().amax((-2, -1))
            torch.testing.assert_close(found.scales[..., i, j], largest.clamp(min=448 * 2.0**-100) / 448)
            # 3 bits after the first one, down to 2^-6 of a scale, and steps of 2^-9 below
            bound = values[block].abs() / 16 + found.scales[..., i, j, None, None] * 2.0**-10
            assert ((back[block] - values[block]).abs() <= bound * 1.001).all()


def test_the_parts_of_a_large_weight_are_one() -> None:
    values = torch.randn(2, 400, 256, generator=torch.Generator().manual_seed(2))
    whole = quantize_fp8_weight(values)
    parts = quantize_fp8_weight(values, part=128 * 256)
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(whole.scales, parts.scales)


def test_the_target_keeps_its_weights(build: Build, stay_quantized: Callable[..., None]) -> None:
    lines: list[str] = []
    stay_quantized()
    engine = build("mtp", "fp8", dtype="float16", log=lines.append)
    assert not isinstance(engine.parts.model.head, FP8Linear)
    assert "draft: matrices quantized at load, FP8 weights: kept" in lines
    assert "FP8 activations: on, quantized per token and 128 columns" in lines
    assert engine.caps["fp8_activations"] == "on"


def test_layers_of_the_target_are_not_quantized(build: Build, tmp_path: Path) -> None:
    speculation = Speculation("standalone", draft="self:skip=1", draft_quantization="fp8")
    build()
    config = EngineConfig(model=str(tmp_path / "target"), load_format="dummy", device="cpu", speculation=speculation)
    with pytest.raises(SpecbatchError, match="shares the target's weights"):
        Engine(config)


def test_a_width_that_is_no_whole_number_of_blocks(build: Build) -> None:
    with pytest.raises(SpecbatchError, match=r"draft_quantization='fp8'.*192, which must be a multiple of 128"):
        build("eagle3", "fp8", shape={"hidden_size": 192})


def test_experts_beside_a_shared_one_of_other_widths(build: Build, stay_quantized: Callable[..., None]) -> None:
    stay_quantized()
    widths = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 192)
    with pytest.raises(SpecbatchError, match=r"draft_quantization='fp8': mtp.layers.0.mlp .* widths 192 and 192"):
        build("mtp", "fp8", shape=widths)


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantized", "kept"])
def test_stored_fp8_weights_are_not_quantized_again(
    build: Build, quantized: list[FP8Weight], stay_quantized: Callable[..., None], keeps: bool
) -> None:
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    stay_quantized(keeps)
    build("standalone", "fp8", small={"quantization_config": stored})
    assert [weight.values.shape for weight in quantized] == [(260, 128)], "the output matrix only"


def test_a_cpu_plans_a_copy_of_the_targets_output_matrix(build: Build) -> None:
    engines = build("eagle", "fp8"), build("eagle")
    assert engines[0].caps["weights_bytes"] - engines[1].caps["weights_bytes"] == 260 * 256 * 4


@pytest.mark.parametrize("name", slow_but([*TARGETS, *[*QUANTIZED][::3]], [*TARGETS, *QUANTIZED]))
def test_the_plan_counts_the_matrices_that_are_quantized(watch: Watch, name: str) -> None:
    """Of models of every family, and of their MTP heads."""
    quantized: set[str] = set()

    def note(found: Weight, read: Reader, weight: Weight, *names: str) -> None:
        if found is not weight:
            quantized.update(names or [HEAD])

    watch(Reader, "in_fp8", after=note)
    checkpoint = TargetCheckpoint(name)
    of_cpu: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    model = Decoder(checkpoint.config, checkpoint.tensor, **of_cpu, max_positions=8, to_fp8=True)
    assert quantized == _recorded(checkpoint.config) | {HEAD}
    if name in MTP:
        quantized.clear()
        network = import_module(checkpoint.config.mtp_module)
        config = network.mtp_config(checkpoint.config, checkpoint.mtp)
        network.Mtp(Reader(config, checkpoint.tensor, **of_cpu, to_fp8=True), model, 8)
        assert quantized == _recorded(config) | {HEAD}


def test_experts_in_mxfp4_stay() -> None:
    mxfp4 = {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    config = ModelConfig.from_dict(SIZES | TARGETS["gpt-oss"] | mxfp4)
    parts = {name.split(".")[3] for name in _recorded(config) if "layers" in name}
    assert parts == {"self_attn"}


def _recorded(config: ModelConfig) -> set[str]:
    return {
        name
        for name, shape in weight_shapes(config).items()
        if isinstance(shape, MatrixShape) and not config.is_stored_quantized(name, shape)
    }


@pytest.mark.parametrize("changes", [PARTIAL_ROPE, LATENT, GPT_OSS], ids=["partial-rope", "latent", "gpt-oss"])
def test_the_plan_counts_no_more_than_is_saved(
    build: Build, quantized: list[FP8Weight], stay_quantized: Callable[..., None], changes: dict[str, Any]
) -> None:
    """Of draft models with matrices that are read in other ways."""
    stay_quantized()
    engine, plain = build("standalone", "fp8", small=changes), build("standalone", small=changes)
    saved = sum(4 * weight.values.numel() - _bytes(weight) for weight in quantized)
    assert 0.9 * saved < plain.caps["weights_bytes"] - engine.caps["weights_bytes"] < 1.001 * saved
