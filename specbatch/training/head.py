"""The interface of trainable draft heads: scores of a batch, and the config and tensors of the published format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from specbatch.training.data import Batch
from specbatch.training.layers import Attention, Mlp, Norm
from specbatch.training.target import Target

LEAST_WEIGHT = 1e-9  # avoids a division by zero for a batch without any draft position


class Guess(NamedTuple):
    """One draft position, at the n places of a batch that have it.

    losses  float32 [m], m <= n: places whose target token is in the head's vocabulary
    hits    bool [n]: the draft equals the target's token
    chains  bool [n]: the draft and all drafts before it equal the target's tokens
    """

    losses: torch.Tensor
    hits: torch.Tensor
    chains: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """loss: a scalar with gradient; sums float64 [4, drafts]: losses, hits, chains and places by draft position."""

    loss: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, guesses: list[Guess], decay: float) -> Scores:
        """Draft position k has weight decay ** k, as a draft counts only if all before it are accepted."""
        means = torch.stack([guess.losses.sum() / max(len(guess.losses), 1) for guess in guesses])
        weights = torch.tensor(
            [decay**k if len(guess.losses) else 0.0 for k, guess in enumerate(guesses)], device=means.device
        )
        loss = (means * weights).sum() / weights.sum().clamp(min=LEAST_WEIGHT)
        counts = torch.tensor([float(len(guess.hits)) for guess in guesses], device=means.device)
        hits, chains = (torch.stack([guess[part].sum() for guess in guesses]) for part in (1, 2))
        return cls(loss, torch.stack([means.detach() * counts, hits, chains, counts]).double().cpu())


class Layer(nn.Module):
    """One decoder layer. Attention is computed by the training method."""

    input_layernorm: Norm
    self_attn: Attention

    def __init__(self, attention: Attention, norm: Norm, mlp_norm: Norm, mlp: Mlp) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.self_attn = attention
        self.post_attention_layernorm = mlp_norm
        self.mlp = mlp

    def leave(self, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """From the residual stream [..., H] and attention output [..., kv heads, group, head_dim] to the residual
        stream after the layer."""
        x = x + self.self_attn.out(attended, gate)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """A trainable draft head. aux: layers of the target after which it reads features (see `Target.features`); drafts:
    number of draft positions that it learns."""

    aux: tuple[int, ...] = ()
    drafts: int

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        """Loss and accuracy on a batch. generator: on the CPU, for methods that sample."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Its config.json without the dtype of its weights."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name in the file -> parameter, or map between vocabularies."""
        return dict(self.named_parameters())
