"""Argmax of logits, whole or divided over ranks, and the top-k tokens with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specbatch.kernels.common.rowwise import logsumexp
from specbatch.kernels.dispatch import op


@dataclass(frozen=True)
class Maxima:
    """What an argmax needs of logits [..., V]: the maxima of parts of the vocabulary.

    keys  int64 [..., parts]: the bits of the logit, ordered, above, 0x7FFFFFFF - token below, so that the largest key
          has the largest logit, of the lowest token among equals; a NaN is above all
    """

    keys: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        return self.keys.is_cuda

    def __getitem__(self, rows: Any) -> Maxima:
        return Maxima(self.keys[rows])

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Maxima:
        return Maxima(self.keys.unflatten(dim, sizes))

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit float32 [...] and its token int64 [...]."""
        best = self.keys.amax(-1)
        key = (best >> 32).int()
        return (key ^ (key >> 31 & 0x7FFFFFFF)).view(torch.float32), 0x7FFFFFFF - (best & 0x7FFFFFFF)


Scores = torch.Tensor | Maxima  # logits, or what suffices where only their argmax is needed


def argmax_keys_ref(logits: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`Maxima.keys` int64 [R, parts] of logits [R, n] of tokens first, first + 1, ..., of which `count` exist. How many
    parts there are does not depend on `count`."""
    if not count:  # below whatever exists
        return _packed(logits.new_full((len(logits), 1), -torch.inf).float(), first)
    values, columns = logits[:, :count].float().max(-1, keepdim=True)
    return _packed(values, first + columns)


def argmax_ref(
    logits: Scores,
    ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chances: torch.Tensor | None = None,
) -> torch.Tensor:
    """The most likely token of each row of logits [R, V] or [B, n, V]: int64 [R] or [B, n].

    ids int64 [V]: the token of each column, None if they are the same. out: where the tokens are written, if given;
    chances float32: where their probabilities are written, 0 in a row with a NaN, with a positive infinity or with
    negative infinities only. Rows of logits may be strided, as may a one-dimensional `out` or `chances`.
    """
    if chances is not None:
        assert isinstance(logits, torch.Tensor), "maxima have no probabilities"
        wide = logits.float()
        chances.copy_((wide.amax(-1) - wide.logsumexp(-1)).exp().nan_to_num(0.0))
    tokens = logits.best()[1] if isinstance(logits, Maxima) else logits.argmax(-1)
    tokens = tokens if ids is None else ids[tokens]
    return tokens if out is None else out.copy_(tokens)


def argmax_embedding_ref(
    logits: Scores,
    embedding: torch.Tensor,
    ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chances: torch.Tensor | None = None,
) -> torch.Tensor:
    """The embedding of the most likely token of each row of logits [R, V], from `embedding` [tokens, H]: [R, H]. The
    tokens are also written to `out` int64 [R], and their probabilities to `chances` as by `argmax_ref`."""
    return F.embedding(argmax_ref(logits, ids, out, chances), embedding)


def topk_logprobs_ref(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k tokens of logits [..., V]: log-probabilities float32 and tokens int64 [..., topk], the most likely
    first, among equals that of the lower column. ids as in `argmax_ref`."""
    wide = logits.float()
    keys = _packed(wide, torch.arange(wide.shape[-1], device=wide.device))
    best = keys.topk(topk).indices  # topk of the logits would break ties in any order
    found = wide.gather(-1, best) - logsumexp(wide)[..., None]
    # A draft with a NaN has no probability; the target finds it by itself.
    return found.nan_to_num(-torch.inf, neginf=-torch.inf).clamp(max=0), best if ids is None else ids[best]


def _packed(x: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
    """int64 that order like float32 x, a NaN above all, and among equals like -tokens; see `Maxima`."""
    bits = x.view(torch.int32)
    keys = torch.where(x == 0, 0, bits ^ (bits >> 31 & 0x7FFFFFFF))
    keys = torch.where(x.isnan(), 0x7FFFFFFF, keys)
    return keys.long() << 32 | 0x7FFFFFFF - tokens


argmax_keys = op(argmax_keys_ref, "specbatch.kernels.sampling.argmax_topk_triton:argmax_keys")
argmax = op(argmax_ref, "specbatch.kernels.sampling.argmax_topk_triton:argmax")
argmax_embedding = op(argmax_embedding_ref, "specbatch.kernels.sampling.argmax_topk_triton:argmax_embedding")
topk_logprobs = op(topk_logprobs_ref, "specbatch.kernels.sampling.argmax_topk_triton:topk_logprobs")
