"""What a draft's logits say: the likeliest token, or the likeliest children of the nodes of a tree."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels import dispatch


def argmax_ref(logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The likeliest token of each row of logits [..., V]: int64 [...]. ids int64 [V]: the token that each column stands
    for, None if they are the same."""
    tokens = logits.argmax(-1)
    return tokens if ids is None else ids[tokens]


def topk_logprobs_ref(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens behind logits [..., V] and the logarithms of their probabilities: float32 and int64 [...,
    topk], the likeliest first, among equals that of the lower column. ids as in `argmax_ref`."""
    wide = logits.float()
    best = _ordered(wide).topk(topk).indices  # of the logits themselves it would break ties as it likes
    found = wide.gather(-1, best) - wide.logsumexp(-1, keepdim=True)
    # A draft that is no number is worth nothing; the target finds that out by itself.
    return found.nan_to_num(-torch.inf, neginf=-torch.inf).clamp(max=0), best if ids is None else ids[best]


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 [..., V] that order like float32 x, a NaN above all, and among equals by column from the right."""
    bits = x.view(torch.int32)
    keys = torch.where(x == 0, 0, bits ^ (bits >> 31 & 0x7FFFFFFF))
    keys = torch.where(x.isnan(), 0x7FFFFFFF, keys)
    return keys.long() << 32 | torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)


def argmax(logits: torch.Tensor, ids: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """`argmax_ref`, in two launches on a CUDA device. logits [R, V] or [B, n, V], whose rows may be apart in memory;
    out: where the tokens go, if given; for logits [R, V] they may be apart too."""
    if dispatch.runs_kernels(logits):
        from specbatch.kernels.sampling import argmax_topk_triton

        return argmax_topk_triton.argmax(logits, ids, out)
    tokens = argmax_ref(logits, ids)
    return tokens if out is None else out.copy_(tokens)


def argmax_embedding(
    logits: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The embedding of the likeliest token of each row of logits [R, V], from `embedding` [tokens, H]: [R, H]. The
    tokens themselves go to `out` int64 [R]. In two launches on a CUDA device."""
    if dispatch.runs_kernels(logits):
        from specbatch.kernels.sampling import argmax_topk_triton

        return argmax_topk_triton.argmax_embedding(logits, embedding, ids, out)
    return F.embedding(argmax(logits, ids, out), embedding)


def topk_logprobs(
    logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_logprobs_ref`, in two launches on a CUDA device."""
    if dispatch.runs_kernels(logits):
        from specbatch.kernels.sampling import argmax_topk_triton

        return argmax_topk_triton.topk_logprobs(logits, topk, ids)
    return topk_logprobs_ref(logits, topk, ids)
