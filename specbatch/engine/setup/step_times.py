"""Times decode steps of every draft length at start, for `draft_tokens="auto"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from specbatch.core.async_copy import seconds_of
from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.sampling import SamplingFlags
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.draft_length import DraftLength, rising

ENOUGH_S = 0.05  # for timing one thing
# For running the largest step first on a GPU. At its power limit, as in a run, steps of many rows take up to a fifth
# longer than on a cool one, and steps of few rows do not.
WARM_S = 1.0


@torch.inference_mode()
def measure_step_times(
    worker: DeviceWorker, draft_length: DraftLength, *, bound: int, catch_up_tokens: int | None = None
) -> dict[int, dict[int, float]]:
    """Seconds of a decode step over padding slots, by batch bucket and number of drafts. Also fills in
    `draft_length.times` and, with catch_up_tokens, `catch_up_s`: the time of a pass of so many tokens.

    A time is the shortest of as many runs as fit into ENOUGH_S, up to 5, after one that warms up, and no longer than
    that of more requests or drafts (`rising`)."""
    device = worker.batch.device

    def time_it(work: Callable[[], object]) -> float:
        times: list[float] = []
        work()
        while len(times) < 5 and sum(times) < ENOUGH_S:
            times.append(seconds_of(work, device))
        return min(times)

    if device.type == "cuda":
        slots, most, warm = [0] * draft_length.buckets[-1], draft_length.draft_lengths[-1], 0.0
        while warm < WARM_S:
            warm += seconds_of(partial(worker.decode, slots, SamplingFlags(), most, bound), device)
    measured: dict[int, dict[int, float]] = {}
    for bucket in reversed(draft_length.buckets):
        slots = [0] * bucket
        measured[bucket] = {}
        # From long to short, so that what prepares the drafter for fewer drafts runs once, too.
        for index, num_drafts in enumerate(reversed(draft_length.draft_lengths)):
            if index:
                worker.shorten(slots, num_drafts, bound)
            measured[bucket][num_drafts] = time_it(partial(worker.decode, slots, SamplingFlags(), num_drafts, bound))
    draft_length.times = rising(measured)
    if catch_up_tokens is not None:
        chunks = [PromptChunk(0, 0, min(catch_up_tokens, worker.batch.width - 1))]
        draft_length.catch_up_s = time_it(lambda: worker.catch_up(chunks))
    return draft_length.times
