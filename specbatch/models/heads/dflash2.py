"""Network and config of DFlash 2 drafts: the layers of DFlash with convolutions along the block, and a path selector.

github.com/z-lab/dflash. The input and the output of attention and of the MLP pass a causal convolution along the block.
Its kernel is the sum of a learned one per channel and one per group of channels that depends on the normed input. The
selector takes the most likely tokens of each row as candidates and adds to their logits how well each follows the token
before it, so that the tokens of a block are chosen one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from specbatch.errors import refuse
from specbatch.files.config_values import count_of
from specbatch.kernels.elementwise.activations import silu_and_mul
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.sampling.argmax_topk import topk_logprobs
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.families import llama
from specbatch.models.formats.format import Shapes
from specbatch.models.heads import dflash
from specbatch.models.heads.dflash import DFlash, DFlashConfig
from specbatch.models.layers.blocks import Attention, Layer, SwiGlu
from specbatch.models.weight_reader import Reader, Tables

ARCHITECTURE = "DFlash2DraftModel"
MOST_CANDIDATES = 64  # of a row
_SELECTOR = "candidate_selector"
_CODEBOOKS = (f"{_SELECTOR}.predecessor_codebook", f"{_SELECTOR}.successor_codebook")
final_norm = llama.final_norm


@dataclass(frozen=True, kw_only=True)
class ConvolvedConfig(DFlashConfig):
    """Sizes of a draft's layers with convolutions, and how it reads its target.

    conv_kernel    tokens that a convolution reads: that of its row and those before it; 0: there are none
    conv_group     channels that share a kernel that depends on the input
    rows           tokens of a pass; the block size, or fewer
    """

    own_keys: ClassVar[tuple[str, ...]] = ("conv_kernel_size",)
    module: ClassVar[str] = "specbatch.models.heads.dflash2"
    may_lack_convolutions: ClassVar[bool] = False

    conv_kernel: int
    conv_group: int
    rows: int

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        block, keys = count_of(own, "block_size"), ("conv_kernel_size", "conv_group_size")
        kernel, group = 0, 1
        if not cls.may_lack_convolutions or any(own.get(key) for key in keys):
            kernel, group = count_of(own, keys[0], most=block), count_of(own, keys[1])
        if plain.hidden_size % group:
            raise refuse(keys[1], group, f"it must divide hidden_size={plain.hidden_size}")
        return {"conv_kernel": kernel, "conv_group": group, "rows": block}

    def with_drafts(self, count: int) -> Self:
        return replace(self, rows=count if self.from_anchor else count + 1)

    def lines(self) -> list[str]:
        kernels = f"  convolutions over {self.conv_kernel} tokens, groups of {self.conv_group} channels"
        return [*super().lines(), *([kernels] if self.conv_kernel else [])]


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(ConvolvedConfig):
    """Sizes of the draft's layers and selector, and how it reads its target.

    selector_rank  columns of the selector's codebooks
    candidates     tokens of a row that the selector chooses from
    """

    algorithm: ClassVar[str] = "dflash2"
    own_keys: ClassVar[tuple[str, ...]] = (*ConvolvedConfig.own_keys, "selector_rank")

    selector_rank: int
    candidates: int

    @classmethod
    def _heads(cls, own: dict[str, Any], plain: ModelConfig) -> dict[str, Any]:
        return super()._heads(own, plain) | {
            "selector_rank": count_of(own, "selector_rank"),
            "candidates": count_of(own, "selector_top_k", most=min(plain.vocab_size, MOST_CANDIDATES)),
        }

    @property
    def choices(self) -> int:
        return self.candidates

    def head_shapes(self) -> Shapes:
        shapes = super().head_shapes()
        shapes |= dict.fromkeys(_CODEBOOKS, (self.vocab_size, self.selector_rank))
        shapes[f"{_SELECTOR}.hidden_projection.weight"] = (self.selector_rank, self.hidden_size)
        return shapes

    def lines(self) -> list[str]:
        chosen = f"  a selector of rank {self.selector_rank} chooses from {self.candidates} tokens"
        return [*super().lines(), chosen]


@dataclass(frozen=True)
class Convolution:
    """A causal convolution along blocks of `rows` tokens, before (0) and after (1) a part of a layer.

    base [2, kernel, H]: a kernel per channel; dynamic: the layer that computes one per group from the part's normed
    input, [T, H] -> [T, 2 * kernel * groups].
    """

    base: torch.Tensor
    dynamic: Linear
    rows: int

    def __call__(self, x: torch.Tensor, read: torch.Tensor, side: int) -> torch.Tensor:
        """Convolve x [T, H] of whole blocks; read [T, H]: the part's normed input."""
        _, size, hidden = self.base.shape
        kernels = self.dynamic(read).unflatten(1, (2, size, -1))[:, side].unflatten(0, (-1, self.rows))  # [B, N, k, g]
        return convolved(x.view(-1, self.rows, hidden), self.base[side], kernels).view(-1, hidden)


