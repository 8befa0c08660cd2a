"""What a draft head offers its trainer: a score of a batch, and the files of its published format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from specbatch.training.data import Batch
from specbatch.training.layers import Attention, Mlp, Norm
from specbatch.training.target import Target

LEAST_WEIGHT = 1e-9  # of a draft position that a batch does not reach


class Guess(NamedTuple):
    """Of one draft position, over the n places of a batch where it stands: losses float32 [m] (m <= n where some
    answers are out of the head's vocabulary), hits and chains bool [n]: the draft is the target's token; so are all
    drafts before it, too."""

    losses: torch.Tensor
    hits: torch.Tensor
    chains: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """loss: a scalar with its gradient; sums float64 [4, drafts]: of losses, hits, chains and places by position."""

    loss: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, guesses: list[Guess], decay: float) -> Scores:
        """Position k weighs decay ** k: a draft counts only when all before it were right."""
        means = torch.stack([guess.losses.sum() / max(len(guess.losses), 1) for guess in guesses])
        weights = torch.tensor(
            [decay**k if len(guess.losses) else 0.0 for k, guess in enumerate(guesses)], device=means.device
        )
        loss = (means * weights).sum() / weights.sum().clamp(min=LEAST_WEIGHT)
        counts = torch.tensor([float(len(guess.hits)) for guess in guesses], device=means.device)
        hits, chains = (torch.stack([guess[part].sum() for guess in guesses]) for part in (1, 2))
        return cls(loss, torch.stack([means.detach() * counts, hits, chains, counts]).double().cpu())


class Layer(nn.Module):
    """One decoder layer; how it attends is the method's own."""

    input_layernorm: Norm
    self_attn: Attention

    def __init__(self, attention: Attention, norm: Norm, mlp_norm: Norm, mlp: Mlp) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.self_attn = attention
        self.post_attention_layernorm = mlp_norm
        self.mlp = mlp

    def leave(self, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """From the residual stream [..., H] and attention [..., kv heads, group, head_dim] to the next one."""
        x = x + self.self_attn.out(attended, gate)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """aux: layers of the target behind which it reads (see `Target.features`); drafts: positions that it learns."""

    aux: tuple[int, ...] = ()
    drafts: int

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        """generator: on the CPU, for what a method draws."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Its config.json, less the type of its weights."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name in the file -> parameter, or map of token ids."""
        return dict(self.named_parameters())
