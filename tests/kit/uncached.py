"""A decoder run over a whole text at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.kernels.attention.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder, Features


def prefill_text(model: Decoder, text: Sequence[int]) -> tuple[Features, KVCache]:
    """Features of every token, and a cache whose page 1 holds the text's keys and values."""
    cpu = torch.device("cpu")
    backend = prefill_backend("torch", cpu, torch.float32, model.config.head_dim)
    cache = KVCache(model.config, len(model.layers), 1, len(text), torch.float32, cpu, backend)
    metadata = PrefillMetadata(torch.ones(1, 1, dtype=torch.int64), [PromptChunk(0, 0, len(text))], len(text))
    return model.forward(torch.tensor(text), metadata.positions, metadata.bind(cache)), cache


def run_text(model: Decoder, text: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
    """Logits [V] after the text, and that cache."""
    features, cache = prefill_text(model, text)
    return model.logits(features.last[-1:])[0], cache
