"""EAGLE, versions 1 and 2 (Li et al. 2024, SafeAILab/EAGLE): the head is the same, version 2 drafts a tree with it.

x = fc([embed(t_{i+1}) ; f_i]) with the target's last hidden state behind its final norm, then a Llama layer whose
attention reads x without a norm; its output goes to the target's head and is the next feature.
"""

from __future__ import annotations

import torch

from specbatch.kernels.gemm.weight import Weight
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.draft_head import EMBEDDING, HEAD, LAYER, Joined, LlamaHead, Shapes, layer_shapes
from specbatch.models.layers import Reader


class Eagle(LlamaHead):
    def __init__(self, config: ModelConfig, read: Reader, names: Shapes, target: Decoder, positions: int) -> None:
        super().__init__(config, read, names, target, positions)
        self._fc = Joined(Weight(read("fc.weight")), read("fc.bias") if "fc.bias" in names else None)
        self._qkv = read.linear(*(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"), bias=config.qkv_bias)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._fc(embedded, hidden, None, None)
        return x, self._qkv(x)


def eagle_shapes(config: ModelConfig, found: Shapes) -> Shapes:
    """Name -> shape of a head's tensors; of those that a head may have, the ones among `found`."""
    hidden = config.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config)}
    del shapes[f"{LAYER}.input_layernorm.weight"]
    tokens = (config.vocab_size, hidden)
    optional: Shapes = {"fc.bias": (hidden,), EMBEDDING: tokens, HEAD: tokens}
    return shapes | {name: shape for name, shape in optional.items() if name in found}
