"""The frozen target during training: features of a batch, and its predictions."""

from __future__ import annotations

import torch

from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.runtime.loader import quantizes_activations
from specbatch.training.data import Batch
from specbatch.weights import Checkpoint

HEAD = "lm_head.weight"


class Target:
    """embedding, head [V, H]: its embedding and output matrix as plain tensors, which drafts share."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        """max_len: number of tokens of the longest example."""
        self.name = checkpoint.name
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.device = device
        self._model = Decoder(checkpoint.config, checkpoint.tensor, dtype=dtype, device=device, max_positions=max_len)
        self.embedding = self._model.embedding
        tied = checkpoint.config.tie_embeddings
        self.head = self.embedding if tied else checkpoint.tensor(HEAD).to(device=device, dtype=dtype)
        self.norm = self._model.norm.weight
        self._rounds = quantizes_activations(True, dtype, device, checkpoint.config)  # as an engine does

    @torch.no_grad()
    def features(self, batch: Batch, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states after the final norm [B, L, H], and the concatenated residual streams after `layers`
        [B, L, n * H], None without layers. Values past the end of an example are meaningless."""
        rows, length = batch.tokens.shape
        positions = torch.arange(length, device=self.device).repeat(rows)
        model = self._model.with_aux(layers)
        with use_fp8_activations(self._rounds):
            last, aux = model.forward(batch.tokens.flatten(), positions, UncachedContext(model, rows, length))
        return last.unflatten(0, (rows, length)), None if aux is None else aux.unflatten(0, (rows, length))

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] -> logits float32 [T, V]."""
        return self._model.logits(last).float()
