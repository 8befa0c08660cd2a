"""Network and config of DSpark drafts: the layers of DFlash, and a head by which each draft depends on the one before.

"DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation"
(github.com/deepseek-ai/DeepSpec). The layers fill a block in one pass, as those of DFlash do. A Markov head then adds
to the logits of each row a bias that depends on the token before it, so that the tokens of a block are chosen one after
the other. A confidence head predicts how likely each draft is to be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import Shapes
from specbatch.models.heads import dflash
from specbatch.models.heads.dflash import DFlash, DFlashConfig
from specbatch.models.partition import joined_scores, own_logits, rows_per_rank
from specbatch.models.weight_reader import Reader

_MARKOV, _CONFIDENCE = "markov_head", "confidence_head.proj"
# Kinds of Markov heads: the layer that they have besides their two matrices, and its inputs and outputs in multiples of
# the rank. It also reads the hidden state.
_KINDS: dict[str, tuple[str, int, int] | None] = {
    "vanilla": None,
    "gated": ("gate_proj", 1, 1),
    "rnn": ("joint_proj", 2, 3),
}


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Sizes of the draft's layers and heads, and how it reads its target.

    markov_rank        columns of the Markov head's two matrices
    markov_head        how the bias is computed from the token before: see `MarkovHead`
    confidence_inputs  columns that the confidence head reads; 0: the draft has none
    confidence_bias    whether it has a bias
    """

    algorithm: ClassVar[str] = "dspark"

    markov_rank: int
    markov_head: str
    confidence_inputs: int
    confidence_bias: bool

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        rank, kind = count_of(own, "markov_rank"), own.get("markov_head_type", "vanilla")
        if not isinstance(kind, str) or kind.lower() not in _KINDS:
            raise refuse("markov_head_type", kind, f"use {', '.join(_KINDS)}")
        inputs = plain.hidden_size + (rank if flag_of(own, "confidence_head_with_markov", True) else 0)
        return {
            "markov_rank": rank,
            "markov_head": kind.lower(),
            "confidence_inputs": inputs if flag_of(own, "enable_confidence_head") else 0,
            "confidence_bias": flag_of(own, "confidence_head_bias", True),
        }

    def head_shapes(self) -> Shapes:
        shapes, rank, kind = super().head_shapes(), self.markov_rank, _KINDS[self.markov_head]
        shapes[f"{_MARKOV}.markov_w1.weight"] = (self.vocab_size, rank)
        shapes[f"{_MARKOV}.markov_w2.weight"] = (rows_per_rank(self.drafted_tokens, self.ranks), rank)
        if kind is not None:
            name, inputs, outputs = kind
            shapes[f"{_MARKOV}.{name}.weight"] = (outputs * rank, inputs * rank + self.hidden_size)
            shapes[f"{_MARKOV}.{name}.bias"] = (outputs * rank,)
        if self.confidence_inputs:
            shapes[f"{_CONFIDENCE}.weight"] = (1, self.confidence_inputs)
            shapes |= {f"{_CONFIDENCE}.bias": (1,)} if self.confidence_bias else {}
        return shapes

    def lines(self) -> list[str]:
        confidence = "a confidence head" if self.confidence_inputs else "no confidence head"
        return [*super().lines(), f"  {self.markov_head} Markov head of rank {self.markov_rank}; {confidence}"]


class MarkovHead:
    """Adds to the logits of a row a bias W2 @ z, where z [rank] depends on the embedding e [rank] of the token before:

    vanilla  z = e
    gated    z = sigmoid(gate_proj([h ; e])) * e, where h is the row's hidden state
    rnn      z = tanh(o), with [g ; c ; o] = joint_proj([s ; e ; h]); the state s, 0 before the first row, becomes
             sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

    embedding: [vocab_size, rank].
    """

    def __init__(self, fetch: Reader, config: DSparkConfig) -> None:
        kind = _KINDS[config.markov_head]
        self.embedding = fetch(f"{_MARKOV}.markov_w1.weight")
        self._out = fetch.output_matrix(f"{_MARKOV}.markov_w2.weight", config.drafted_tokens)
        self._is_recurrent = config.markov_head == "rnn"
        self._mix: Linear | None = None
        if kind is not None:
            name = f"{_MARKOV}.{kind[0]}"
            self._mix = Linear(fetch(f"{name}.weight"), fetch(f"{name}.bias"))

    def own_logits(
        self, base: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of one row per block, of this rank's tokens, from those without bias, base [B, Vd], whose memory may
        be used up. embedded [B, rank]: of the token before; hidden [B, hidden_size]; state: of the row before, None
        before the first. Returns them and the next state."""
        z = embedded
        if self._mix is not None and self._is_recurrent:
            state = torch.zeros_like(embedded) if state is None else state
            gate, candidate, z = self._mix(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            gate, z = gate.sigmoid(), z.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        elif self._mix is not None:
            z = self._mix(torch.cat([hidden, embedded], -1)).sigmoid() * embedded
        return own_logits(self._out, z, residual=base), state


class ChainHead(Protocol):
    """What makes each draft of a block depend on those before it. embedding: [vocab_size, width]."""

    embedding: torch.Tensor

    def own_logits(
        self, base: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `MarkovHead.own_logits`."""
        ...


class SequentialDraft(DFlash):
    """A DFLASH draft with a head that changes the logits of a row by the tokens before it."""

    markov: ChainHead
    has_confidence = False  # whether there is a confidence head

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden [T, hidden_size] without the head, of this rank's tokens."""
        return own_logits(self.block.head, hidden)

    def joined(self, own: torch.Tensor, *, greedy: bool) -> Scores:
        """Logits [T, Vd], or if `greedy` what suffices for their argmax, from those of this rank's tokens."""
        return joined_scores(self.block.head, own, greedy=greedy)

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """See `DSpark.confidence`."""
        raise NotImplementedError


class DSpark(SequentialDraft):
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8."""

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        super().__init__(fetch, target, max_positions)
        config = fetch.config
        assert isinstance(config, DSparkConfig)
        self.markov = MarkovHead(fetch, config)
        self._confidence: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if config.confidence_inputs:
            bias = fetch(f"{_CONFIDENCE}.bias") if config.confidence_bias else None
            self._confidence = fetch(f"{_CONFIDENCE}.weight"), bias
            self.has_confidence = True

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The predicted probability float32 [...] that a draft is accepted, given that those before it are.
        hidden [..., hidden_size]: of its row; embedded [..., rank]: the Markov head's embedding of the token before it.

        It divides the rows of a verify budget (`engine.device.verify_budget`). DeepSpec drafts fewer tokens where it is
        below a threshold, which is 0 by default, so that nothing is left out.
        """
        assert self._confidence is not None, "the draft has no confidence head"
        weight, bias = self._confidence
        read = torch.cat([hidden, embedded], -1)[..., : weight.shape[1]]
        return F.linear(read, weight, bias)[..., 0].float().sigmoid()


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as published by DeepSeek for targets of this shape: up to 5 layers of the target's sizes,
    blocks of 7, a Markov head of rank 256 and a confidence head. For Qwen3-8B it is that of dspark_qwen3_8b_block7."""
    shape = dflash.published_shape(target)
    inside = shape.pop("dflash_config")
    layers = dflash.published_layers(target.depth, shape["num_hidden_layers"])
    return shape | {
        "architectures": [dflash.DEEPSPEC[0]],
        "block_size": 7,
        "mask_token_id": inside["mask_token_id"],
        "target_layer_ids": layers,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
