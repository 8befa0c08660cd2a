"""Argmax of logits, and the top-k tokens with their log-probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import op


def argmax_ref(logits: torch.Tensor, ids: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The most likely token of each row of logits [R, V] or [B, n, V]: int64 [R] or [B, n].

    ids int64 [V]: the token of each column, None if they are the same. out: where the tokens are written, if given.
    Rows of logits may be strided, as may a one-dimensional `out`.
    """
    tokens = logits.argmax(-1)
    tokens = tokens if ids is None else ids[tokens]
    return tokens if out is None else out.copy_(tokens)


def argmax_embedding_ref(
    logits: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The embedding of the most likely token of each row of logits [R, V], from `embedding` [tokens, H]: [R, H]. The
    tokens are also written to `out` int64 [R]."""
    return F.embedding(argmax_ref(logits, ids, out), embedding)


def topk_logprobs_ref(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k tokens of logits [..., V]: log-probabilities float32 and tokens int64 [..., topk], the most likely
    first, among equals that of the lower column. ids as in `argmax_ref`."""
    wide = logits.float()
    best = _ordered(wide).topk(topk).indices  # topk of the logits would break ties in any order
    found = wide.gather(-1, best) - wide.logsumexp(-1, keepdim=True)
    # A draft with a NaN has no probability; the target finds it by itself.
    return found.nan_to_num(-torch.inf, neginf=-torch.inf).clamp(max=0), best if ids is None else ids[best]


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 [..., V] that order like float32 x, a NaN above all, and among equals by column from the right."""
    bits = x.view(torch.int32)
    keys = torch.where(x == 0, 0, bits ^ (bits >> 31 & 0x7FFFFFFF))
    keys = torch.where(x.isnan(), 0x7FFFFFFF, keys)
    return keys.long() << 32 | torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)


argmax = op(argmax_ref, "specbatch.kernels.sampling.argmax_topk_triton:argmax")
argmax_embedding = op(argmax_embedding_ref, "specbatch.kernels.sampling.argmax_topk_triton:argmax_embedding")
topk_logprobs = op(topk_logprobs_ref, "specbatch.kernels.sampling.argmax_topk_triton:topk_logprobs")
