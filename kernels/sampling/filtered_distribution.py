"""The distribution that tokens are sampled from: temperature, top-k, top-p and min-p."""

from __future__ import annotations

from typing import Protocol

import torch

from specbatch.kernels.common.rowwise import softmax


class SamplingFlags(Protocol):
    """sampled: some row has a temperature; truncated: some row uses top-k, top-p or min-p."""

    @property
    def sampled(self) -> bool: ...

    @property
    def truncated(self) -> bool: ...


class SamplingTensors(Protocol):
    """Sampling parameters of B rows: temperature, top_p and min_p float32 [B], top_k and seeds int64 [B]."""

    @property
    def temperature(self) -> torch.Tensor: ...

    @property
    def top_k(self) -> torch.Tensor: ...

    @property
    def top_p(self) -> torch.Tensor: ...

    @property
    def min_p(self) -> torch.Tensor: ...

    @property
    def seeds(self) -> torch.Tensor: ...

    @property
    def flags(self) -> SamplingFlags: ...


def probabilities_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution a token is sampled from, filtered by top-k, top-p and min-p: float32 [R, V].

    logits [R, V]; the parameters are [R]. Order: temperature, top-k (0 is off), top-p, min-p. Temperature 0 gives
    the one-hot of the argmax. The three filters are given together or not at all (None).
    """
    greedy = temperature <= 0
    logits = logits.float()
    # Beyond these bounds the distribution would be the same, but intermediate values overflow.
    scaled = logits / temperature.clamp(1e-30, 1e30)[:, None]
    if top_k is not None and top_p is not None and min_p is not None:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), -torch.inf)
        p = softmax(ordered)
        before = p.cumsum(-1) - p
        # The most likely token always stays, whatever rounding does to its sum.
        drop = ((before >= top_p[:, None]) & (top_p < 1)[:, None] | (p < min_p[:, None] * p[:, :1])) & (rank > 0)
        ordered = ordered.masked_fill(drop, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    p = softmax(scaled)
    one_hot = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, p)
