"""Bytes of a step, of models whose sizes are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbatch import Engine
from specbatch.config.engine_config import EngineConfig
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import parameter_count
from specbatch.sweeps.bench.traffic import hit_experts, moved_states, step_bytes, used_bytes
from specbatch.weights.dummy import SHAPES

WORK = {"input_len": 512, "output_len": 288}  # a mean context of 656 tokens


def engine_of(model: ModelConfig, device: str, **caps: Any) -> Any:
    config = SimpleNamespace(state_dtype="fp32")
    found = {"dtype": "bfloat16", "kv_pages": 1, "page_size": 16, "kv_bytes": 16, "verify_rows": 1} | caps
    return SimpleNamespace(caps=found, model_config=model, device=torch.device(device), config=config)


def test_bytes_of_a_step_of_qwen3_8b() -> None:
    model = ModelConfig.from_dict(SHAPES["qwen3-8b"])
    hidden, mlp, layers, vocabulary, kv = 4096, 12288, 36, 151936, 8 * 128
    matrices = hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * mlp
    used = layers * (matrices + 2 * hidden + 2 * 128) + hidden + vocabulary * hidden
    assert used_bytes(model, 32, torch.bfloat16, torch.device("cpu")) == 2 * used
    assert 2 * used / 1e9 == pytest.approx(15.14, abs=0.005)
    kv_token = 2 * layers * kv * 2
    moved = step_bytes(engine_of(model, "cpu", kv_pages=100, kv_bytes=1600 * kv_token), 32, WORK)
    assert moved == 2 * used + 32 * 656 * 147456


def test_a_tied_embedding_is_read_once() -> None:
    model = ModelConfig.from_dict(SHAPES["smollm2-135m"])
    assert used_bytes(model, 1, torch.bfloat16, torch.device("cpu")) == 2 * parameter_count(model)


def test_experts_that_are_hit() -> None:
    assert hit_experts(512, 10, 1) == pytest.approx(10)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(7, 40, generator=generator).topk(5).indices.unique().numel() for _ in range(3000)]
    assert hit_experts(40, 5, 7) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_bytes_of_a_step_of_qwen3_next_in_fp8() -> None:
    """Of a layer's 512 experts a token uses 10; the matrix state of 6 layers is 13 MB."""
    model = ModelConfig.from_dict(SHAPES["qwen3-next-80b-a3b-fp8"] | {"num_hidden_layers": 8})  # of 48
    hidden, layers, vocabulary = 2048, 8, 151936
    expert, cuda = 3 * 512 * hidden * (1 + 4 / 128**2), torch.device("cuda")  # a CPU dequantizes FP8
    one, many = (used_bytes(model, tokens, torch.bfloat16, cuda) for tokens in (1, 100_000))
    assert many - one == pytest.approx(layers * 502 * expert, rel=1e-9)
    delta = hidden * (12288 + 4096) * (1 + 4 / 128**2) + 2 * (64 * hidden + 8192 * 4 + 64 + 128)
    attention = 2 * hidden * (8192 + 2 * 512) + 4096 * hidden * (1 + 4 / 128**2) + 2 * 512  # q, k, v are dequantized
    every = expert + 2 * (513 * hidden + 2 * hidden)  # shared expert, routers, norms
    rest = 2 * (vocabulary * hidden + hidden)
    assert one == pytest.approx(6 * delta + 2 * attention + layers * (every + 10 * expert) + rest, rel=1e-9)
    types = {"activation": torch.bfloat16, "state": torch.float32, "float32": torch.float32}
    state, window = 32 * 128 * 128 * 4, 3 * 8192 * 2
    pending = 8192 * 2 + 4 * (16 * 128 + 32 * 128 + 32)
    assert moved_states(model, 4, types) == 2 * 6 * (state + window + 4 * pending)
    moved = step_bytes(engine_of(model, "cuda", verify_rows=4), 8, WORK)  # one byte of KV per token
    assert moved == used_bytes(model, 32, torch.bfloat16, cuda) + 8 * (moved_states(model, 4, types) + 656)


def test_caps_give_the_kv_bytes_of_a_token() -> None:
    with Engine(EngineConfig(model="toy", load_format="dummy", device="cpu", kv_pages=30)) as engine:
        moved = step_bytes(engine, 2, {"input_len": 8, "output_len": 12})
        weights = used_bytes(engine.model_config, 2, torch.float32, engine.device)
    assert moved == weights + 2 * (8 + 6) * 2 * 4 * 2 * 16 * 4  # k and v, layers, kv heads, head_dim, float32
