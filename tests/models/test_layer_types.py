"""Kinds of layers: windows as the configs of transformers have them, and lists that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from targets import SIZES, TARGETS

from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.layer_types import attending


def test_windows_of_layers() -> None:
    """With the defaults of the classes of transformers."""

    def read(family: str, **changes: Any) -> tuple[int | None, ...]:
        described = {"architectures": None, "model_type": family, "max_position_embeddings": 8192}
        return ModelConfig.from_dict(SIZES | described | changes).windows

    some = ["full_attention", "sliding_attention"] * 2
    used = {"use_sliding_window": True, "sliding_window": 64}
    assert read("mistral", sliding_window=64) == (64,) * 4
    assert read("mistral") == (4096,) * 4
    assert read("mistral", sliding_window=64, layer_types=some) == (64,) * 4  # its class has one kind of layer
    assert read("mistral", sliding_window=64, use_sliding_window=False) == (64,) * 4  # which it does not read
    assert read("ministral", sliding_window=64, layer_types=some) == (None, 64, None, 64)
    assert read("qwen2", **used, max_window_layers=3) == (None, None, None, 64)
    assert read("qwen3", **used, layer_types=some) == (None, 64, None, 64)
    moe = SIZES | TARGETS["qwen3-moe"] | {"sliding_window": 9, "layer_types": some, "max_window_layers": 3}
    assert ModelConfig.from_dict(moe | {"use_sliding_window": True}).windows == (9,) * 4
    assert ModelConfig.from_dict(moe).windows == ()
    for off in ({"sliding_window": None}, {"sliding_window": 8192}, {"max_position_embeddings": 512}):
        assert read("mistral", **off) == ()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}),
        (
            "qwen2",
            {"sliding_window": 4096, "max_window_layers": SIZES["num_hidden_layers"], "use_sliding_window": True},
        ),
        ("qwen3", {"layer_types": ["full_attention"] * SIZES["num_hidden_layers"]}),
    ],
)
def test_disabled_sliding_window_is_ignored(family: str, changes: dict[str, Any]) -> None:
    plain = SIZES | {"model_type": family}
    assert ModelConfig.from_dict(plain | changes) == ModelConfig.from_dict(plain)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, "sliding_window=64"),
        ("qwen2", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window=0"),
        ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding_window=None"),
        ("qwen3", {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types='chunked_attention'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types='1 entries'"),
    ],
)
def test_windows_that_no_model_has_are_refused(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecbatchError, match=named):
        ModelConfig.from_dict(SIZES | {"model_type": family} | changes)


def test_layers_with_attention() -> None:
    known = "conv", "full_attention"
    assert attending(["conv", "full_attention", "conv"], 3, known, "LFM2 has") == (False, True, False)
    with pytest.raises(SpecbatchError, match=r"layer_types='ssm': LFM2 has 'conv' and 'full_attention' layers"):
        attending(["conv", "ssm"], 2, known, "LFM2 has")
    with pytest.raises(SpecbatchError, match=r"layer_types='1 entries': num_hidden_layers is 2"):
        attending(["conv"], 2, known, "LFM2 has")
