"""Sampling parameters of the requests in one pass, and tokens sampled by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specbatch.core.logit_adjustments import Adjustments
from specbatch.core.sampling_flags import SamplingFlags
from specbatch.core.token_constraint import Constraint
from specbatch.kernels.dispatch import op
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.rng import uniform_ref
from specbatch.kernels.sampling.sample import sample_ref

__all__ = ["Sampling", "SamplingFlags"]


@dataclass(frozen=True)
class Sampling:
    """Parameters of B requests on the device, each [B]. Without `flags.sampled` all but the seeds are empty.

    end_tokens  int64 [B, K]: tokens that end a request, with repetitions; None without `flags.min_tokens`
    end_from    int64 [B]: the first position where they may be sampled
    adjustments penalties and biases; None without the flags for them
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    flags: SamplingFlags
    end_tokens: torch.Tensor | None = field(default=None, kw_only=True)
    end_from: torch.Tensor | None = field(default=None, kw_only=True)
    adjustments: Adjustments | None = field(default=None, kw_only=True)

    @property
    def constraint(self) -> Constraint | None:
        """The grammars; None if no request has one."""
        return None if self.adjustments is None else self.adjustments.constraint

    @contextmanager
    def end_tokens_masked(self, logits: Scores, positions: torch.Tensor) -> Iterator[None]:
        """Inside, logits [B, n, V] of tokens at `positions` [B, n] before `end_from` are -inf for end tokens."""
        if self.end_tokens is None or self.end_from is None:
            yield
            return
        assert isinstance(logits, torch.Tensor), "single logits are masked"
        index = self.end_tokens[:, None].expand(*positions.shape, -1)
        values = logits.gather(-1, index)
        early = (positions < self.end_from[:, None])[..., None]
        masked = values.masked_fill(early, -torch.inf)
        logits.scatter_(-1, index, masked)
        if self.flags.constrained:  # where a grammar allows nothing else, end tokens stay
            is_empty = logits.amax(-1, keepdim=True) == -torch.inf
            logits.scatter_(-1, index, torch.where(is_empty, values, masked))
        yield
        logits.scatter_(-1, index, values)  # log-probabilities are those of the model

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The filtered distributions of logits [B, n, V] as float32 [B, n, V]."""
        batch, n, vocabulary = logits.shape

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values[:, None].expand(batch, n).flatten()

        filters = (spread(self.top_k), spread(self.top_p), spread(self.min_p)) if self.flags.truncated else ()
        flat = probabilities_ref(logits.flatten(0, 1), spread(self.temperature), *filters)
        return flat.view(batch, n, vocabulary)

    def uniform(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Uniform random numbers for tokens at positions [B, n], keyed on (seed, position, stream)."""
        return uniform_ref(self.seeds[:, None], positions, stream)

    def sample(self, logits: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Tokens int64 [B, n] at `positions` [B, n] from the logits [B, n, V] that predict them: argmax if no request
        has a temperature."""
        if not self.flags.sampled:
            return logits.argmax(-1)
        return _sample(logits, positions, stream, self)

    def sample_with_probabilities(
        self, logits: torch.Tensor, positions: torch.Tensor, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sample`, and the distributions float32 [B, n, V] that the tokens were sampled from."""
        return _sample_with_probabilities(logits, positions, stream, self)


def _sample_ref(logits: torch.Tensor, positions: torch.Tensor, stream: int, sampling: Sampling) -> torch.Tensor:
    return sample_ref(sampling.probabilities(logits), sampling.uniform(positions, stream))


def _sample_with_probabilities_ref(
    logits: torch.Tensor, positions: torch.Tensor, stream: int, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    p = sampling.probabilities(logits)
    return sample_ref(p, sampling.uniform(positions, stream)), p


_sample = op(_sample_ref, "specbatch.kernels.sampling.sample_triton:sample_tokens")
_sample_with_probabilities = op(
    _sample_with_probabilities_ref, "specbatch.kernels.sampling.sample_triton:sample_with_probabilities"
)
