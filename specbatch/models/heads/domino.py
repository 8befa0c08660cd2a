"""Network and config of Domino drafts: the layers of DFlash, and a GRU over the tokens of the block.

In the layout of SpecForge and NVIDIA's Model-Optimizer, which SGLang reads (`DFlashDraftModel` with
`projector_type` "domino"). The layers fill a block in one pass, as those of DFlash do. A GRU reads the target's
embeddings of the newest token and of the drafts so far; its state and the hidden state of a row give a correction of
the row's logits. The tokens of a block are therefore chosen one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.files.config_values import count_of
from specbatch.kernels.gemm.linear import Linear
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import Shapes
from specbatch.models.heads import dflash
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dspark import SequentialDraft
from specbatch.models.partition import own_logits, rows_per_rank
from specbatch.models.weight_reader import Reader

ARCHITECTURE = dflash.ARCHITECTURE


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """Sizes of the draft's layers and GRU, and how it reads its target.

    gru_size         channels of the GRU's state
    correction_rank  channels between it and the correction of the logits
    plain            rows that draft without a correction, 0 or 1
    """

    algorithm: ClassVar[str] = "domino"

    gru_size: int
    correction_rank: int
    plain: int

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        return {
            "gru_size": count_of(own, "gru_hidden_dim"),
            "correction_rank": count_of(own, "emb_dim"),
            "plain": count_of(own, "pure_draft_prefix_len", least=0, most=1),
        }

    @classmethod
    def _drafts_from_anchor(cls, own: dict[str, Any], default: bool) -> bool:
        shifted = own.get("shift_label")
        if not isinstance(shifted, bool):
            works = "the config must say whether each row drafts the token after its position, true or false"
            raise refuse("shift_label", shifted, works)
        return shifted

    def head_shapes(self) -> Shapes:
        hidden, size, rank = self.hidden_size, self.gru_size, self.correction_rank
        return super().head_shapes() | {
            "prefix_gru.weight_ih_l0": (3 * size, hidden),
            "prefix_gru.weight_hh_l0": (3 * size, size),
            "embed_proj.0.weight": (rank, hidden + size),
            "embed_proj.2.weight": (rows_per_rank(self.vocab_size, self.ranks), rank),
        }

    def lines(self) -> list[str]:
        first = ", from the second draft on" if self.plain else ""
        gru = f"  a GRU of size {self.gru_size} corrects the logits with rank {self.correction_rank}{first}"
        return [*super().lines(), gru]


class Correction:
    """Adds to the logits of a row W2 @ silu(W1 @ [h ; s]), where h is the row's hidden state, and s that of the GRU
    after the tokens before the row.

    embedding: the target's, [vocab_size, hidden_size].
    """

    def __init__(self, fetch: Reader, config: DominoConfig, embedding: torch.Tensor) -> None:
        self.embedding = embedding
        self._gru = fetch("prefix_gru.weight_ih_l0"), fetch("prefix_gru.weight_hh_l0")
        self._inner = Linear(fetch("embed_proj.0.weight"))
        self._out = fetch.output_matrix("embed_proj.2.weight", config.vocab_size)
        self._plain = config.plain

    def own_logits(
        self, base: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `MarkovHead.own_logits`."""
        is_plain = state is None and self._plain > 0
        before = embedded.new_zeros(len(embedded), self._gru[1].shape[1]) if state is None else state
        state = torch.gru_cell(embedded, before, *self._gru)
        if is_plain:
            return base, state
        inner = F.silu(self._inner(torch.cat([hidden, state], -1)))
        return own_logits(self._out, inner, residual=base), state


class Domino(SequentialDraft):
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8."""

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        super().__init__(fetch, target, max_positions)
        assert isinstance(fetch.config, DominoConfig)
        self.markov = Correction(fetch, fetch.config, self.block.embedding)


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as published for targets of this shape: that of DFlash drafts, and a GRU of size 1024. For
    Qwen3-8B it is that of SpecForge's qwen3-8b-domino."""
    shape = dflash.published_shape(target)
    inside = shape["dflash_config"] | published_head(1024, 256)
    return shape | {"architectures": [ARCHITECTURE], "dflash_config": inside}


def published_head(gru_size: int, rank: int) -> dict[str, Any]:
    """The settings of the GRU and the correction."""
    return {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": gru_size,
        "emb_dim": rank,
        "shift_label": True,
    }
