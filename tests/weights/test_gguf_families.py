"""Phi-3 to Phi-4 (fused projections, windows, LongRoPE), Mistral and Ministral (windows) and LFM2 (convolutions) in
GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from uncached import decoder_of, logits_of

from specbatch.errors import SpecbatchError
from specbatch.weights import open_checkpoint

Make = Callable[..., Any]
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 298, "eos_token_id": 299,
}  # fmt: skip
ORIGINAL = 24
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0, 2.5, 3.5], "long_factor": [1.5, 3.0, 5.0, 9.0, 10.0, 12.0]}
KEYS = {"phi3.attention.sliding_window": 0, "phi3.rope.dimension_count": 12}
LONG = {
    "phi3.rope.scaling.original_context_length": ORIGINAL,
    "phi3.rope.scaling.attn_factor": (1 + math.log(96 / ORIGINAL, ORIGINAL)) ** 0.5,
}
TENSORS = {
    f"rope_factors_{key.removesuffix('_factor')}.weight": np.array(factors, np.float32)
    for key, factors in FACTORS.items()
}


def random(model: Any) -> Any:
    """With random weights and norms, so that each matters."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.eval()


def phi3(**changes: Any) -> Any:
    return random(hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES | changes)))


def check(path: Path, model: Any, count: int, max_model_len: int | None = None) -> None:
    """The logits of the file are those of the model."""
    ours = decoder_of(open_checkpoint(str(path), max_model_len=max_model_len))
    tokens = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(ours, tokens), expected, rtol=0, atol=1e-5)


def test_longrope(write_gguf: Make) -> None:
    model = phi3(
        partial_rotary_factor=0.75,
        original_max_position_embeddings=ORIGINAL,
        rope_scaling={"type": "longrope", **FACTORS},
    )
    path = write_gguf(model, pre="gpt-4o", metadata=KEYS | LONG, extra_tensors=TENSORS)
    assert open_checkpoint(str(path)).config.windows == ()
    check(path, model, ORIGINAL)
    check(path, model, 90, max_model_len=96)


def test_window_of_all_layers(write_gguf: Make) -> None:
    model = phi3(sliding_window=7, tie_word_embeddings=True)
    path = write_gguf(model, metadata={"phi3.attention.sliding_window": 7})
    assert open_checkpoint(str(path)).config.windows == (7, 7)
    check(path, model, 40)


@pytest.mark.parametrize("pattern", [None, [True, False]])
def test_windows_of_mistral(write_gguf: Make, pattern: list[bool] | None) -> None:
    """Its files have the architecture of Llama, and its order of the rows of q and k."""
    if pattern is None:
        model, keys = random(hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=7))), {}
    else:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        config = hf.MinistralConfig(**SIZES, head_dim=16, sliding_window=7, layer_types=kinds)
        model = random(hf.MinistralForCausalLM(config))
        keys = {"llama.attention.sliding_window_pattern": pattern}
    path = write_gguf(model, metadata={"llama.attention.sliding_window": 7} | keys)
    assert open_checkpoint(str(path)).config.windows == (7, 7 if pattern is None else None)
    check(path, model, 40)
    wrong = {"llama.attention.sliding_window": 7, "llama.attention.sliding_window_pattern": 2}
    with pytest.raises(SpecbatchError, match="sliding_window_pattern=2: it must have true or false for each layer"):
        open_checkpoint(str(write_gguf(model, name="wrong", metadata=wrong)))


def test_convolutions(write_gguf: Make) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    kinds = ["conv", "full_attention", "conv"]
    more = {"num_hidden_layers": 3, "layer_types": kinds, "norm_eps": 1e-3, "block_auto_adjust_ff_dim": False}
    model = random(hf.Lfm2ForCausalLM(hf.Lfm2Config(**sizes | more)))
    keys = {"lfm2.shortconv.l_cache": 3, "tokenizer.ggml.add_bos_token": True}
    path = write_gguf(model, pre="lfm2", metadata=keys)
    check(path, model, 40)
    assert open_checkpoint(str(path)).tokenizer().encode("a")[0] == 298
    wrong = write_gguf(model, name="wrong", metadata=keys | {"lfm2.attention.head_count_kv": [0, 2]})
    with pytest.raises(SpecbatchError, match="layer_types='2 entries': num_hidden_layers is 3"):
        open_checkpoint(str(wrong))


def test_files_that_are_not_whole_are_refused(write_gguf: Make) -> None:
    model = phi3(partial_rotary_factor=0.75)

    def refusal(**how: Any) -> str:
        with pytest.raises(SpecbatchError) as error:
            open_checkpoint(str(write_gguf(model, **how)))
        return str(error.value)

    name, other = TENSORS
    one = {name: TENSORS[name]}
    assert f"tensor {other} must be a vector" in refusal(metadata=KEYS | LONG, extra_tensors=one)
    assert "original_context_length" in refusal(metadata=KEYS, extra_tensors=TENSORS)
    short = {name: TENSORS[name], other: TENSORS[other][:3]}
    assert "long_factor" in refusal(metadata=KEYS | LONG, extra_tensors=short)
    key = {"phi3.rope.scaling.attn_factor": 1.2, "phi3.rope.scaling.type": "linear"}
    assert "phi3.rope.scaling" in refusal(metadata=KEYS | key)
