"""Decode steps in parts: where grammars are matched on the host, it needs the drafts, and acceptance needs its masks.

The target needs neither, so the host computes the masks while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from specbatch.core.sampling import Sampling
from specbatch.core.step_input import Proposal, StepInput
from specbatch.core.token_constraint import HostMasks
from specbatch.engine.device.step import DecodeStep, Verified
from specbatch.kernels.common.upload import upload
from specbatch.runtime.cuda_graphs import Result


@dataclass(frozen=True)
class MaskUpload:
    """`HostMasks` as plain data: places of requests in a pass, and bits int32 [H, n, words]."""

    requests: list[int]
    bits: np.ndarray


class Drafts(NamedTuple):
    """What a step drafts, see `Proposal`: tokens int64 [B, n], how many of them count, int64 [B], and ancestors int64
    [B, n + 1] of a tree."""

    tokens: torch.Tensor
    drafted: torch.Tensor
    ancestors: torch.Tensor | None


class StepInParts:
    """A decode step that stops twice: after drafting, and before acceptance."""

    def __init__(self, decode_step: DecodeStep) -> None:
        self._decode_step = decode_step
        self._drafted: tuple[StepInput, Proposal] | None = None
        self._verified: Verified | None = None

    def propose(self, step: StepInput) -> Drafts:
        step = self._decode_step.begin(step)
        proposal = self._decode_step.propose(step)
        self._drafted = step, proposal
        return Drafts(proposal.tokens, proposal.drafted, proposal.ancestors)

    def verify(self) -> None:
        assert self._drafted is not None
        self._verified = self._decode_step.verify(*self._drafted)

    def accept(self, masks: MaskUpload) -> Result:
        assert self._drafted is not None
        assert self._verified is not None
        (step, proposal), verified = self._drafted, self._verified
        self._drafted = self._verified = None
        step = replace(step, sampling=with_masks(step.sampling, masks))
        return self._decode_step.end(step, proposal, verified)


def with_masks(sampling: Sampling, masks: MaskUpload | None) -> Sampling:
    """The sampling parameters of a pass with masks of some of its requests."""
    if masks is None:
        return sampling
    assert sampling.adjustments is not None, "the flags of such a request say that it has a grammar"
    device = sampling.seeds.device
    found = HostMasks(upload(masks.requests, device), upload(masks.bits, device, torch.int32))
    return replace(sampling, adjustments=sampling.adjustments._replace(masks=found))
