"""From a checkpoint to a model that runs, and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbatch.kernels.linear import is_blocked
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.llama import Llama

if TYPE_CHECKING:
    from specbatch.weights import Checkpoint


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Memory that a model's weights take once they are loaded."""
    count = config.parameter_count()
    if config.tie_embeddings and is_blocked(dtype, device):  # the head is then a copy of the embedding
        count += config.vocab_size * config.hidden_size
    return count * dtype.itemsize


@dataclass(frozen=True)
class Loader:
    """What target and draft models have in common: type, device, room for positions, size of the KV pool."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    pages: int
    page_size: int

    def model(self, checkpoint: Checkpoint) -> Llama:
        return Llama(
            checkpoint.config,
            checkpoint.tensor,
            dtype=self.dtype,
            device=self.device,
            max_positions=self.max_positions,
        )

    def cache(self, model: Llama) -> KVCache:
        return KVCache(model.config, len(model.layers), self.pages, self.page_size, self.dtype, self.device)
