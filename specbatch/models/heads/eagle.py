"""Network of EAGLE-1 and EAGLE-2 draft heads (Li et al. 2024, SafeAILab/EAGLE).

Both versions have the same head; EAGLE-2 drafts trees with it.

x = fc([embed(t_{i+1}) ; f_i]), where f_i is the target's last hidden state after its final norm; then Llama layers, the
first without input norm. Their output is the input of the target's output matrix and the next feature.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.families.llama import qkv_rows
from specbatch.models.heads.draft_head import LAYER, Joined, LlamaHead, Shapes, recorded_shapes
from specbatch.models.weight_reader import Reader


class Eagle(LlamaHead):
    def __init__(
        self, config: ModelConfig, read: Reader, names: Collection[str], target: Decoder, positions: int
    ) -> None:
        hidden = config.hidden_size
        self._fc = Joined(
            read.weight({"fc.weight": hidden}, 2 * hidden), read("fc.bias", hidden) if "fc.bias" in names else None
        )
        super().__init__(config, read, names, target, positions)
        self._qkv = read.linear(qkv_rows(config, f"{LAYER}.self_attn"), config.hidden_size, config.qkv_bias)

    def begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._fc(embedded, hidden, None, None)
        return x, self._qkv(x)


def eagle_shapes(config: ModelConfig, found: Shapes) -> Shapes:
    """Name -> shape of a head's tensors; optional ones only if they are among `found`."""
    return recorded_shapes(config, lambda read, target: Eagle(config, read, found, target, 1))
