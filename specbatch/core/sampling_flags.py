"""What a pass has to compute beside the most likely tokens, because one of its requests asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specbatch.core.sampling_params import SamplingParams


class SamplingFlags(NamedTuple):
    """What any request of a pass asks for. What none of them asks for is not computed.

    sampled       some request has a temperature
    truncated     some sampled request uses top-k, top-p or min-p
    logprobs      some request asks for log-probabilities
    top_logprobs  some request asks for the most likely tokens
    min_tokens    some request may be within its `min_tokens`
    penalized     some request has a penalty
    biased        some request has a logit bias
    banned        some request has bad words
    constrained   some request has a grammar
    """

    sampled: bool = False
    truncated: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    min_tokens: bool = False
    penalized: bool = False
    biased: bool = False
    banned: bool = False
    constrained: bool = False

    @property
    def adjusts(self) -> bool:
        """Whether logits change before a token is chosen."""
        return self.penalized or self.biased or self.banned or self.constrained

    @property
    def needs_logits(self) -> bool:
        """Whether more of the target's logits is needed than their argmax."""
        return any(self)

    @classmethod
    def of(cls, params: SamplingParams, *, has_ends: bool, banned: bool, constrained: bool) -> SamplingFlags:
        """What a request asks for. has_ends: whether any token ends its answer; banned: whether it has bad words;
        constrained: whether it has a grammar."""
        sampled = params.temperature > 0
        return cls(
            sampled=sampled,
            truncated=bool(sampled and (params.top_k or params.top_p < 1 or params.min_p)),
            logprobs=bool(params.logprobs),
            top_logprobs=bool(params.top_logprobs),
            min_tokens=bool(params.min_tokens and has_ends),
            penalized=params.is_penalized,
            biased=bool(params.logit_bias),
            banned=banned,
            constrained=constrained,
        )

    @classmethod
    def union(cls, flags: Iterable[SamplingFlags]) -> SamplingFlags:
        """What at least one request asks for. The flags of many requests are few different ones."""
        return cls(*map(any, zip(*set(flags), strict=True)))
