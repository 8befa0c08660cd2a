"""Decoders of checkpoints, and what they compute for whole texts at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder, Features
from specbatch.models.full_forward import UncachedContext
from specbatch.weights import Checkpoint

CPU = torch.device("cpu")


def decoder_of(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    ranks: Communicator | None = None,
) -> Decoder:
    """The model of a checkpoint, or the part of one rank."""
    config = checkpoint.config if ranks is None else checkpoint.config.divided(ranks.size)
    return Decoder(config, checkpoint.tensor, dtype=dtype, device=device, max_positions=512, ranks=ranks)


@torch.inference_mode()
def features_of(model: Decoder, tokens: torch.Tensor) -> Features:
    """Features of every token of a text, computed without a cache."""
    count = len(tokens)
    return model.forward(tokens, torch.arange(count, device=model.device), UncachedContext(model, 1, count))


@torch.inference_mode()
def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] after every token of a text, computed without a cache."""
    return model.logits(features_of(model, tokens).last)


def prefill_texts(model: Decoder, texts: Sequence[Sequence[int]]) -> tuple[list[Features], KVCache]:
    """Features of every token of each text, and a cache whose page n + 1 holds the keys and values of text n."""
    cpu, longest = torch.device("cpu"), max(map(len, texts))
    backend = prefill_backend("torch", cpu)
    cache = KVCache(model.config, len(model.layers), len(texts), longest, torch.float32, cpu, backend)
    chunks = [PromptChunk(row, 0, len(text)) for row, text in enumerate(texts, 1)]
    metadata = PrefillMetadata(torch.arange(len(texts) + 1)[:, None], chunks, longest)
    tokens = torch.tensor([token for text in texts for token in text])
    last, aux = model.forward(tokens, metadata.positions, metadata.bind(cache))
    sizes = [len(text) for text in texts]
    parts = zip(last.split(sizes), aux.split(sizes) if aux is not None else [None] * len(texts), strict=True)
    return [Features(*part) for part in parts], cache


def run_texts(model: Decoder, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, KVCache]:
    """Logits [n, V] after each text, and that cache."""
    features, cache = prefill_texts(model, texts)
    return model.logits(torch.stack([item.last[-1] for item in features])), cache
