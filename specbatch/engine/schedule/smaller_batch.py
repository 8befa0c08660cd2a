"""After a launch that ran out of memory: a smaller batch, for which the running requests are computed again.

What requests hold is allocated when an engine starts, so giving it back frees nothing: what a launch takes besides
grows with its tokens or requests. It is therefore halved, down to 256 tokens or one request. If that does not help, the
recorded graphs go, whose memory nothing else can use; then passes are halved down to one token.
"""

from __future__ import annotations

from typing import NamedTuple

from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.errors import counted

USUAL_CHUNK = 256  # tokens: shorter passes take as long as this one on a GPU


class Launch(NamedTuple):
    """What is being launched: tokens of a prefill pass, or else requests of a decode step. rank: that ran out of
    memory, where there are several."""

    size: int = 0
    prefills: bool = False
    rank: int | None = None

    def __str__(self) -> str:
        what = counted(self.size, "token" if self.prefills else "request")
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"a {'prefill pass' if self.prefills else 'decode step'} of {what}{where}"

    def can_shrink(self, worker: DeviceWorker) -> bool:
        """Whether `shrink` can make what follows need less memory."""
        return self.size > 1 or (self.size == 1 and worker.has_graphs)

    def shrink(self, scheduler: Scheduler, worker: DeviceWorker) -> tuple[str, int | str, str]:
        """Let what follows need less memory than this launch. Results in flight are void. Returns the setting that is
        changed, its new value, and why."""
        name: str
        new: int | str
        if self.size <= (USUAL_CHUNK if self.prefills else 1) and worker.has_graphs:
            worker.drop_graphs()
            name, new, how = "graphs", "off", "dropped"
        elif self.prefills:
            least = USUAL_CHUNK if self.size > USUAL_CHUNK else 1
            name, how = "prefill_chunk", f"lowered from {scheduler.prefill_chunk}"
            new = scheduler.prefill_chunk = max(self.size // 2, least)
        else:
            name, how = "max_running", f"lowered from {scheduler.max_running}"
            new = scheduler.max_running = self.size // 2
        count = scheduler.retract_all()
        again = f", after which {counted(count, 'request')} are computed again" if count else ""
        return name, new, f"{how}: {self} ran out of memory{again}"
