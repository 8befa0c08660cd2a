"""From a checkpoint to a model that runs, and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbatch.memory.kv_cache import KVCache
from specbatch.models.llama import Llama

if TYPE_CHECKING:
    from specbatch.weights import Checkpoint


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
