"""FP8 activations: which passes of an engine quantize them, and what it logs and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import planned_draft_lengths
from watched_calls import Watch

from specbatch import Engine, SpecbatchError, weights
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.core.step_input import StepInput
from specbatch.drafters.feature_head import FeatureChain
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.step import DecodeStep
from specbatch.kernels.gemm.quantized import fp8_activations
from specbatch.kernels.gemm.quantized.fp8_activations import quantizes
from specbatch.training.data import Batch
from specbatch.training.target import Target

CPU = torch.device("cpu")
QUANTIZED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 260, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "quantization_config": QUANTIZED,
}  # fmt: skip
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip
NEXT = MOE | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 256,
    "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PLAIN = {key: value for key, value in DENSE.items() if key != "quantization_config"}
KEPT = "FP8 weights: kept"
ON = "FP8 activations: on, quantized per token and 128 columns"
OFF = "FP8 activations: off, they are float16"
NO_EFFECT = "fp8_activations: off has no effect: this model has no FP8 GEMM on this device"
PROMPTS = [[5, 6, 7, 8, 9] * 3, [3, 1, 4, 1, 5, 9, 2]]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
GRAPHS = Graphs(decode="whole", prefill="piecewise")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture
def build(tmp_path: Path, stay_quantized: Callable[..., None]) -> Iterator[Callable[..., Engine]]:
    """`build(shape, **settings)`; weights stay FP8 on a CPU, too."""
    engines: list[Engine] = []
    stay_quantized()

    def build(
        shape: dict[str, Any],
        log: Callable[[str], None] | None = None,
        weights_of: Engine | None = None,
        **settings: Any,
    ) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(shape))
        settings = {"device": "cpu", "dtype": "float16", "max_running": 4, "max_model_len": 60} | settings
        config = EngineConfig(model=str(tmp_path), load_format="dummy", **settings)
        engines.append(Engine(config, log=log, weights_of=weights_of))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def passes(watch: Watch) -> set[tuple[str, bool]]:
    """(kind of pass, whether it quantizes activations) of every FP8 GEMM."""
    found: set[tuple[str, bool]] = set()
    place = ["prompt"]
    watch(DecodeStep, "__call__", before=lambda *_: place.append("decode"), after=lambda *_: place.pop())
    watch(fp8_activations, "quantizes", after=lambda quantized, x: found.add((place[-1], quantized)))
    return found


RIGHT = {("prompt", True), ("decode", True)}
SPECULATIONS = {
    "none": (DENSE, Speculation()),
    "experts": (MOE, Speculation()),
    "self": (DENSE, Speculation("standalone", draft="self:skip=1", draft_tokens=2)),
    "mtp": (NEXT, Speculation("mtp", draft_tokens=2)),
}


@pytest.mark.parametrize("name", SPECULATIONS)
def test_prompts_and_decode_steps_are_quantized(
    build: Callable[..., Engine], passes: set[tuple[str, bool]], name: str
) -> None:
    shape, speculation = SPECULATIONS[name]
    engine = build(shape, speculation=speculation, prefill_chunk=8)
    assert engine.caps["fp8_activations"] == "on"
    engine.generate(PROMPTS, PARAMS)
    assert passes == RIGHT
    passes.clear()
    engine.score([(PROMPTS[0], PROMPTS[1])])
    assert passes == {("prompt", True)}


def test_draft_models_catch_up_with_quantized_activations(
    build: Callable[..., Engine], passes: set[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [0, 0, 0, 2, 2, 2, 2]
    planned_draft_lengths(monkeypatch, plan)
    spec = Speculation("standalone", draft="self:skip=1", draft_tokens="auto", draft_steps=2, schedule="v1")
    engine = build(DENSE, speculation=spec, prefix_cache=False)
    passes.clear()
    engine.generate(PROMPTS[:1], PARAMS)
    assert len(plan) < 4
    assert passes == RIGHT


def test_heads_consume_pending_inputs_with_quantized_activations(
    build: Callable[..., Engine], passes: set[tuple[str, bool]], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the draft length is reduced, outside of any decode step."""
    seen: list[int] = []

    def begin(chain: FeatureChain, step: StepInput) -> None:
        seen.append(step.num_drafts)
        passes.clear()

    def check(*_: Any) -> None:
        assert {quantized for _, quantized in passes} == {True}

    watch(FeatureChain, "shorten", before=begin, after=check)
    planned_draft_lengths(monkeypatch, [2, 2, 1, 2, 0, 2, 1], after=1)
    engine = build(NEXT, speculation=Speculation("mtp", draft_tokens="auto", draft_steps=2, schedule="v1"))
    seen.clear()
    engine.generate(PROMPTS[:1], PARAMS)
    assert seen[:2] == [1, 0]


@pytest.mark.parametrize("on", [True, False])
def test_diagnosis_uses_the_setting_of_the_run(
    build: Callable[..., Engine], watch: Watch, low_acceptance_from: Callable[[int], None], on: bool
) -> None:
    low_acceptance_from(1)
    seen = watch(FeatureChain, "diagnose", before=lambda *_: quantizes(torch.zeros(1).half()))
    engine = build(NEXT, speculation=Speculation("mtp", draft_tokens=2), fp8_activations=on)
    engine.generate(PROMPTS, PARAMS)
    assert seen == [on]


