"""Network and config of LiLiCorr drafts: the layers of DFlash, and a head that scores a lattice of candidates.

"LiLiCorr: Lightweight Likelihood Correlation of Parallel Drafts for Speculative Decoding" (arXiv 2608.20530), in the
layout that SGLang and vLLM read (`LiLiCorrDraftModel`). The most likely tokens of each row are its candidates. A small
transformer reads all candidates of the block at once and gives each two vectors, by which it follows and is followed:
their product scores a candidate after one of the row before. The tokens of a block are then chosen one after the other,
by these scores alone. The layers may have the convolutions of DFlash 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, positive_of
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.sampling.argmax_topk import topk_logprobs
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.format import Shapes
from specbatch.models.heads import dflash
from specbatch.models.heads.dflash import DFlash
from specbatch.models.heads.dflash2 import MOST_CANDIDATES, ConvolvedConfig
from specbatch.models.weight_reader import Reader

ARCHITECTURE = "LiLiCorrDraftModel"
FEATURES = 5  # numbers that describe how likely a candidate is without the head
_HEAD = "lilicorr"


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(ConvolvedConfig):
    """Sizes of the draft's layers and head, and how it reads its target.

    candidates  tokens of a row that its draft is chosen from
    width       channels of the head
    head_layers its layers
    heads       attention heads of these
    inner       channels of their MLPs
    factor      channels of the two vectors of a candidate
    vector_eps  least norm that a vector is divided by
    scale       by which the products of vectors, which are cosines, are multiplied
    """

    algorithm: ClassVar[str] = "lilicorr"
    may_draft_from_anchor: ClassVar[bool] = False
    may_lack_convolutions: ClassVar[bool] = True

    candidates: int
    width: int
    head_layers: int
    heads: int
    inner: int
    factor: int
    vector_eps: float
    scale: float

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        for key, off in (("has_own_lm_head", False), ("lilicorr_enabled", True)):
            if own.get(key) not in (None, off):
                raise refuse(key, own[key], f"a LiLiCorr draft has {str(off).lower()}, or leaves it out")
        width = count_of(own, "lilicorr_hidden_size", least=0) or plain.hidden_size
        heads = count_of(own, "lilicorr_num_heads")
        if width % heads:
            raise refuse("lilicorr_num_heads", heads, f"it must divide the head's width of {width}")
        return super()._heads(own, plain) | {
            "candidates": count_of(own, "lilicorr_candidate_topk", most=min(plain.vocab_size, MOST_CANDIDATES)),
            "width": width,
            "head_layers": count_of(own, "lilicorr_num_layers"),
            "heads": heads,
            "inner": int(width * positive_of(own, "lilicorr_mlp_ratio", most=64)),
            "factor": count_of(own, "lilicorr_factor_dim"),
            "vector_eps": positive_of(own, "lilicorr_vector_eps", most=0.5),
            "scale": positive_of(own, "lilicorr_logit_scale"),
        }

    @property
    def choices(self) -> int:
        return self.candidates

    def head_shapes(self) -> Shapes:
        hidden, width, inner, slots = self.hidden_size, self.width, self.inner, self.block_size - 1
        own: Shapes = {
            "feature_norm.weight": (FEATURES,),
            "feature_norm.bias": (FEATURES,),
            "slot_embedding": (1, 1, slots, 1, width),
            "rank_embedding": (1, 1, 1, self.candidates, width),
            "relative_slot_bias": (self.heads, 2 * self.block_size - 1),
            "same_slot_bias": (self.heads,),
            "output_norm.weight": (width,),
            "anchor_norm.weight": (width,),
        }
        linear = {
            "pass_hidden_proj": (width, hidden),
            "feature_mlp.up_proj": (width, FEATURES),
            "feature_mlp.down_proj": (width, width),
            "context_proj": (width, hidden),
            "factor_input_proj": (width, 3 * width),
            **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (self.factor, width)),
        }
        if width != hidden:
            linear["token_proj"] = (width, hidden)
        for index in range(self.head_layers):
            layer = f"layers.{index}"
            own |= {f"{layer}.{part}_norm.weight": (width,) for part in ("attn", "mlp")}
            own |= {f"{layer}.attn.in_proj_weight": (3 * width, width), f"{layer}.attn.in_proj_bias": (3 * width,)}
            linear[f"{layer}.attn.out_proj"] = (width, width)
            linear |= {f"{layer}.mlp.up_proj": (inner, width), f"{layer}.mlp.down_proj": (width, inner)}
        for name, shape in linear.items():
            own |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return super().head_shapes() | {f"{_HEAD}.{name}": shape for name, shape in own.items()}

    def lines(self) -> list[str]:
        return [
            *super().lines(),
            f"  a head of width {self.width} with {self.head_layers} layers scores transitions between "
            f"{self.candidates} tokens of each position",
        ]


@dataclass(frozen=True)
class LatticeLayer:
    """A layer over all candidates of a block. in_proj gives q, k and v; eps: of the two norms."""

    heads: int
    eps: float
    attn_norm: torch.Tensor
    in_proj: Linear
    out_proj: Linear
    mlp_norm: torch.Tensor
    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [B * L, width] and what is added to the attention scores, [heads, L, L] -> x."""
        parts = self.in_proj(rms_norm(x, self.attn_norm, self.eps))
        q, k, v = parts.view(-1, bias.shape[1], 3, self.heads, x.shape[1] // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.out_proj(mixed.transpose(1, 2).reshape(x.shape), residual=x)
        return self.down(F.silu(self.up(rms_norm(x, self.mlp_norm, self.eps))), residual=x)


class LatticeHead:
    """Scores the transitions between the candidates of adjacent rows."""

    def __init__(self, fetch: Reader, config: LiLiCorrConfig) -> None:
        def read(name: str) -> torch.Tensor:
            return fetch(f"{_HEAD}.{name}")

        def linear(name: str) -> Linear:
            return Linear(read(f"{name}.weight"), read(f"{name}.bias"))

        self._config = config
        self._token = linear("token_proj") if config.width != config.hidden_size else None
        self._hidden, self._context = linear("pass_hidden_proj"), linear("context_proj")
        self._feature_norm = read("feature_norm.weight"), read("feature_norm.bias")
        self._features = linear("feature_mlp.up_proj"), linear("feature_mlp.down_proj")
        # [slots, candidates, width]: what is added to each.
        self._places = read("slot_embedding")[0, 0] + read("rank_embedding")[0, 0]
        self._bias = self._attention_bias(read("relative_slot_bias"), read("same_slot_bias"))
        self._layers = [
            LatticeLayer(
                config.heads,
                config.rms_norm_eps,
                read(f"{name}.attn_norm.weight"),
                Linear(read(f"{name}.attn.in_proj_weight"), read(f"{name}.attn.in_proj_bias")),
                linear(f"{name}.attn.out_proj"),
                read(f"{name}.mlp_norm.weight"),
                linear(f"{name}.mlp.up_proj"),
                linear(f"{name}.mlp.down_proj"),
            )
            for name in (f"layers.{index}" for index in range(config.head_layers))
        ]
        self._out_norm, self._anchor_norm = read("output_norm.weight"), read("anchor_norm.weight")
        whole = read("factor_input_proj.weight")
        own, anchor, product = (part.contiguous() for part in whole.chunk(3, -1))
        self._factor_own, self._factor_anchor = Linear(own, read("factor_input_proj.bias")), Linear(anchor)
        self._factor_product = Linear(product)
        pair = [[read(f"{name}.{part}") for name in ("out_head", "in_head")] for part in ("weight", "bias")]
        self._edges = Linear(torch.cat(pair[0]), torch.cat(pair[1]))
        self._anchor_out = linear("anchor_out_head")

    def scores(
        self, embedded: torch.Tensor, logprobs: torch.Tensor, hidden: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """float32 [B, n, K, K]: of candidate j of a row after candidate i of the row before; in the first row, after
        the anchor, whichever i is.

        embedded [B, n, K, H]: the target's embeddings of the candidates, the most likely first; logprobs float32
        [B, n, K]: without the head; hidden [B, n, H]: of the rows; anchor [B, H]: see `LiLiCorr.anchors`.
        """
        config, (batch, rows, count) = self._config, logprobs.shape
        x = embedded.flatten(0, 2)
        x = x if self._token is None else self._token(x)
        x = x + self._hidden(hidden.flatten(0, 1)).repeat_interleave(count, 0)
        up, down = self._features
        weight, bias = (part.float() for part in self._feature_norm)
        told = F.layer_norm(described(logprobs).flatten(0, 2), (FEATURES,), weight, bias)
        x = x + down(F.silu(up(told.to(x.dtype))))
        x = (x.view(batch, rows, count, -1) + self._places[:rows]).flatten(0, 2)
        for layer in self._layers:
            x = layer(x, self._bias[:, : rows * count, : rows * count])
        x = rms_norm(x, self._out_norm, config.rms_norm_eps)
        given = rms_norm(self._context(anchor), self._anchor_norm, config.rms_norm_eps)
        each = given.repeat_interleave(rows * count, 0)
        read = self._factor_own(x) + self._factor_product(x * each)
        read = F.silu(read + self._factor_anchor(given).repeat_interleave(rows * count, 0))
        shape = (batch, rows, count, 2, config.factor)
        out, into = F.normalize(self._edges(read).view(shape), dim=-1, eps=config.vector_eps).unbind(3)
        first = F.normalize(self._anchor_out(given), dim=-1, eps=config.vector_eps)
        before = torch.cat([first[:, None, None].expand(-1, 1, count, -1), out[:, :-1]], 1)
        return config.scale * (before @ into.transpose(-1, -2)).float()

    def _attention_bias(self, relative: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        """[heads, n, n] for the n candidates of a whole block: by the distance of their rows, and in the same row."""
        slots = self._config.block_size - 1
        distance = slot_distances(slots, self._config.candidates, relative.device)
        return relative[:, distance + slots] + same[:, None, None] * (distance == 0)


def described(logprobs: torch.Tensor) -> torch.Tensor:
    """The features of candidates with log-probabilities float32 [..., K], the most likely first: float32
    [..., K, FEATURES]."""
    count = logprobs.shape[-1]
    rank = torch.arange(count, device=logprobs.device, dtype=torch.float32)
    known = (
        logprobs,
        logprobs.exp(),
        logprobs - logprobs.amax(-1, keepdim=True),
        (rank / max(count - 1, 1)).expand_as(logprobs),
        (rank == 0).float().expand_as(logprobs),
    )
    return torch.stack(known, -1)


def slot_distances(slots: int, candidates: int, device: torch.device) -> torch.Tensor:
    """int64 [slots * candidates, slots * candidates]: how many rows the first of two candidates is after the second."""
    rows = torch.arange(slots, device=device).repeat_interleave(candidates)
    return rows[:, None] - rows


class LiLiCorr(DFlash):
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8."""

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        super().__init__(fetch, target, max_positions)
        assert isinstance(fetch.config, LiLiCorrConfig)
        self._candidates = fetch.config.candidates
        self._head = LatticeHead(fetch, fetch.config)

    def anchors(self, features: torch.Tensor) -> torch.Tensor:
        """features [B, n * H] of the target at the newest verified positions -> what the head reads of them, [B, H]."""
        return rms_norm(self._fc(features), *self._norm)

    def lattice(
        self, logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The candidates int64 [B, n, K] of rows with logits [B, n, V] and hidden states [B, n, H], and the scores of
        transitions float32 [B, n, K, K], see `LatticeHead.scores`. anchors [B, H]."""
        found, tokens = topk_logprobs(logits.flatten(0, 1), self._candidates)
        found, tokens = (part.view(*logits.shape[:2], -1) for part in (found, tokens))
        return tokens, self._head.scores(F.embedding(tokens, self.block.embedding), found, hidden, anchors)


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as in its authors' recipe for targets of this shape: that of DFlash drafts, and a head of
    width 1024 that scores 8 candidates of each row."""
    shape = dflash.published_shape(target)
    inside = shape["dflash_config"] | published_head(target, 1024)
    return shape | {"architectures": [ARCHITECTURE], "dflash_config": inside}


def published_head(target: ModelConfig, width: int) -> dict[str, Any]:
    """The settings of the head."""
    return {
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": min(8, target.vocab_size),
        "lilicorr_hidden_size": width,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 8,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": width,
        "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0,
    }
