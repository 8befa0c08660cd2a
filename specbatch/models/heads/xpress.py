"""Network and config of XPress drafts: the layers of DFlash, and a refiner that reads the other tokens of the block.

"xPress: Parallel Refinement for Diffusion Drafters in Speculative Decoding" (arXiv 2608.02438), in the layout that vLLM
reads (`Qwen3XPressModel`). The layers fill a block in one pass, as those of DFlash do. The refiner then adds to the
logits of each row a bias that depends on the tokens before it. A pass of the refiner takes tokens for all rows and
gives new logits for all: what it gives for a row is final once the tokens before the row are, so that as many passes as
there are drafts choose them one after the other, and fewer come close to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.files.config_values import count_of
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.gemm.linear import Linear
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import Shapes
from specbatch.models.heads import dflash
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dspark import SequentialDraft
from specbatch.models.partition import own_logits, rows_per_rank
from specbatch.models.weight_reader import Reader

ARCHITECTURE = "Qwen3XPressModel"
_HEAD = "xpress_head"


@dataclass(frozen=True, kw_only=True)
class XPressConfig(DFlashConfig):
    """Sizes of the draft's layers and refiner, and how it reads its target.

    rank        channels of the refiner
    inner       channels of its MLP
    passes      passes of the refiner over a block
    candidates  likeliest tokens of a row, without the refiner, that its draft is chosen from; 0: all
    """

    algorithm: ClassVar[str] = "xpress"
    may_draft_from_anchor: ClassVar[bool] = False

    rank: int
    inner: int
    passes: int
    candidates: int

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        block, mixed = count_of(own, "block_size"), count_of(own, "xpress_block_size", count_of(own, "block_size"))
        if mixed != block:
            raise refuse("xpress_block_size", mixed, f"the refiner must mix the rows of a block, block_size={block}")
        return {
            "rank": count_of(own, "xpress_rank", 256),
            "inner": count_of(own, "xpress_mlp_hidden", 512),
            "passes": count_of(own, "xpress_num_passes", 6),
            "candidates": count_of(own, "xpress_topc", 0, least=0, most=plain.vocab_size),
        }

    @property
    def choices(self) -> int:
        return self.candidates or self.vocab_size

    def head_shapes(self) -> Shapes:
        rank, inner, hidden = self.rank, self.inner, self.hidden_size
        own: Shapes = {
            "w1.weight": (self.vocab_size, rank),
            "down_h.weight": (rank, hidden),
            "down_g.weight": (rank, hidden),
            "in_proj.weight": (rank, 3 * rank),
            "mix.L": (rank, self.block_size, self.block_size),
            "mlp.gate_proj.weight": (inner, rank),
            "mlp.up_proj.weight": (inner, rank),
            "mlp.down_proj.weight": (rank, inner),
            "w2.weight": (rows_per_rank(self.vocab_size, self.ranks), rank),
        }
        return super().head_shapes() | {f"{_HEAD}.{name}": shape for name, shape in own.items()}

    def lines(self) -> list[str]:
        chosen = f"the {self.candidates} likeliest" if self.candidates else "all"
        return [
            *super().lines(),
            f"  a refiner of rank {self.rank}, {self.passes} passes, chooses from {chosen} tokens",
        ]


class Refiner:
    """Adds to the logits of row k of a block a bias W2 @ (u + MLP(u)), where u is x_k + sum over j <= k of
    L[k, j] * x_j, channel by channel. x_j = in_proj([down_h(h_j) ; down_g(mean of all h) ; w1[t]]) depends on the
    hidden states h of the block and on the token t before row j.

    embedding: [vocab_size, rank], w1 with its part of in_proj applied.
    """

    def __init__(self, fetch: Reader, config: XPressConfig) -> None:
        rank = config.rank
        joined = fetch(f"{_HEAD}.in_proj.weight")
        self.embedding = fetch(f"{_HEAD}.w1.weight") @ joined[:, 2 * rank :].T
        self._own, self._mean = (Linear(fetch(f"{_HEAD}.down_{part}.weight")) for part in "hg")
        self._joined = Linear(joined[:, : 2 * rank].contiguous())
        mixing = fetch(f"{_HEAD}.mix.L")
        self._mixing = mixing.tril() + torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
        gate_up = [fetch(f"{_HEAD}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        self._gate_up = Linear(torch.cat(gate_up))
        self._down = Linear(fetch(f"{_HEAD}.mlp.down_proj.weight"))
        self._out = fetch.output_matrix(f"{_HEAD}.w2.weight", config.vocab_size)

    def fixed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of x that depends on no token: [B, rows, rank] of hidden states [B, rows, H]."""
        own, mean = self._own(hidden.flatten(0, 1)), self._mean(hidden.mean(1))
        together = torch.cat([own, mean.repeat_interleave(hidden.shape[1], 0)], -1)
        return self._joined(together).view(*hidden.shape[:2], -1)

    def latents(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """What W2 reads in the rows from `first` on: [B, n - first, rank] of the first n rows, x [B, n, rank]."""
        count = x.shape[1]
        mixed = torch.einsum("ckj,bjc->bkc", self._mixing[:, first:count, :count], x)
        flat = mixed.flatten(0, 1).contiguous()  # einsum may leave the channels apart
        return self._down(silu_and_mul(self._gate_up(flat)), residual=flat).view_as(mixed)

    def refined(self, base: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of this rank's tokens, from those without bias, base [T, V], whose memory may be used up."""
        return own_logits(self._out, latents, residual=base)

    def own_logits(
        self, base: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `MarkovHead.own_logits`, where hidden [B, rank] is `fixed` of the row, and state [B, rows before * rank]
        the x of all rows before it, of which the anchor's is the first."""
        assert state is not None
        state = torch.cat([state, hidden + embedded], -1)
        x = state.unflatten(-1, (-1, self.embedding.shape[1]))
        return self.refined(base, self.latents(x, x.shape[1] - 1)[:, 0]), state


class XPress(SequentialDraft):
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8."""

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        super().__init__(fetch, target, max_positions)
        assert isinstance(fetch.config, XPressConfig)
        self.passes, self._candidates = fetch.config.passes, fetch.config.candidates
        self.markov = self.refiner = Refiner(fetch, fetch.config)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `SequentialDraft.own_logits`, -inf for tokens that are no candidates."""
        own = super().own_logits(hidden)
        if not self._candidates:
            return own
        whole = self.joined(own, greedy=False)
        assert isinstance(whole, torch.Tensor)
        least = whole.topk(self._candidates).values[:, -1:]
        return own.masked_fill(own < least, -torch.inf)

    def places(self, fixed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """x [B, rows, rank], from `Refiner.fixed` [B, rows, rank] and the tokens before each row, int64 [B, rows]."""
        return fixed + F.embedding(before, self.refiner.embedding)


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft with the defaults of its authors for targets of this shape: that of DFlash drafts, and a
    refiner of rank 256 with 6 passes."""
    shape = dflash.published_shape(target)
    return shape | {"architectures": [ARCHITECTURE], **published_head(shape["block_size"], 256)}


def published_head(block: int, rank: int) -> dict[str, Any]:
    """The settings of the refiner."""
    return {
        "xpress_rank": rank,
        "xpress_mlp_hidden": 2 * rank,
        "xpress_block_size": block,
        "xpress_num_passes": 6,
        "sample_from_anchor": False,
    }
