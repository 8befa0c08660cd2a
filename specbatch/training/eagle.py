"""Training of EAGLE heads (EAGLE-1 and EAGLE-2), in the format of SafeAILab and SGLang (`LlamaForCausalLMEagle`).

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077); SafeAILab/EAGLE.
x = fc([embed(t) ; f]) with the target's hidden state f after its final norm; Llama layers, of which the first has no
input norm; their output predicts the next f, and through the target's output matrix the next token. The loss is the
smooth L1 distance from the target's f, averaged over its channels, + 0.1 * cross entropy with the target's
distribution. Steps after the first read the head's own outputs, as in HASS (Zhang et al., "Learning Harmonized
Representations for Speculative Sampling", arXiv 2408.15766), where EAGLE reads the target's with noise: one step
(`unroll` 1) is EAGLE without the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.training.chain import ChainHead, Memory, cross_entropy, through
from specbatch.training.data import Example
from specbatch.training.head import Layer, layer_keys, plain_heads
from specbatch.training.layers import Attention, Mlp, Norm, Rotary, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle"
TOKENS = 0.1  # weight of the cross entropy


class EagleHead(ChainHead):
    def __init__(self, target: Target, *, steps: int, max_len: int, seed: int, layers: int = 1) -> None:
        """steps: number of unrolled drafts."""
        super().__init__()
        base = target.config
        sizes = replace(base, num_layers=layers, qk_norm=False, **plain_heads(base))
        hidden, eps = base.hidden_size, base.rms_norm_eps
        self.drafts, self.depth = steps, layers
        self._sizes = sizes
        self._embedding = target.embedding
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList(
            Layer(
                Attention(sizes),
                Norm(hidden, eps) if index else nn.Identity(),
                Norm(hidden, eps),
                Mlp(sizes.hidden_size, sizes.intermediate_size),
            )
            for index in range(layers)
        )
        initialize(self, seed)
        with torch.no_grad():  # at first the next feature is the last one
            self.fc.weight[:, hidden:] += torch.eye(hidden)
            self.fc.bias.zero_()
        self.to(target.device)
        self.rotary = Rotary(sizes, max_len + steps, target.device)

    def begin(self, last: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return last

    def advance(self, embedded: torch.Tensor, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        x: torch.Tensor = self.fc(torch.cat([embedded, hidden], -1))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = through(layer, x, memory, index)
        return x

    def predict(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        return F.linear(hidden, target.head)

    def losses(
        self, hidden: torch.Tensor, logits: torch.Tensor, last: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        distance = F.smooth_l1_loss(hidden.float(), last[rows].float(), reduction="none").mean(-1)
        return distance + TOKENS * cross_entropy(logits, wanted, rows)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **layer_keys(self._sizes),
            "num_hidden_layers": self.depth,
            "bias": True,  # of fc
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The file holds a copy of the target's embedding, as SafeAILab's code needs it."""
        return super().tensors() | {"embed_tokens.weight": self._embedding.clone()}


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> EagleHead:
    """See `trainer.make_head`; the texts do not matter."""
    assert recipe.unroll is not None
    assert recipe.draft_layers is not None
    sizes = {"max_len": recipe.max_len, "seed": recipe.seed, "layers": recipe.draft_layers}
    return EagleHead(target, steps=recipe.unroll, **sizes)
