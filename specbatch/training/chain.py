"""Training of heads that draft token by token, unrolled on their own hidden states (EAGLE-3's training-time test).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025);
github.com/sgl-project/SpecForge. Place p pairs the target's feature f_p with token t_{p+1} and predicts t_{p+2}. Step k
continues as in drafting: its input is the output of step k - 1 and the token t_{p+1+k}, at position p + k. Each layer
attends to the pairs with real features up to p, and to the keys of its own steps 1..k at this place. So all places of a
sequence draft in parallel, each from its own prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from specbatch.kernels.common.upload import upload
from specbatch.training.data import Batch, indices
from specbatch.training.head import Guess, Head, Layer, Scores
from specbatch.training.layers import Rotary
from specbatch.training.target import Target

MOST_QUERIES = 2048  # whose scores are kept for the gradient at once
DECAY = 0.8  # weight of a step relative to the one before, as in SpecForge


class ChainHead(Head):
    """kept: int64 [Vd], the target's ids of the tokens that it can draft, ascending; None: all."""

    kept: torch.Tensor | None = None
    rotary: Rotary
    depth = 1  # layers
    decay = DECAY

    def begin(self, last: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The target's features -> hidden [B, L, H], which the head's own output replaces in later steps."""
        raise NotImplementedError

    def advance(self, embedded: torch.Tensor, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        """One step: embedded, hidden [B, L, H] -> the next hidden [B, L, H]."""
        raise NotImplementedError

    def predict(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        """[n, H] -> logits [n, Vd]."""
        raise NotImplementedError

    def losses(
        self, hidden: torch.Tensor, logits: torch.Tensor, last: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The losses float32 [n] of hidden [n, H] with logits [n, Vd], at places where the target's hidden state is
        last[rows] and its distribution wanted[rows], for int64 [n]."""
        return cross_entropy(logits, wanted, rows)

    def score(self, batch: Batch, target: Target, generator: torch.Generator) -> Scores:
        last, aux = target.features(batch, self.aux)
        tokens, device = batch.tokens, batch.tokens.device
        places = torch.arange(tokens.shape[1])
        # Hidden states of answer tokens with a next token: the head learns the target's prediction there.
        known = (places >= batch.prompts[:, None]) & (places + 1 < batch.lengths[:, None])
        shown = last.flatten(0, 1)[indices(known, device)]
        wanted, inside = self._distributions(target, shown)
        row_of = torch.full(known.shape, -1)
        row_of[known] = torch.arange(len(wanted))

        guesses = []
        memory = Memory(self.rotary, upload(places, device), self.depth)
        hidden = self.begin(last, aux)
        right = torch.ones(tokens.numel(), dtype=torch.bool, device=device)
        for step in range(self.drafts):
            hidden = self.advance(F.embedding(ahead(tokens, 1 + step, 0), target.embedding), hidden, memory)
            rows = ahead(row_of, 1 + step, -1)
            valid = ahead(known, 1, False) & (rows >= 0)  # the root is a token of the answer
            here, theirs = indices(valid, device), upload(rows[valid], device)
            own = hidden.flatten(0, 1)[here]
            logits = self.predict(own, target)
            drafted = logits.argmax(-1) if self.kept is None else self.kept[logits.argmax(-1)]
            hits = drafted == ahead(tokens, 2 + step, 0).flatten()[here]
            right[here] &= hits
            losses = self.losses(own, logits, shown, wanted, theirs)
            guesses.append(Guess(losses, hits, right[here], inside[theirs]))
        return Scores.of(guesses, self.decay)

    def _distributions(self, target: Target, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's distribution over the head's tokens, float32 [n, Vd], and whether its most likely token is one
        of them: bool [n]."""
        logits = target.logits(last)
        if self.kept is None:
            return logits.softmax(-1), torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        known = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device).index_fill_(0, self.kept, True)
        return logits[:, self.kept].softmax(-1), known[logits.argmax(-1)]


class _CrossEntropy(torch.autograd.Function):
    """Computes its gradient in the forward pass, and keeps it in the dtype of the logits. With a large vocabulary the
    operations of PyTorch would keep several float32 tensors of its size for each unrolled step."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        log_chances, theirs = logits.log_softmax(-1, dtype=torch.float32), wanted[rows]
        losses = -(theirs * log_chances).sum(-1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_chances.exp_().sub_(theirs).to(logits.dtype))
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad[:, None]), None, None


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Cross entropy float32 [n] of logits [n, V] with the distributions wanted[rows], of float32 [N, V] and int64 [n].
    It can be differentiated once, by the logits."""
    apply: Callable[..., torch.Tensor] = _CrossEntropy.apply  # it has a type since torch 2.15
    return apply(logits, wanted, rows)


class Memory:
    """Keys and values of the steps so far, of each layer. Place p of step k is at position p + k."""

    def __init__(self, rotary: Rotary, places: torch.Tensor, layers: int = 1) -> None:
        self.rotary = rotary
        self._places = places
        self._stored: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]

    @property
    def steps(self) -> int:
        """Number of complete steps."""
        return len(self._stored[-1])

    @property
    def positions(self) -> torch.Tensor:
        """int64 [L]: positions of the next step."""
        return self._places + self.steps

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """q [B, L, kv heads, group, head_dim], k and v [B, L, kv heads, head_dim] of this step, which are added to the
        memory -> attention output [B, L, kv heads, group, head_dim]."""
        self._stored[layer].append((k, v))
        keys, values = zip(*self._stored[layer], strict=True)
        if q.shape[1] <= MOST_QUERIES:
            return _attended(q, keys, values, 0)
        # Scores of a long text would fill the memory: they are computed in parts, and again for the gradient.
        parts = [
            checkpoint(_attended, part, keys, values, place * MOST_QUERIES, use_reentrant=False)
            for place, part in enumerate(q.split(MOST_QUERIES, 1))
        ]
        return torch.cat(parts, 1)


def _attended(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], begin: int
) -> torch.Tensor:
    """Attention output of the queries q [B, Q, ...] from place `begin` on. Each sees the keys of the first step up to
    its own place, and of later steps that of its place."""
    end = begin + q.shape[1]
    here, before = slice(begin, end), torch.arange(end, device=q.device)
    scores = torch.einsum("blkgd,bmkd->bkglm", q, keys[0][:, :end])
    scores = scores.masked_fill(before > before[here, None], -torch.inf)
    own = [torch.einsum("blkgd,blkd->bkgl", q, key[:, here])[..., None] for key in keys[1:]]
    weights = (torch.cat([scores, *own], -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    attended = torch.einsum("bkglm,bmkd->blkgd", weights[..., :end], values[0][:, :end])
    for step, value in enumerate(values[1:]):
        attended = attended + torch.einsum("bkgl,blkd->blkgd", weights[..., end + step], value[:, here])
    return attended


def through(
    layer: Layer, x: torch.Tensor, memory: Memory, index: int = 0, read: torch.Tensor | None = None
) -> torch.Tensor:
    """Layer `index` on the residual stream x [B, L, H], which reads `read` [B, L, inputs * H] in place of its normed x.
    The last layer of a step comes last."""
    read = layer.enter(x) if read is None else read
    attention, positions = layer.self_attn, memory.positions
    q, gate = attention.queries(read, memory.rotary, positions)
    k, v = attention.keys_values(read, memory.rotary, positions)
    return layer.leave(x, memory.attend(q, k, v, index), gate)


def ahead(x: torch.Tensor, count: int, fill: int | bool) -> torch.Tensor:
    """x [B, L] shifted by `count` places; `fill` past the end."""
    return F.pad(x[:, count:], (0, min(count, x.shape[1])), value=fill)
