"""Times decode steps of every draft length or verify budget at start, for `draft_tokens="auto"` and
`verify_budget="auto"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from specbatch.core.async_copy import seconds_of
from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.sampling import SamplingFlags
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.prefill import PrefillWork
from specbatch.engine.schedule.step_model import StepModel, rising
from specbatch.memory.page_pool import pages_for

RUNS = 3  # of which the shortest counts, on a GPU after one that warms up ...
ENOUGH_S = 0.05  # ... but no more of them than this takes
WARM_S = 0.2  # of steps without drafts, on a GPU, which is slow at first
CATCH_UP = {"cuda": 2048, "cpu": 128}  # tokens of a pass in which catching up is timed, at most
LONG = {"cuda": 1 << 17, "cpu": 1 << 12}  # cached tokens of a step with long contexts, at most


def timed(sizes: Sequence[int]) -> list[int]:
    """The batch sizes or lengths that are timed: powers of two and the largest. Times between them are linear
    enough."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


@torch.inference_mode()
def measure_step_times(
    worker: DeviceWorker,
    buckets: list[int],
    draft_lengths: Sequence[int],
    *,
    slots_per_step: int,
    pages: int,
    form: Callable[[int], tuple[int, float | None]] = lambda length: (length, None),
) -> StepModel:
    """Times of decode steps by batch and number of drafts, with short contexts and with long ones.

    form: see `DraftLength.form`; slots_per_step: KV slots that a step may write to; pages: of the pool, which no
    request uses yet. Requests with pages of their own are timed, because steps over the same page would find it in the
    device's cache."""
    device, page_size = worker.batch.device, worker.decode_step.cache.page_size
    sizes, most = timed(buckets), worker.batch.width - slots_per_step - 2

    def time_of(size: int, length: int, drafts: int) -> float:
        """Seconds with contexts of so many tokens, the shortest of some steps."""
        num_drafts, budget = form(drafts)
        slots, bound = [*range(1, size + 1)], length + slots_per_step
        place = partial(worker.place, size, length, min(pages_for(bound + 1, page_size), pages // size))
        place()
        worker.shorten(slots, num_drafts, bound)  # what prepares the drafter for fewer drafts is no part of a step
        return shortest(
            partial(worker.decode, slots, SamplingFlags(), num_drafts, bound, None, budget), device, before=place
        )

    if device.type == "cuda":
        padding, warm, (num_drafts, budget) = [0] * sizes[-1], 0.0, form(draft_lengths[0])
        while warm < WARM_S:
            work = partial(worker.decode, padding, SamplingFlags(), num_drafts, slots_per_step + 1, None, budget)
            warm += seconds_of(work, device)
    measured: dict[int, dict[int, float]] = {}
    per_token: dict[int, dict[int, float]] = {}
    short, limit = min(2 * slots_per_step + 1, most), LONG.get(device.type, LONG["cpu"])
    # From few to many rows: at its power limit a GPU is slower for a while, also with what takes less power. A time of
    # many rows may then be too short, which steps of a run correct as soon as they rely on it.
    for size in sizes:
        times = {drafts: time_of(size, short, drafts) for drafts in timed(draft_lengths)}
        between = np.interp(draft_lengths, list(times), list(times.values())).tolist()
        measured[size] = dict(zip(draft_lengths, between, strict=True))
        long = min(most, pages // size * page_size - slots_per_step - 1, limit // size)
        per_token[size] = dict.fromkeys(draft_lengths, 0.0)
        if long > 4 * short:
            ends = draft_lengths[0], draft_lengths[-1]
            added = (max(time_of(size, long, n) - measured[size][n], 0.0) / (size * (long - short)) for n in ends)
            first, last = added
            for n in draft_lengths:
                per_token[size][n] = first + (last - first) * n / draft_lengths[-1]
    worker.place(0, 0, 0)
    return StepModel(buckets, rising(measured), per_token)


@torch.inference_mode()
def measure_catch_up(worker: DeviceWorker, tokens: int, pages: int, *, by_target: bool) -> tuple[float, float]:
    """Seconds per token of a pass of up to so many in which the drafter catches up, and of the drafter in a prompt
    pass. by_target: see `DraftPlan.catch_up`."""
    page_size, device = worker.decode_step.cache.page_size, worker.batch.device
    most = CATCH_UP.get(device.type, CATCH_UP["cpu"])
    count = min(tokens, most, worker.batch.width - 2, pages * page_size - 1)
    worker.place(1, count, pages_for(count + 1, page_size))
    chunks = [PromptChunk(1, 0, count)]
    catch_up = partial(worker.catch_up, chunks, count)
    prefill = partial(worker.prefill, PrefillWork(chunks, [], drafts=False))
    whole, plain = shortest(catch_up, device), 0.0
    if by_target:  # in turn, as clocks change
        plain = shortest(prefill, device)
        whole = min(whole, shortest(catch_up, device))
        plain = min(plain, shortest(prefill, device))
    worker.place(0, 0, 0)
    return whole / count, max(whole - plain, 0.0) / count


def shortest(work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """The shortest time of some runs, each after `before`."""
    times: list[float] = []
    if device.type == "cuda":  # on a CPU nothing is compiled, and steps of a real model take long
        work()
    while len(times) < RUNS and sum(times) < ENOUGH_S:
        before()
        times.append(seconds_of(work, device))
    return min(times)
