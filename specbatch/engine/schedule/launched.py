"""Work that was launched on the device, until the host handles its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbatch.core.async_copy import AsyncCopy, StepTimer
from specbatch.engine.schedule.draft_length import Choice
from specbatch.engine.schedule.plans import ScheduledChunk, ScheduledRequest


@dataclass(frozen=True)
class Launched:
    """Work on the device whose result the host has not handled yet.

    requests    whose tokens are in the result
    result      None if there are none
    first       a prefill, whose results are first tokens; otherwise a decode step
    scores      log-probabilities of prompt tokens, as many for each of the chunks as in `scored`
    timer       device time of a decode step, where it is known
    passes      the same of the prefill passes before it
    host_s      host time spent launching it
    choice      what a decode step drafts
    in_parts    a decode step that waited for masks of grammars on the host: its time says nothing of others
    """

    requests: Sequence[ScheduledRequest]
    result: AsyncCopy | None
    first: bool
    timer: StepTimer | None = None
    passes: Sequence[StepTimer] = ()
    host_s: float = 0.0
    choice: Choice = field(default=Choice(0))
    in_parts: bool = False
    scored: Sequence[tuple[ScheduledChunk, int]] = ()
    scores: AsyncCopy | None = None

    def ready(self) -> bool:
        """Whether the host can handle it without waiting."""
        return all(copy is None or copy.ready() for copy in (self.result, self.scores))
