"""Training of MTP (NEXTN) heads: one layer, stored with the target as `mtp.*`, in the layout of Qwen3-Next.

x = fc([norm(embed(t)) ; norm(h)]) with the target's hidden state after its final norm; a layer with gated attention; a
norm whose output goes through the target's output matrix and is the next h. All norms are centred on zero: they
multiply by 1 + weight. Embedding and output matrix are the target's and do not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.training.chain import ChainHead, Memory, through
from specbatch.training.data import Example
from specbatch.training.head import Layer
from specbatch.training.layers import Attention, Mlp, Norm, Rotary, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target
from specbatch.weights import Checkpoint
from specbatch.weights.folder import FolderCheckpoint

PREFIX = "mtp."


class MtpHead(ChainHead):
    file = "model-mtp.safetensors"

    def __init__(self, target: Target, *, steps: int, max_len: int, seed: int) -> None:
        """steps: number of unrolled drafts."""
        super().__init__()
        base = target.config
        sizes = replace(base, num_layers=1, qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False)
        hidden, eps = base.hidden_size, base.rms_norm_eps
        self.drafts = steps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Norm(hidden, eps, offset=1)
        self.pre_fc_norm_hidden = Norm(hidden, eps, offset=1)
        attention = Attention(sizes, gated=True, offset=1)
        self.layers = nn.ModuleList(
            [
                Layer(
                    attention,
                    Norm(hidden, eps, offset=1),
                    Norm(hidden, eps, offset=1),
                    Mlp(sizes.hidden_size, sizes.intermediate_size),
                )
            ]
        )
        self.norm = Norm(hidden, eps, offset=1)
        initialize(self, seed)
        with torch.no_grad():
            # Initialized to the target's hidden state, in the magnitude that the output matrix expects.
            self.fc.weight[:, hidden:] += torch.eye(hidden)
            self.norm.weight.fill_(target.norm.float().square().mean().sqrt() - 1)
        self.to(target.device)
        self.rotary = Rotary(sizes, max_len + steps, target.device)

    def begin(self, last: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return last

    def advance(self, embedded: torch.Tensor, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        out: torch.Tensor = self.norm(through(layer, x, memory))
        return out

    def predict(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        return F.linear(hidden, target.head)

    def config(self) -> dict[str, Any]:
        """Settings to add to the target's config.json when the head is stored with it."""
        return {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{PREFIX}{name}": tensor for name, tensor in super().tensors().items()}


def takes_a_head(target: Checkpoint) -> FolderCheckpoint:
    """Check that an MTP head can be stored with the target. Returns the target as a folder."""
    if not isinstance(target, FolderCheckpoint):
        raise refuse("algorithm", "mtp", f"its head is stored with the target's files, and {target.name} has none")
    if target.config.mtp_module != ModelConfig.mtp_module:
        works = f"a head of {target.config.family} is stored as a layer, which is not trained here; use eagle3"
        raise refuse("algorithm", "mtp", works)
    if target.mtp:
        raise refuse("algorithm", "mtp", f"{target.name} already has an MTP head; use a target without one")
    target.tokenizer()  # converts the tokenizer of a GGUF file, if that is not done yet
    return target


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> MtpHead:
    """See `trainer.make_head`; the texts do not matter."""
    assert recipe.unroll is not None
    return MtpHead(target, steps=recipe.unroll, max_len=recipe.max_len, seed=recipe.seed)
