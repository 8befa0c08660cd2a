"""Decode steps in parts: where grammars are matched on the host, it needs the drafts, and acceptance needs its masks.

The target needs neither, so the host computes the masks while it runs. While it drafts, a step asks which tokens may
follow the drafts that there are, and waits for the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from specbatch.core.sampling import Sampling
from specbatch.core.step_input import Proposal, StepInput
from specbatch.core.token_constraint import HostGrammars, HostMasks
from specbatch.drafters.base import no_drafts
from specbatch.engine.device.step import DecodeStep, Verified
from specbatch.kernels.common.upload import upload
from specbatch.models.decoder import Features
from specbatch.runtime.cuda_graphs import GraphCounters, Recorder, Result
from specbatch.runtime.verify_graphs import VerifyGraphs

T = TypeVar("T")
Paths = Sequence[Sequence[Sequence[int]]]
Replaced = tuple[list[list[int]], list[int]]


@dataclass(frozen=True)
class MaskUpload:
    """`HostMasks` as plain data: places of requests in a pass, and bits int32 [H, n, words]."""

    requests: list[int]
    bits: np.ndarray


class HostAnswers(Protocol):
    """What the host knows of the grammars of a step, as plain data; see `HostGrammars`."""

    def masks(self, paths: Paths) -> MaskUpload: ...

    def replaced(self, drafts: list[list[int]], drafted: list[int]) -> Replaced: ...


class AskedHost:
    """`HostGrammars` as one rank has them.

    answers  of rank 0
    tell     called with each answer there
    receive  returns the next one on the other ranks; None on rank 0
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.answers: HostAnswers | None = None
        self.tell: Callable[[Any], None] = lambda answer: None
        self.receive: Callable[[], Any] | None = None

    def masks(self, paths: Paths) -> HostMasks:
        return _uploaded(self._ask(lambda host: host.masks(paths)), self._device)

    def replace(self, drafts: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = drafts.tolist(), drafted.tolist()
        tokens, counts = self._ask(lambda host: host.replaced(*given))
        return upload(tokens, self._device).view_as(drafts), upload(counts, self._device)

    def _ask(self, question: Callable[[HostAnswers], T]) -> T:
        if self.receive is not None:
            return self.receive()  # type: ignore[no-any-return]
        assert self.answers is not None
        answer = question(self.answers)
        self.tell(answer)
        return answer


class Drafts(NamedTuple):
    """What a step drafts, see `Proposal`: tokens int64 [B, n], how many of them count, int64 [B], and ancestors int64
    [B, n + 1] of a tree."""

    tokens: torch.Tensor
    drafted: torch.Tensor
    ancestors: torch.Tensor | None


class StepInParts:
    """A decode step that stops twice: after drafting, and before acceptance. The target's layers run from a graph where
    there are any; the rest, and passes over trees and within a budget, run eagerly."""

    def __init__(self, decode_step: DecodeStep, counters: GraphCounters) -> None:
        self._decode_step = decode_step
        self._counters = counters
        self.graphs: VerifyGraphs | None = None
        self._drafted: tuple[StepInput, Proposal] | None = None
        self._verified: Verified | None = None

    def record(self, recorder: Recorder, inputs: Callable[[torch.Tensor, int], StepInput], most: int) -> None:
        """Have graphs from now on. inputs: the step over slots [B] that draft so many tokens each; most: largest
        batch."""

        def forward(slots: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            step = self._decode_step.begin(inputs(slots, drafts.shape[1]))
            (last, aux), positions = self._decode_step.forward(step, no_drafts(step)._replace(tokens=drafts))
            return (last, positions) if aux is None else (last, positions, aux)

        self.graphs = VerifyGraphs(forward, recorder, self._counters, most)

    def propose(self, step: StepInput, host: HostGrammars) -> Drafts:
        step = self._decode_step.begin(step)
        assert step.sampling.adjustments is not None, "the flags of such a request say that it has a grammar"
        asking = replace(step.sampling, adjustments=step.sampling.adjustments._replace(host=host))
        proposal = self._decode_step.propose(replace(step, sampling=asking))
        self._drafted = step, proposal
        return Drafts(proposal.tokens, proposal.drafted, proposal.ancestors)

    def verify(self) -> None:
        assert self._drafted is not None
        step, proposal = self._drafted
        if self.graphs is None or proposal.ancestors is not None or proposal.packed is not None:
            self._counters.fall_back("off" if self.graphs is None else "grammar on the host")
            self._verified = self._decode_step.verify(step, proposal)
        else:
            last, positions, *aux = self.graphs(step.slots, proposal.tokens)
            features = Features(last, aux[0] if aux else None)
            self._verified = self._decode_step.score(step, proposal, features, positions)

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
    found = _uploaded(masks, sampling.seeds.device)
    return replace(sampling, adjustments=sampling.adjustments._replace(masks=found))


def _uploaded(masks: MaskUpload, device: torch.device) -> HostMasks:
    return HostMasks(upload(masks.requests, device), upload(masks.bits, device, torch.int32))
