"""The interface of trainable draft heads: scores of a batch, and the config and tensors of the published format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from specbatch.errors import refuse
from specbatch.models.config import ModelConfig
from specbatch.models.rope import DEFAULT_THETA, Rope
from specbatch.training.data import Batch
from specbatch.training.layers import Attention, Mlp, Norm
from specbatch.training.target import Target

LEAST_WEIGHT = 1e-9  # avoids a division by zero for a batch without any draft position


class Guess(NamedTuple):
    """One draft position, at the n places of a batch that have it.

    losses   float32 [n]
    hits     bool [n]: the draft equals the target's token
    chains   bool [n]: the draft and all drafts before it equal the target's tokens
    learned  bool [n]: the target's token is in the head's vocabulary, so that the loss counts; None: everywhere
    """

    losses: torch.Tensor
    hits: torch.Tensor
    chains: torch.Tensor
    learned: torch.Tensor | None = None

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses that count, and their number."""
        learned = torch.ones_like(self.losses) if self.learned is None else self.learned.float()
        return (self.losses * learned).sum(), learned.sum()


@dataclass(frozen=True)
class Scores:
    """loss: a scalar with gradient; sums float64 [4, drafts]: losses, hits, chains and places by draft position."""

    loss: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, guesses: list[Guess], decay: float) -> Scores:
        """Draft position k has weight decay ** k, as a draft counts only if all before it are accepted."""
        totals, learned = (torch.stack(parts) for parts in zip(*[guess.loss() for guess in guesses], strict=True))
        means = totals / learned.clamp(min=1)
        weights = decay ** torch.arange(len(guesses), device=means.device) * learned.clamp(max=1)
        loss = (means * weights).sum() / weights.sum().clamp(min=LEAST_WEIGHT)
        hits, chains, places = (
            torch.stack([part.sum() for part in parts])
            for parts in zip(*[(g.hits, g.chains, torch.ones_like(g.hits)) for g in guesses], strict=True)
        )
        return cls(loss, torch.stack([means.detach() * places, hits, chains, places]).double())


class Layer(nn.Module):
    """One decoder layer. Attention is computed by the training method."""

    input_layernorm: nn.Module
    self_attn: Attention

    def __init__(self, attention: Attention, norm: nn.Module, mlp_norm: Norm, mlp: Mlp) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.self_attn = attention
        self.post_attention_layernorm = mlp_norm
        self.mlp = mlp

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What q, k and v read of the residual stream [..., H]."""
        out: torch.Tensor = self.input_layernorm(x)
        return out

    def leave(self, x: torch.Tensor, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """From the residual stream [..., H] and attention output [..., kv heads, group, head_dim] to the residual
        stream after the layer."""
        x = x + self.self_attn.out(attended, gate)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """A trainable draft head. aux: layers of the target after which it reads features (see `Target.features`); drafts:
    number of draft positions that it learns; progress: the share of the training that is done, for losses that change
    with it. The loss on held-out answers is always the one at the end; file: name of the file of its tensors."""

    aux: tuple[int, ...] = ()
    drafts: int
    progress: float = 1.0
    file = "model.safetensors"

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        """Loss and accuracy on a batch. generator: on the CPU, for methods that sample."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Its config.json without the dtype of its weights."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name in the file -> parameter, or map between vocabularies."""
        return dict(self.named_parameters())


def require_inner_layers(algorithm: str, target: Target) -> None:
    """Raise SpecbatchError if the target has no layer below the last, whose output a head reads."""
    if target.config.depth < 2:
        works = f"{target.name} has one layer and {algorithm} reads one below the last; use mtp"
        raise refuse("algorithm", algorithm, works)


def plain_heads(target: ModelConfig) -> dict[str, Any]:
    """Fields of a draft's heads, with the target's theta without its scaling, as the draft is trained at the lengths
    that it will see."""
    theta = target.rope.theta if target.rope.rotary_dim else DEFAULT_THETA
    kv_heads, dim = target.usual_heads
    rope = Rope(theta=theta, rotary_dim=dim, source="rope_theta")
    return {"num_kv_heads": kv_heads, "head_dim": dim, "rope": rope}


def layer_keys(sizes: ModelConfig) -> dict[str, Any]:
    """Layer settings of a head's config, with the keys that all readers know."""
    return {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "rms_norm_eps": sizes.rms_norm_eps,
        "max_position_embeddings": sizes.max_position,
        "rope_theta": sizes.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