@pytest.mark.parametrize(
    ("shape", "settings", "expected"),
    [
        (DENSE, {}, [KEPT, ON]),
        (DENSE, {"fp8_activations": False}, [KEPT, OFF]),
        (DENSE, {"dtype": "float32"}, [KEPT, OFF.replace("16", "32")]),
        (DENSE, {"dtype": "float32", "fp8_activations": False}, [NO_EFFECT, KEPT, OFF.replace("16", "32")]),
        (PLAIN, {"fp8_activations": False}, [NO_EFFECT]),
        (
            DENSE | {"head_dim": 48},
            {},
            [
                f"{KEPT}, but 6 dequantized to float16, as their matrices are no whole number of scale blocks, such as "
                "model.layers.0.self_attn.k_proj.weight",
                ON,
            ],
        ),
    ],
    ids=["on", "off", "float32", "float32-off", "plain", "odd"],
)
def test_the_log_and_the_record(
    build: Callable[..., Engine],
    passes: set[tuple[str, bool]],
    shape: dict[str, Any],
    settings: dict[str, Any],
    expected: list[str],
) -> None:
    lines: list[str] = []
    engine = build(shape, log=lines.append, **settings)
    assert fp8_lines(lines) == expected
    assert engine.record().caps["fp8_activations"] == ("on" if ON in expected else "off")
    engine.generate(PROMPTS, PARAMS)
    assert passes == (RIGHT if ON in expected else set() if shape is PLAIN else {(kind, False) for kind, _ in RIGHT})


def fp8_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("FP8", "fp8_activations", "draft: FP8"))]


def test_only_the_draft_is_fp8(build: Callable[..., Engine], tmp_path: Path, passes: set[tuple[str, bool]]) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(DENSE))
    lines: list[str] = []
    draft = Speculation("standalone", draft=str(tmp_path / "draft"), draft_tokens=2)
    engine = build(PLAIN, log=lines.append, speculation=draft)
    assert fp8_lines(lines) == [f"draft: {KEPT}", ON]
    assert engine.caps["fp8_activations"] == "on"
    engine.generate(PROMPTS, PARAMS)
    assert passes == RIGHT


def test_a_cpu_dequantizes_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    lines: list[str] = []
    with Engine(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu"), log=lines.append) as engine:
        assert engine.caps["fp8_activations"] == "off"
    assert "FP8 weights: dequantized to float32, as this device has no FP8 GEMM" in lines


def test_other_values_are_refused() -> None:
    with pytest.raises(SpecbatchError, match="fp8_activations='on': use a boolean"):
        EngineConfig(fp8_activations="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("fp8", [True, False])
def test_graphs_are_captured_with_the_setting(fp8: bool) -> None:
    seen: list[bool] = []

    class Item:
        def __len__(self) -> int:
            return 1

        def capture(self) -> Iterator[None]:
            seen.append(fp8_activations.quantizes(torch.zeros(1).half()))
            yield

    worker: Any = SimpleNamespace(
        recordings=lambda: [Item(), Item()],
        batch=SimpleNamespace(device=CPU),
        _fp8=fp8,
        deterministic=False,
        warm_ups=list,
    )
    assert DeviceWorker.record_graphs(worker, lambda done, total: None) == 2
    assert seen == [fp8] * 2
    assert not fp8_activations.quantizes(torch.zeros(1).half())


def test_training_quantizes_the_targets_activations(
    build: Callable[..., Engine], passes: set[tuple[str, bool]], tmp_path: Path
) -> None:
    build(DENSE)
    for dtype, quantized in ((torch.float16, True), (torch.float32, False)):
        passes.clear()
        target = Target(weights.open_checkpoint(str(tmp_path), "dummy"), dtype, CPU, 8)
        target.features(Batch(torch.ones(2, 4, dtype=torch.int64), torch.tensor([1, 1]), torch.tensor([4, 4])), ())
        assert passes == {("prompt", quantized)}


def test_engines_that_share_weights_can_have_different_settings(
    build: Callable[..., Engine], passes: set[tuple[str, bool]]
) -> None:
    """Each logs its own setting, and nothing of weights that another one has loaded."""
    lines: list[str] = []
    first = build(DENSE)
    second = build(DENSE, log=lines.append, fp8_activations=False, weights_of=first)
    assert fp8_lines(lines) == [OFF]
    for engine, quantized in ((first, True), (second, False), (first, True)):
        passes.clear()
        engine.generate(PROMPTS, PARAMS)
        assert passes == {("prompt", quantized), ("decode", quantized)}


# On a GPU

LONG = [[(7 * i + 3 * j) % 250 for i in range(length)] for j, length in enumerate((50, 9, 33))]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shape", [DENSE, MOE, NEXT], ids=["dense", "moe", "next"])
def test_logits_are_near_those_of_bfloat16_activations(build: Callable[..., Engine], shape: dict[str, Any]) -> None:
    """And nearer to those of other chunk sizes: attention and GEMMs of few rows differ in their last bits, so that some
    values are quantized to the other side."""
    found = {}
    for name, settings in {
        "off": {"fp8_activations": False},
        "on": {},
        "chunks": {"prefill_chunk": 16},
        "graphs": {"graphs": GRAPHS},
    }.items():
        engine = build(shape, device="cuda", dtype="bfloat16", prefix_cache=False, **settings)
        found[name] = torch.stack([engine.next_logits(list(prompt)) for prompt in LONG])
    noise = difference(found["on"], found["off"])
    assert 0.002 < noise < 0.5  # a token may go to another expert
    assert difference(found["chunks"], found["on"]) <= noise
    assert difference(found["graphs"], found["on"]) <= noise


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("graphs", [Graphs(), GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", SPECULATIONS)
def test_decode_steps_on_a_gpu_are_quantized(
    build: Callable[..., Engine], passes: set[tuple[str, bool]], name: str, graphs: Graphs
) -> None:
    """Also from CUDA graphs."""
    shape, speculation = SPECULATIONS[name]
    engine = build(shape, device="cuda", dtype="bfloat16", speculation=speculation, graphs=graphs)
    engine.generate(PROMPTS, PARAMS)
    assert passes == RIGHT
