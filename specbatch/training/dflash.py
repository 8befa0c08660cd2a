"""Training of DFLASH drafts, in the format of z-lab (`DFlashDraftModel`): a block of mask tokens is filled in one pass.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). Anchors are sampled at
random among an answer's tokens. An anchor is followed by block_size - 1 mask tokens, which attend to the target's
features before the anchor and to each other; row j learns the token at anchor + j. Embedding and output matrix are the
target's and are not trained. Row j has the loss weight exp(-(j - 1) / (block_size / 2)), as a draft counts only if all
before it are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from specbatch.kernels.common.upload import upload
from specbatch.models.config import ModelConfig
from specbatch.training.data import Batch, Example, indices, unused_token
from specbatch.training.head import Guess, Head, Layer, Scores, layer_keys, plain_heads, require_inner_layers
from specbatch.training.layers import Attention, Mlp, Norm, Rotary, initialize
from specbatch.training.recipe import Recipe
from specbatch.training.target import Target

ARCHITECTURE = "DFlashDraftModel"


class Blocks(NamedTuple):
    """Blocks of a batch after randomly drawn anchors, as a draft fills them: N, A of each of B examples of L tokens.

    hidden     [N, rows, H], of the draft
    truth      int64 [N, drafts + 1], the tokens from the anchor on
    last, aux  [B, L, H] and [B, L, n * H], of the target
    places     int64 [B, A, drafts + 1], positions from the anchor on (on the host)
    known      bool [B, A, drafts + 1], whether a valid block has a token there (on the host)
    """

    hidden: torch.Tensor
    truth: torch.Tensor
    last: torch.Tensor
    aux: torch.Tensor
    places: torch.Tensor
    known: torch.Tensor

    def within(self, row: int) -> torch.Tensor:
        """The blocks that have a token at `row`, from the anchor on."""
        return indices(self.known[..., row], self.truth.device)

    @property
    def flat(self) -> torch.Tensor:
        """`places` among the B * L tokens, int64 [N, drafts + 1]."""
        starts = torch.arange(len(self.places))[:, None, None] * self.last.shape[1]
        return upload(self.places + starts, self.last.device).flatten(0, 1)


class DFlashHead(Head):
    """architecture: in its config; _own: settings of later kinds that `dflash_config` has."""

    architecture = ARCHITECTURE
    _own: Mapping[str, Any] = {}

    def __init__(
        self, target: Target, *, layers: int, block: int, anchors: int, mask_token: int, max_len: int, seed: int
    ) -> None:
        """block: tokens of a block, including the anchor; anchors: maximum number per example."""
        super().__init__()
        base = target.config
        sizes = replace(
            base, num_layers=layers, qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False, **plain_heads(base)
        )
        hidden, eps = base.hidden_size, base.rms_norm_eps
        self.drafts, self._rows = block - 1, block
        self.aux = feature_layers(base.depth, layers)
        self._sizes, self._depth = sizes, base.depth
        self._anchors, self._mask_token = anchors, mask_token
        self.fc = nn.Linear(len(self.aux) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(self._new_layer(sizes) for _ in range(layers))
        self.norm = Norm(hidden, eps)
        initialize(self, seed)
        with torch.no_grad():
            self.norm.weight.copy_(target.norm)
        self.to(target.device)
        self._rotary = Rotary(sizes, max_len + block, target.device)

    def _new_layer(self, sizes: ModelConfig) -> Layer:
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        return Layer(
            Attention(sizes), Norm(hidden, eps), Norm(hidden, eps), Mlp(sizes.hidden_size, sizes.intermediate_size)
        )

    @property
    def _decay(self) -> float:
        """The loss weight of a row, relative to the one before."""
        return math.exp(-2 / (self.drafts + 1))

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        blocks = self._filled_blocks(batch, target, generator)
        hidden, truth = blocks.hidden, blocks.truth
        alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        guesses = []
        for row in range(1, self.drafts + 1):
            here = blocks.within(row)
            logits, wanted = F.linear(hidden[here, row], target.head).float(), truth[here, row]
            hits = logits.argmax(-1) == wanted
            alive[here] &= hits
            guesses.append(Guess(F.cross_entropy(logits, wanted, reduction="none"), hits, alive[here]))
        return Scores.of(guesses, self._decay)

    def forward(self, aux: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """aux [B, L, n * H], embedded blocks [B, A, rows, H] and their positions int64 [B, A, rows] -> hidden states
        [B, A, rows, H]."""
        context = self.hidden_norm(self.fc(aux))  # no layer's input norm is applied to it
        at = torch.arange(aux.shape[1], device=aux.device)
        hidden = (at >= places[:, :, :1])[:, :, None]  # [B, A, 1, L]: keys before the anchor are visible
        x = blocks
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention, read = layer.self_attn, layer.enter(x)
            q, _ = attention.queries(read, self._rotary, places)
            k, v = attention.keys_values(read, self._rotary, places)
            seen_k, seen_v = attention.keys_values(context, self._rotary, at)
            far = torch.einsum("barkgd,blkd->bkgarl", q, seen_k).masked_fill(hidden[:, None, None], -torch.inf)
            near = torch.einsum("barkgd,bamkd->bkgarm", q, k)  # every row of a block sees all of it
            weights = (torch.cat([far, near], -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
            length = aux.shape[1]
            attended = torch.einsum("bkgarl,blkd->barkgd", weights[..., :length], seen_v)
            attended = attended + torch.einsum("bkgarm,bamkd->barkgd", weights[..., length:], v)
            x = layer.leave(x, attended)
        out: torch.Tensor = self.norm(x)
        return out

    def _filled_blocks(self, batch: Batch, target: Target, generator: torch.Generator) -> Blocks:
        last, aux = target.features(batch, self.aux)
        assert aux is not None
        anchors, drawn = self._draw(batch, generator)
        places = anchors[..., None] + torch.arange(self.drafts + 1)
        tokens = F.pad(batch.tokens, (0, self.drafts + 1))
        truth = tokens.gather(1, upload(places.flatten(1), tokens.device)).view(places.shape)
        rows = upload(places[..., : self._rows], truth.device)
        masked = torch.full_like(rows, self._mask_token)
        masked[..., 0] = truth[..., 0]
        hidden = self(aux, F.embedding(masked, target.embedding), rows)
        known = drawn[..., None] & (places < batch.lengths[:, None, None])
        return Blocks(hidden.flatten(0, 1), truth.flatten(0, 1), last, aux, places, known)

    def _draw(self, batch: Batch, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the anchors int64 [B, A], and which are valid, as an answer may be too short for A: bool [B, A].
        Both are on the host."""
        rows, length = batch.tokens.shape
        at = torch.arange(length)
        possible = (at >= batch.prompts[:, None]) & (at + 1 < batch.lengths[:, None])
        lots = torch.rand(rows, length, generator=generator).masked_fill(~possible, -1)
        drawn = lots.topk(min(self._anchors, length), 1)
        return drawn.indices, drawn.values >= 0

    def config(self) -> dict[str, Any]:
        layers = self._sizes.num_layers
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **layer_keys(self._sizes),
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "num_target_layers": self._depth,
            "block_size": self._rows,
            "dflash_config": {"mask_token_id": self._mask_token, "target_layer_ids": list(self.aux), **self._own},
        }


def untrained_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> DFlashHead:
    """A draft whose mask token does not occur in `train`; see `trainer.make_head`."""
    return DFlashHead(target, **sizes_of(recipe, target, train, spare_tokens))


def sizes_of(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> dict[str, Any]:
    """The arguments of `DFlashHead`. Raises SpecbatchError if there can be no such draft for the target."""
    require_inner_layers(recipe.algorithm, target)
    return {
        "layers": recipe.draft_layers,
        "block": recipe.block_size,
        "anchors": recipe.anchors,
        "mask_token": unused_token(train, target.config.vocab_size, spare_tokens),
        "max_len": recipe.max_len,
        "seed": recipe.seed,
    }


def feature_layers(depth: int, layers: int) -> tuple[int, ...]:
    """Layers of the target, counted from 0, whose output is read: as many as the draft has, at least three, evenly
    spaced from the second to the fourth from the end (z-lab/dflash); fewer if the target has too few layers."""
    count = max(layers, 3)
    wanted = {round(1 + index * (depth - 4) / (count - 1)) for index in range(count)}
    return tuple(sorted({min(max(layer, 0), max(depth - 2, 0)) for layer in wanted}))
