"""Times decode steps of every draft length at start, for `draft_tokens="auto"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specbatch.core.async_copy import seconds_of
from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.sampling import SamplingFlags
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.schedule.step_model import StepModel, rising
from specbatch.memory.page_pool import pages_for

RUNS = 3  # of which the shortest counts, after one that warms up ...
ENOUGH_S = 0.05  # ... but no more of them than this takes
# For running the largest step first on a GPU. At its power limit, as in a run, steps of many rows take up to a fifth
# longer than on a cool one, and steps of few rows do not.
WARM_S = 0.5
LONG = {"cuda": 1 << 17, "cpu": 1 << 12}  # cached tokens of a step with long contexts, at most


def measured_batches(buckets: Sequence[int]) -> list[int]:
    """The batch sizes that are timed: powers of two and the largest. Times between them are linear enough."""
    return [size for size in buckets if size & (size - 1) == 0 or size == buckets[-1]]


@torch.inference_mode()
def measure_step_times(
    worker: DeviceWorker, buckets: list[int], draft_lengths: Sequence[int], *, slots_per_step: int, pages: int
) -> StepModel:
    """Times of decode steps by batch and number of drafts, with short contexts and with long ones.

    slots_per_step: KV slots that a step may write to; pages: of the pool, which no request uses yet. Requests with
    pages of their own are timed, because steps over the same page would find it in the device's cache."""
    device, page_size = worker.batch.device, worker.decode_step.cache.page_size
    sizes, room = measured_batches(buckets), (RUNS + 2) * len(draft_lengths) * slots_per_step
    most_tokens = LONG.get(device.type, LONG["cpu"])

    def time_of(size: int, num_drafts: int, bound: int) -> float:
        slots = [*range(1, size + 1)]
        return shortest(partial(worker.decode, slots, SamplingFlags(), num_drafts, bound), device)

    def times(size: int, length: int, lengths: Sequence[int]) -> dict[int, float]:
        """Seconds with contexts of so many tokens, by number of drafts, from many to few."""
        bound = length + room
        worker.place(size, length, min(pages_for(bound + 1, page_size), pages // size))
        found: dict[int, float] = {}
        for num_drafts in reversed(lengths):
            if found:  # what prepares the drafter for fewer drafts is no part of a step
                worker.shorten([*range(1, size + 1)], num_drafts, bound)
            found[num_drafts] = time_of(size, num_drafts, bound)
        return found

    if device.type == "cuda":
        worker.place(sizes[-1], 1, pages // sizes[-1])
        warm = 0.0
        while warm < WARM_S:
            warm += seconds_of(
                partial(worker.decode, [*range(1, sizes[-1] + 1)], SamplingFlags(), draft_lengths[-1], room), device
            )
            worker.place(sizes[-1], 1, pages // sizes[-1])
    measured: dict[int, dict[int, float]] = {}
    per_token: dict[int, dict[int, float]] = {}
    ends = draft_lengths[0], draft_lengths[-1]
    for size in reversed(sizes):
        measured[size] = times(size, 1, draft_lengths)
        longest = min(worker.batch.width - 1, pages // size * page_size, most_tokens // size) - room
        per_token[size] = dict.fromkeys(draft_lengths, 0.0)
        if longest > room:
            slow = times(size, longest, ends)
            first, last = (max(slow[n] - measured[size][n], 0.0) / (size * longest) for n in ends)
            for n in draft_lengths:
                per_token[size][n] = first + (last - first) * n / ends[1]
    worker.place(0, 0, 0)
    return StepModel(buckets, rising(measured), per_token)


@torch.inference_mode()
def measure_catch_up(worker: DeviceWorker, tokens: int, pages: int) -> float:
    """Seconds that catching up takes per token, in a pass of up to so many."""
    page_size = worker.decode_step.cache.page_size
    count = min(tokens, worker.batch.width - 2, pages * page_size - 1)
    worker.place(1, count, pages_for(count + 1, page_size))
    seconds = shortest(partial(worker.catch_up, [PromptChunk(1, 0, count)]), worker.batch.device)
    worker.place(0, 0, 0)
    return seconds / count


def shortest(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time of some runs."""
    times: list[float] = []
    work()
    while len(times) < RUNS and sum(times) < ENOUGH_S:
        times.append(seconds_of(work, device))
    return min(times)
