"""Deterministic mode on a CUDA device: no bit of a result depends on what is computed with it, or how."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import lossless
import pytest
import torch
from company import Company, differing
from lossless import Case
from stand_ins import late_results, random_draft_lengths
from targets import LATENT, SIZES, SPECULATIONS, TargetCheckpoint, Targets, random_weights

from specbatch import Completion, SamplingParams
from specbatch.kernels.attention.deterministic import span_attention_triton
from specbatch.kernels.gemm.dense import skinny_gemm_triton
from specbatch.kernels.gemm.dense.skinny_gemm_configs import tile_for
from specbatch.kernels.gemm.deterministic import fixed_order
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights.dummy import DummyCheckpoint
from specbatch.weights.shapes import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

BF16, FP16 = torch.bfloat16, torch.float16


RECURRENT = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h", "nemotron-h-moe", "lfm2")
WINDOWS = ("mistral", "ministral", "gemma3", "gpt-oss")
OTHERS = ("phi3", "glm4-moe", "minimax-m2", "gemma4", "gemma4-moe", "lfm2-moe")


class Wide(TargetCheckpoint):
    """A dense model, some of whose GEMMs add their columns in parts."""

    def __init__(self, architecture: str, **more: Any) -> None:
        self.sizes = SIZES | {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1000, "max_position_embeddings": 1024,
            "architectures": [architecture],
        } | more  # fmt: skip
        self.config = ModelConfig.from_dict(self.sizes)
        self.tensors = random_weights(tensor_shapes(self.config), 1.0)


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("llama", BF16, None),
        ("llama", FP16, None),
        ("Qwen2ForCausalLM", BF16, None),
        ("Qwen3ForCausalLM", BF16, None),
        ("Qwen3ForCausalLM", FP16, None),
        ("Qwen3ForCausalLM", BF16, torch.float8_e4m3fn),
        ("qwen3-moe", BF16, None),
    ],
)
def test_logits_do_not_depend_on_company(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    target = Wide(name) if name.startswith("Qwen") else name
    company = Company(target, dtype, device=torch.device("cuda"), kv_dtype=kv_dtype)
    rng = Random(f"{name} {dtype}")
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0
    assert differing(company, [rng.randrange(1, 60) for _ in range(128)], rng, 1) == 0


@pytest.mark.parametrize(("dtype", "state"), [(BF16, "fp32"), (FP16, "fp32"), (BF16, "bf16")])
@pytest.mark.parametrize("name", RECURRENT)
def test_logits_of_recurrent_models_do_not_depend_on_company(name: str, dtype: torch.dtype, state: str) -> None:
    company, rng = Company(name, dtype, state, torch.device("cuda")), Random(f"{name} {dtype} {state}")
    assert differing(company, [150, 9, 70, 300], rng, 3) == 0
    assert differing(company, [rng.randrange(1, 40) for _ in range(64)], rng, 1) == 0


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "NemotronHForCausalLM"])
def test_logits_of_wide_recurrent_models_do_not_depend_on_company(name: str) -> None:
    """Heads as large as those of published models."""
    delta = {
        "model_type": "qwen3_5_text", "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    mamba = {
        "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "hybrid_override_pattern": "M-*-",
    }  # fmt: skip
    company = Company(Wide(name, **(mamba if "Nemotron" in name else delta)), BF16, device=torch.device("cuda"))
    assert differing(company, [400, 150, 9, 70], Random(name), 2) == 0


@pytest.mark.parametrize("name", ["llama", "Qwen3ForCausalLM", "qwen3-moe", *RECURRENT, *WINDOWS, *LATENT])
def test_float32_logits_do_not_depend_on_company(name: str) -> None:
    target = Wide(name) if name.startswith("Qwen3For") else name
    company, rng = Company(target, torch.float32, device=torch.device("cuda")), Random(name)
    assert differing(company, [300, 70, 9], rng, 2) == 0
    assert differing(company, [rng.randrange(1, 40) for _ in range(40)], rng, 1) == 0


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [*WINDOWS, "Gemma3ForCausalLM"])
def test_logits_of_models_with_windows_do_not_depend_on_company(name: str, kv_dtype: torch.dtype | None) -> None:
    """Windows of a few keys, and in a model with wide heads of more than a span."""
    wide = {"head_dim": 256, "num_attention_heads": 8, "sliding_window": 200, "sliding_window_pattern": 2}
    target = name if name in WINDOWS else Wide(name, **wide)
    company, rng = Company(target, BF16, device=torch.device("cuda"), kv_dtype=kv_dtype), Random(name)
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0
    assert differing(company, [rng.randrange(1, 60) for _ in range(128)], rng, 1) == 0


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (FP16, None), (BF16, torch.float8_e4m3fn)])
@pytest.mark.parametrize("name", [*LATENT, "deepseek-v2-lite", "deepseek-v2-lite with 128 heads"])
def test_logits_of_latent_attention_do_not_depend_on_company(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    target: str | DummyCheckpoint = name
    if name not in LATENT:
        heads = {"num_attention_heads": 128, "num_key_value_heads": 128} if "128" in name else {}
        few = {"num_hidden_layers": 2, "vocab_size": 1000, "n_routed_experts": 8, "eos_token_id": None}
        config = ModelConfig.from_dict(SHAPES["deepseek-v2-lite"] | few | heads)
        target = DummyCheckpoint(config, name="latents", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(target, dtype, device=torch.device("cuda"), kv_dtype=kv_dtype), Random(name)
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0
    assert differing(company, [rng.randrange(1, 60) for _ in range(128)], rng, 1) == 0


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (FP16, None), (BF16, torch.float8_e4m3fn)])
@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e2b"])
def test_logits_of_wide_heads_do_not_depend_on_company(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Heads of 512 channels beside those of 256."""
    few: dict[str, Any] = {"num_hidden_layers": 6, "vocab_size": 1000, "layer_types": None, "eos_token_id": None}
    if name == "gemma-4-e2b":
        few |= {"vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 5}
        few |= {"num_hidden_layers": 10, "layer_types": SHAPES[name]["layer_types"][:10]}
    config = ModelConfig.from_dict(SHAPES[name] | few)
    assert config.head_dim == 512
    target = DummyCheckpoint(config, name="wide", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(target, dtype, device=torch.device("cuda"), kv_dtype=kv_dtype), Random(name)
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0
    assert differing(company, [rng.randrange(1, 60) for _ in range(128)], rng, 1) == 0


def test_fp8_logits_do_not_depend_on_company() -> None:
    sizes = Wide("Qwen3ForCausalLM").sizes | {"quantization_config": SHAPES["qwen3-8b-fp8"]["quantization_config"]}
    checkpoint = DummyCheckpoint(ModelConfig.from_dict(sizes), name="fp8", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(checkpoint, BF16, device=torch.device("cuda"), trees=False), Random(0)
    with use_fp8_activations(True):
        assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_logits_do_not_depend_on_company(group: int) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    sizes = Wide("Qwen3ForCausalLM").sizes | {"quantization_config": quantization}
    checkpoint = DummyCheckpoint(ModelConfig.from_dict(sizes), name="int4", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(checkpoint, BF16, device=torch.device("cuda"), trees=False), Random(0)
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0


def test_logits_of_fp8_experts_do_not_depend_on_company() -> None:
    few = {"num_hidden_layers": 4, "vocab_size": 1000, "num_experts": 16, "eos_token_id": None}
    sizes = SHAPES["qwen3-next-80b-a3b-fp8"] | few
    checkpoint = DummyCheckpoint(ModelConfig.from_dict(sizes), name="fp8", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(checkpoint, BF16, device=torch.device("cuda"), trees=False), Random(0)
    with use_fp8_activations(True):
        assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0


def test_logits_of_mxfp4_experts_do_not_depend_on_company() -> None:
    few = {"num_hidden_layers": 2, "vocab_size": 1000, "num_local_experts": 8, "eos_token_id": None}
    sizes = SHAPES["gpt-oss-20b"] | few
    checkpoint = DummyCheckpoint(ModelConfig.from_dict(sizes), name="mxfp4", seed=0, tokenizer=None, device="cuda")
    company, rng = Company(checkpoint, BF16, device=torch.device("cuda"), trees=False), Random(0)
    assert differing(company, [600, 150, 9, 70, 300], rng, 3) == 0


def test_without_the_mode_they_do() -> None:
    company, rng = Company(Wide("Qwen3ForCausalLM"), BF16, device=torch.device("cuda"), trees=False), Random(0)
    texts = [[rng.randrange(3, 37) for _ in range(length)] for length in (150, 40)]
    alone = [company.alone(text) for text in texts]
    assert any(not torch.equal(one, other) for one, other in zip(alone, company.together(texts, rng), strict=True))


def _other_spans(*args: Any, prefill: Callable[..., Any] = span_attention_triton.prefill_attention) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_attention_triton, "SPAN", 256)
        return prefill(*args)


def _divided_columns(n: int, k: int, **how: Any) -> Any:
    """Of few rows, as without the mode."""
    return tile_for(n, k, 16, **how)


def _sum_that_is_not_rounded(
    *args: Any, gated: Callable[..., Any] = skinny_gemm_triton.skinny_gated, **how: Any
) -> torch.Tensor:
    return gated(*args, **how | {"rounded": False})


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        (span_attention_triton, "prefill_attention", _other_spans),
        (fixed_order, "undivided_tile_for", _divided_columns),
        (skinny_gemm_triton, "skinny_gated", _sum_that_is_not_rounded),
    ],
)
def test_every_rule_is_needed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, without: Any) -> None:
    monkeypatch.setattr(owner, name, without)
    company = Company(Wide("Qwen3ForCausalLM"), BF16, device=torch.device("cuda"), trees=False)
    assert differing(company, [400, 150], Random(0), 1) > 0


_SAMPLED = [SamplingParams(**{**vars(params), "max_new_tokens": lossless.LONGER}) for params in lossless.SAMPLED]


def _cases() -> list[Any]:
    """Every kind of drafts, with schedules, graphs and memory settings in turn."""
    drafters = [
        name for name, how in SPECULATIONS.items() if how.get("verification") != "block" and not name.startswith("mtp")
    ]
    turns = itertools.cycle(itertools.product(("v1", "v2", "v2-late"), ("both", "eager", "whole"), lossless.MEMORY))
    return [
        pytest.param(Case(drafter, schedule, graphs, memory, "llama"), id=f"{drafter} {schedule} {graphs} {memory}")
        for drafter in drafters
        for schedule, graphs, memory in itertools.islice(turns, 2)
    ]


@pytest.mark.parametrize("case", _cases())
def test_results_do_not_depend_on_draft_schedule_graphs_and_memory(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    if case.schedule == "v2-late":
        late_results(monkeypatch)
    if case.is_auto:
        random_draft_lengths(monkeypatch)
    settings = case.settings() | {"dtype": "bfloat16", "deterministic": True, "device": "cuda"}
    engine = targets.engine(case.target, case.drafter, case.schedule[:2], **settings)
    expected = _one_by_one(targets, case.target)
    assert _results(engine.generate(targets.prompts(case.target), _SAMPLED)) == expected
    assert _results(engine.generate(targets.prompts(case.target), _SAMPLED)) == expected  # with cached prefixes
    record = engine.record()
    assert record.caps["deterministic"] == "on"
    if case.drafter != "none":
        assert record.metrics["drafted_tokens"]


def _cases_of_other_models() -> list[Any]:
    turns = itertools.cycle(itertools.product(("v1", "v2", "v2-late"), ("both", "eager", "whole"), lossless.MEMORY))
    targets = *RECURRENT, *WINDOWS, *LATENT, *OTHERS
    pairs = itertools.product(("none", "ngram", "ngram-tree", "mtp", "eagle3", "model-auto"), targets)
    return [
        pytest.param(case := Case(drafter, *next(turns), target), id=str(case))
        for drafter, target in pairs
        if drafter in SPECULATIONS
    ]


@pytest.mark.parametrize("case", _cases_of_other_models())
def test_results_of_other_models(targets: Targets, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    test_results_do_not_depend_on_draft_schedule_graphs_and_memory(targets, monkeypatch, case)


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle3"])
def test_results_of_many_requests_at_once(targets: Targets, drafter: str) -> None:
    """More rows than the kernels for few rows take."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "device": "cuda", "max_running": 24}
    engine = targets.engine("llama", drafter, graphs=lossless.GRAPHS["both"], **settings)
    done = engine.generate(targets.prompts("llama") * 4, _SAMPLED * 4)
    assert _results(done) == _one_by_one(targets, "llama") * 4


@pytest.mark.parametrize("target", ["llama", "qwen3.5", "nemotron-h", "gemma3"])
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_float32_results(targets: Targets, drafter: str, target: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "deterministic": True, "device": "cuda"}
    engine = targets.engine(target, drafter, graphs=lossless.GRAPHS["both"], **settings)
    done = engine.generate(targets.prompts(target), _SAMPLED)
    assert _results(done) == _one_by_one(targets, target, "float32")


@pytest.mark.parametrize("target", ["llama", "gemma3", "gpt-oss", "deepseek-v2"])
@pytest.mark.parametrize("drafter", ["none", "ngram-tree", "eagle3", "model"])
def test_results_with_an_fp8_cache(targets: Targets, drafter: str, target: str) -> None:
    """Twice: then with prefixes from the cache."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "fp8", "deterministic": True, "device": "cuda"}
    engine = targets.engine(target, drafter, graphs=lossless.GRAPHS["both"], prefill_chunk=5, **settings)
    for _ in range(2):
        done = engine.generate(targets.prompts(target), _SAMPLED)
        assert _results(done) == _one_by_one(targets, target, kv_dtype="fp8")


@cache
def _one_by_one(targets: Targets, name: str, dtype: str = "bfloat16", kv_dtype: str = "auto") -> list[Any]:
    """The baseline's results, one request at a time."""
    settings: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "deterministic": True, "device": "cuda"}
    engine = targets.engine(name, "none", "v1", max_running=1, prefix_cache=False, **settings)
    pairs = zip(targets.prompts(name), _SAMPLED, strict=True)
    return [result for prompt, params in pairs for result in _results(engine.generate([prompt], params))]


def _results(done: list[Completion]) -> list[Any]:
    return [(item.token_ids, item.logprobs) for item in done]
