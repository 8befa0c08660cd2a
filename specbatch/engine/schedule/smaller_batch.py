"""After a launch that ran out of memory: a smaller batch, for which the running requests are computed again.

What requests hold is allocated when an engine starts, so giving it back frees nothing: what a launch takes besides
grows with its tokens or requests. It is therefore halved, down to 256 tokens or one request. If that does not help, the
recorded graphs go, whose memory nothing else can use; then passes are halved down to one token.

Ranks do not go on: one that has failed leaves the others within a collective, and ranks whose calls were not all made
differ in more than the batch (see docs/many-gpus.md). The error says which settings make a new engine's launches
smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.errors import MOST, ShortOfMemoryError, counted
from specbatch.memory.planner import MemoryPlan

USUAL_CHUNK = 256  # tokens: shorter passes take as long as this one on a GPU


class Launch(NamedTuple):
    """What is being launched: tokens of a prefill pass, or else requests of a decode step; 0: something else. rank: of
    this process, where there are several."""

    size: int = 0
    prefills: bool = False
    rank: int | None = None

    def __str__(self) -> str:
        what = counted(self.size, "token" if self.prefills else "request")
        return f"a {'prefill pass' if self.prefills else 'decode step'} of {what}{self._where}"

    @property
    def _where(self) -> str:
        return "" if self.rank is None else f" on rank {self.rank}"

    def can_shrink(self, worker: DeviceWorker) -> bool:
        """Whether `shrink` can make what follows need less memory."""
        return self.rank is None and (self.size > 1 or (self.size == 1 and worker.has_graphs))

    @property
    def half(self) -> tuple[str, int]:
        """The setting that limits such launches, and its value for half of this one."""
        if self.prefills:
            return "prefill_chunk", max(self.size // 2, USUAL_CHUNK if self.size > USUAL_CHUNK else 1)
        return "max_running", self.size // 2

    def error(self, plan: MemoryPlan) -> ShortOfMemoryError:
        """The error for this launch, if it ran out of memory and cannot shrink."""
        if not self.size:
            return plan.out_of_memory(f"running prompts{self._where}")
        smaller = self.half if self.rank is not None and self.size > 1 else None
        return plan.does_not_fit(str(self), smaller)

    def shrink(self, scheduler: Scheduler, worker: DeviceWorker) -> tuple[str, int | str, str]:
        """Let what follows need less memory than this launch. Results in flight are void. Returns the setting that is
        changed, its new value, and why."""
        name: str
        new: int | str
        if self.size <= (USUAL_CHUNK if self.prefills else 1) and worker.has_graphs:
            worker.drop_graphs()
            name, new, how = "graphs", "off", "dropped"
        else:
            name, new = self.half
            how = f"lowered from {getattr(scheduler, name)}"
            setattr(scheduler, name, new)
        count = scheduler.retract_all()
        again = f", after which {counted(count, 'request')} are computed again" if count else ""
        return name, new, f"{how}: {self} ran out of memory{again}"


def launch_of(call: str, arguments: Sequence[Any], rank: int) -> Launch:
    """What a call of a worker's method launches. rank: of the worker."""
    if call == "decode":
        return Launch(len(arguments[0]), rank=rank)
    if call == "catch_up":
        chunks, most = arguments
    elif call in ("prefill", "score"):
        chunks, most = arguments[0].chunks, MOST
    else:
        return Launch(rank=rank)
    return Launch(min(sum(chunk.end - chunk.start for chunk in chunks), most), prefills=True, rank=rank)
