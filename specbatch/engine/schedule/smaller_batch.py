"""After a launch that ran out of memory: a smaller batch, for which the running requests are computed again."""

from __future__ import annotations

from typing import NamedTuple

from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.errors import counted

LEAST_CHUNK = 256  # tokens: passes that do not fit are halved down to this


class Launch(NamedTuple):
    """What is being launched: tokens of a prefill pass, or else requests of a decode step."""

    size: int = 0
    prefills: bool = False

    @property
    def can_shrink(self) -> bool:
        """Whether it could be smaller."""
        return self.size > (LEAST_CHUNK if self.prefills else 1)

    def shrink(self, scheduler: Scheduler) -> tuple[str, int, str]:
        """Allow half of this size at most from now on. Results in flight are void. Returns the setting that is lowered,
        its new value, and why."""
        if self.prefills:
            name, old, what = "prefill_chunk", scheduler.prefill_chunk, f"a prefill pass of {self.size} tokens"
            new = scheduler.prefill_chunk = max(self.size // 2, LEAST_CHUNK)
        else:
            name, old, what = "max_running", scheduler.max_running, f"a decode step of {self.size} requests"
            new = scheduler.max_running = self.size // 2
        again = counted(scheduler.retract_all(), "request")
        return name, new, f"lowered from {old}: {what} ran out of memory, after which {again} are computed again"
