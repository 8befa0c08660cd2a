"""Parity with transformers on tiny random checkpoints: prefill, chunked prefill, step by step, padded batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata, PromptChunk, positions_from
from specbatch.kernels.attention.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder

PAGE = 4
PAGES = 40
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8, attention_bias=True, mlp_bias=True)),
    "llama-llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**(SIZES | {"num_attention_heads": 4}))),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**(SIZES | {"num_attention_heads": 4}), rope_parameters=YARN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=False)),
}


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Any, Decoder, KVCache]:
    """A transformers model and ours with the same weights; norms and biases are random, so that they matter."""
    torch.manual_seed(5)
    theirs = FAMILIES[request.param]().eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter.shape[1] ** 0.5)
    config = ModelConfig.from_dict(theirs.config.to_dict())
    ours = Decoder(
        config,
        theirs.state_dict().__getitem__,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=512,
    )
    cache = KVCache(
        config,
        config.num_layers,
        PAGES,
        PAGE,
        torch.float32,
        torch.device("cpu"),
        prefill_backend("torch", torch.device("cpu"), torch.float32, 16),
    )
    return theirs, ours, cache


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 131, (length,), generator=generator) for length in lengths]


def page_table(lengths: list[int]) -> torch.Tensor:
    """Scattered pages, none shared, none of them page 0."""
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)) + 1
    width = -(-max(lengths) // PAGE)
    return pages[: len(lengths) * width].view(len(lengths), width)


def expected(theirs: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = theirs(tokens[None]).logits[0]
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


def test_prefill_of_a_ragged_batch(pair: tuple[Any, Decoder, KVCache]) -> None:
    theirs, ours, cache = pair
    batch = sequences(21, 1, 9)
    table = page_table([21, 1, 9])
    metadata = PrefillMetadata(table, [PromptChunk(i, 0, len(item)) for i, item in enumerate(batch)], PAGE)
    logits = ours.logits(ours.forward(torch.cat(batch), metadata.positions, metadata.bind(cache)).last)
    for part, item in zip(logits.split([21, 1, 9]), batch, strict=True):
        close(part, expected(theirs, item))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill(pair: tuple[Any, Decoder, KVCache], chunk: int) -> None:
    theirs, ours, cache = pair
    (tokens,) = sequences(21)
    table = page_table([21])
    parts = []
    for start in range(0, 21, chunk):
        metadata = PrefillMetadata(table, [PromptChunk(0, start, min(start + chunk, 21))], PAGE)
        parts.append(
            ours.logits(ours.forward(tokens[start : start + chunk], metadata.positions, metadata.bind(cache)).last)
        )
    close(torch.cat(parts), expected(theirs, tokens))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_decode_with_mixed_lengths(pair: tuple[Any, Decoder, KVCache], rows: int) -> None:
    theirs, ours, cache = pair
    batch = sequences(26, 21, 13)
    table = page_table([26 + rows] * 3)
    heads = [len(item) - 10 for item in batch]
    metadata = PrefillMetadata(table, [PromptChunk(i, 0, head) for i, head in enumerate(heads)], PAGE)
    prompt = torch.cat([item[:head] for item, head in zip(batch, heads, strict=True)])
    ours.forward(prompt, metadata.positions, metadata.bind(cache))
    lengths = torch.tensor(heads)
    for _ in range(10 // rows):
        tokens = torch.stack([item[n : n + rows] for item, n in zip(batch, lengths.tolist(), strict=True)])
        verify = DecodeMetadata(table, torch.arange(3), lengths, rows, PAGE)
        hidden = ours.forward(tokens.flatten(), positions_from(lengths, rows).flatten(), verify.bind(cache)).last
        logits = ours.logits(hidden).view(3, rows, -1)
        for index, item in enumerate(batch):
            n = int(lengths[index])
            close(logits[index], expected(theirs, item[: n + rows])[n:])
        lengths = lengths + rows


def test_rejected_drafts_leave_no_trace(pair: tuple[Any, Decoder, KVCache]) -> None:
    theirs, ours, cache = pair
    (tokens,) = sequences(14)
    table = page_table([20])
    metadata = PrefillMetadata(table, [PromptChunk(0, 0, 8)], PAGE)
    ours.forward(tokens[:8], metadata.positions, metadata.bind(cache))
    wrong = torch.cat([tokens[8:9], (tokens[9:13] + 1) % 131])
    verify = DecodeMetadata(table, torch.tensor([0]), torch.tensor([8]), 5, PAGE)
    ours.forward(wrong, torch.arange(8, 13), verify.bind(cache))
    verify = DecodeMetadata(table, torch.tensor([0]), torch.tensor([9]), 5, PAGE)
    logits = ours.logits(ours.forward(tokens[9:14], torch.arange(9, 14), verify.bind(cache)).last)
    close(logits, expected(theirs, tokens)[9:])


def test_skipped_layers_share_weights(pair: tuple[Any, Decoder, KVCache]) -> None:
    theirs, ours, cache = pair
    view = ours.without({1})
    assert view.layers == (ours.layers[0], ours.layers[2])
    (tokens,) = sequences(9)
    metadata = PrefillMetadata(page_table([9]), [PromptChunk(0, 0, 9)], PAGE)
    logits = view.logits(view.forward(tokens, metadata.positions, metadata.bind(cache)).last)
    kept = [theirs.model.layers[0], theirs.model.layers[2]]
    before = theirs.model.layers
    theirs.model.layers = torch.nn.ModuleList(kept)
    try:
        with torch.no_grad():
            wanted = theirs(tokens[None], use_cache=False).logits[0]
    finally:
        theirs.model.layers = before
    close(logits, wanted)


def test_aux_features_are_the_residual_stream_after_their_layers(pair: tuple[Any, Decoder, KVCache]) -> None:
    theirs, ours, cache = pair
    (tokens,) = sequences(9)
    metadata = PrefillMetadata(page_table([9]), [PromptChunk(0, 0, 9)], PAGE)
    with torch.no_grad():
        states = theirs(tokens[None], output_hidden_states=True).hidden_states
    assert ours.forward(tokens, metadata.positions, metadata.bind(cache)).aux is None
    last, aux = ours.with_aux((1, 0)).forward(tokens, metadata.positions, metadata.bind(cache))
    assert aux is not None
    close(last, states[-1][0])  # theirs is behind the final norm, too
    close(aux, torch.cat([states[2][0], states[1][0]], -1))
    some, rows = (
        ours.with_aux((1, 0)).forward(tokens, metadata.positions, metadata.bind(cache), torch.tensor([8, 3])),
        [8, 3],
    )
    close(some.last, last[rows])
    assert some.aux is not None
    close(some.aux, aux)
    with pytest.raises(AssertionError, match="of all tokens"):
        ours.with_aux((0, 2)).forward(tokens, metadata.positions, metadata.bind(cache), torch.tensor([8]))
