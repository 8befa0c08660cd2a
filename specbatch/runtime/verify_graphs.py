"""CUDA graphs of the target's pass in decode steps that run in parts, as they wait for grammars on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specbatch.runtime.cuda_graphs import GraphCounters, Program, Recorder

Forward = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


class Recorded(NamedTuple):
    """A recording, its inputs int64 [B] and [B, n], and what it leaves for each request."""

    replay: Program
    slots: torch.Tensor
    drafts: torch.Tensor
    outputs: tuple[torch.Tensor, ...]


class VerifyGraphs:
    """One recording per number of drafts and batch size that is a power of two, or the largest. Few jobs have such
    grammars, so each is recorded when it is first asked for. The output matrix is not part of it: logits of all rows
    would take hundreds of megabytes, and a pass has one launch for them."""

    def __init__(self, forward: Forward, recorder: Recorder, counters: GraphCounters, most: int) -> None:
        """forward: the pass over slots [B] and their drafts [B, n]; all it returns has rows of the requests in their
        order, equally many of each. most: largest batch, for which memory was planned."""
        self._forward = forward
        self._recorder = recorder
        self._counters = counters
        self._most = most
        self._recordings: dict[tuple[int, int], Recorded] = {}

    def __call__(self, slots: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `forward` returns of slots int64 [B] and drafts int64 [B, n]. It holds until the next call."""
        count, nodes = len(drafts), drafts.shape[1]
        bucket = min(1 << (count - 1).bit_length(), self._most)
        recorded = self._recordings.get((bucket, nodes))
        if recorded is None:
            recorded = self._recordings[bucket, nodes] = self._record(bucket, drafts)
            self._counters.recorded_late += 1
        recorded.slots[:count].copy_(slots)
        recorded.slots[count:].zero_()
        recorded.drafts[:count].copy_(drafts)
        recorded.replay()
        self._counters.replays += 1
        self._counters.padded += bucket - count
        return tuple(output[: len(output) // bucket * count] for output in recorded.outputs)

    def _record(self, bucket: int, drafts: torch.Tensor) -> Recorded:
        """Over padding slots, which is harmless."""
        slots, inputs = drafts.new_zeros(bucket), drafts.new_zeros(bucket, drafts.shape[1])
        outputs: list[torch.Tensor] = []

        def warm() -> None:
            outputs.extend(torch.empty_like(found) for found in self._forward(slots, inputs))

        def program() -> None:
            for output, found in zip(outputs, self._forward(slots, inputs), strict=True):
                output.copy_(found)

        self._recorder.warm(warm)
        return Recorded(self._recorder.record(program), slots, inputs, tuple(outputs))
