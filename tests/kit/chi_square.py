"""Chi-square test of counts against a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def p_value(counts: Sequence[float] | torch.Tensor, expected: Sequence[float] | torch.Tensor) -> float:
    """Chance of counts at least as far from the expected ones; cells expected fewer than five times are pooled.

    0 where something impossible was counted.
    """
    observed, wanted = torch.as_tensor(counts).double().flatten(), torch.as_tensor(expected).double().flatten()
    if observed[wanted == 0].any():
        return 0.0
    rare = wanted < 5
    if wanted[rare].sum() >= 5:
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    else:
        observed, wanted = observed[~rare], wanted[~rare]
    if len(wanted) < 2:
        return 1.0
    wanted = wanted * observed.sum() / wanted.sum()
    statistic = ((observed - wanted).square() / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def smallest_p_value(tokens: torch.Tensor, distribution: torch.Tensor) -> float:
    """Of first tokens, pairs, triples and so on. tokens: int [N, width]; distribution: [vocabulary] * width."""
    vocabulary, width = distribution.shape[0], distribution.dim()
    worst = 1.0
    for count in range(1, width + 1):
        code = (tokens[:, :count] * vocabulary ** torch.arange(count - 1, -1, -1)).sum(-1)
        chances = distribution.reshape(vocabulary**count, -1).sum(1)
        worst = min(worst, p_value(code.bincount(minlength=len(chances)), chances * len(tokens)))
    return worst


def distance_ratio(tokens: torch.Tensor, distribution: torch.Tensor) -> float:
    """Total variation distance as a multiple of the average one of as many draws from the distribution itself."""
    code = (tokens * distribution.shape[0] ** torch.arange(distribution.dim() - 1, -1, -1)).sum(-1)
    chances = distribution.flatten().double()
    counts, expected = code.bincount(minlength=len(chances)), chances * len(tokens)
    typical = (expected * (1 - chances) * 2 / math.pi).sqrt().sum()
    return float((counts - expected).abs().sum() / typical.clamp(min=1))