def convolved(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
    """The causal convolution [..., rows, H] of x [..., rows, H] along its rows. base [kernel, H]: a kernel per channel;
    dynamic [..., rows, kernel, groups]: what is added to it, per row and group of channels."""
    size, rows = len(base), x.shape[-2]
    base = base.unflatten(-1, (dynamic.shape[-1], -1))
    blocks = x.unflatten(-1, base.shape[1:])
    out = torch.zeros_like(blocks)
    for back in range(min(size, rows)):
        shifted = F.pad(blocks[..., : rows - back, :, :], (0, 0, 0, 0, back, 0))
        out = out + (base[back] + dynamic[..., back, :, None]) * shifted
    return out.flatten(-2)


@dataclass(frozen=True, kw_only=True)
class ConvolvedAttention(Attention):
    conv: Convolution

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        read = rms_norm(x, *self.norm)
        return self.qkv(self.conv(read, read, 0), out=out)

    def leave(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return x + self.conv(self.out(mixed), rms_norm(x, *self.norm), 1)


@dataclass(frozen=True, kw_only=True)
class ConvolvedMlp(SwiGlu):
    conv: Convolution

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        read = rms_norm(x, *self.norm)
        inner = silu_and_mul(self.gate_up(self.conv(read, read, 0)))
        return x + self.conv(self.down(inner), read, 1)


def layer(read: Reader, index: int, tables: Tables) -> Layer:
    """Layer `index`, with convolutions if the config has them; tables: cos and sin."""
    config, plain, stem = read.config, llama.layer(read, index, tables), f"model.layers.{index}"
    assert isinstance(config, ConvolvedConfig)
    if not config.conv_kernel:
        return plain

    def convolution(name: str) -> Convolution:
        size, groups = config.conv_kernel, config.hidden_size // config.conv_group
        base = read(f"{stem}.{name}.base_kernel", 2, size, config.hidden_size)
        dynamic = read.linear({f"{stem}.{name}.kernel_projection": 2 * size * groups}, config.hidden_size)
        return Convolution(base, dynamic, config.rows)

    assert isinstance(plain.mixer, Attention)
    [mlp] = plain.mlps
    assert isinstance(mlp, SwiGlu)
    return Layer(
        ConvolvedAttention(**vars(plain.mixer), conv=convolution("attention_conv")),
        (ConvolvedMlp(**vars(mlp), conv=convolution("mlp_conv")),),
    )


class DFlash2(DFlash):
    """The draft's weights; the embedding is the target's, and so is the output matrix, or a copy of it in FP8.

    predecessors: [V, rank], the selector's codebook for the token before.
    """

    def __init__(self, fetch: Reader, target: Decoder, max_positions: int) -> None:
        super().__init__(fetch, target, max_positions)
        assert isinstance(fetch.config, DFlash2Config)
        self.predecessors, self._successors = (fetch(name) for name in _CODEBOOKS)
        self._projection = Linear(fetch(f"{_SELECTOR}.hidden_projection.weight"))
        self._candidates = fetch.config.candidates

    def candidates(self, logits: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The candidates of logits [T, V] and hidden [T, hidden_size]: tokens int64 [T, K], logits up to a constant
        float32 [T, K], and what the codebooks' product is weighted with [T, rank]."""
        scores, tokens = topk_logprobs(logits, self._candidates)
        return tokens, scores, self._projection(hidden)

    def scores(
        self, tokens: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32 [B, V] of one row per block, -inf for all but its candidates, as `candidates` returns them.
        embedded [B, rank]: `predecessors` of the tokens before."""
        known = self.candidate_scores(tokens, scores, weights, embedded[:, None])[:, 0]
        return spread(known, tokens, len(self._successors))

    def candidate_scores(
        self, tokens: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32 [B, W, K] of the K candidates of one row per block, as `candidates` returns them, after each
        of W tokens. embedded [B, W, rank]: `predecessors` of these."""
        follows = torch.einsum("bwr,bkr->bwk", embedded * weights[:, None], F.embedding(tokens, self._successors))
        return scores[:, None] + follows.float()


def spread(scores: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits float32 [B, vocabulary] that are -inf but for candidates int64 [B, K] with scores float32 [B, K]."""
    return scores.new_full((len(scores), vocabulary), -torch.inf).scatter_(1, tokens, scores)


def published_shape(target: ModelConfig) -> dict[str, Any]:
    """The config of a draft as published by z-lab for targets of this shape: that of DFlash drafts, convolutions over 2
    tokens in groups of 16 channels, and a selector of rank 256 over 16 candidates."""
    shape = dflash.published_shape(target)
    inside = shape["dflash_config"] | published_heads(target)
    return shape | {"architectures": [ARCHITECTURE], "dflash_config": inside}


def published_heads(target: ModelConfig) -> dict[str, int]:
    """The settings of the convolutions and the selector."""
    return {
        "conv_kernel_size": 2,
        "conv_group_size": 16 if target.hidden_size % 16 == 0 else 1,
        "selector_rank": 256,
        "selector_top_k": min(16, target.vocab_size),
    }
