"""Chooses what is "auto": requests that decode at once, prompt tokens of a pass, and the share of free memory.

A decode step reads all weights once, whatever its number of rows, until its arithmetic takes longer than that: on a
GPU from some hundred rows on. Throughput therefore rises with the number of requests, and hardly any more above four
times that. A mixture of experts has fewer rows for each expert, so it gains from more. Prefill passes are bound by
arithmetic from a thousand tokens on; longer ones let fewer decode steps wait for small batches. Both cost memory that
keys and values could use, so neither takes more than a share of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbatch.config.draft_shape import AUTO

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.config.job_size import JobSize

CPU_RUNNING, CPU_CHUNK, CPU_FRACTION = 32, 2048, 0.8
MOST_RUNNING = 1024
MOST_RUNNING_SPARSE = 2048  # of a mixture of experts
MOST_ROWS = 4096  # of a verify: a step of more takes proportionally longer
MOST_CHUNK, LEAST_CHUNK = 16384, 2048
SMALL_CHUNK = 256  # where longer ones leave little memory for keys and values
SMALL_JOB = 512  # tokens of a pass, at least, however few tokens the prompts of a job have
CHUNK_SHARE = 16  # the activations of a pass take at most so much of what the weights leave: 1/16
# Left free on a GPU: 5% and 2 GiB. Kernels and workspaces of libraries take about 1 GiB, whatever the size of the card;
# the rest is for temporary tensors whose sizes differ from pass to pass.
RESERVE, RESERVE_SHARE = 2 << 30, 20
LEAST_FRACTION = 0.7  # a small card, or one that other processes use
# What a running request holds, if nothing is known of the job. With longer ones some requests wait, or are retracted.
USUAL_TOKENS = 1024
ANSWER_TOKENS = 1024  # of an answer at most: limits are often much higher than what is generated


@dataclass(frozen=True)
class Capacity:
    """What an engine runs at once. reasons: why, by the name of what was "auto"."""

    max_running: int
    prefill_chunk: int
    reasons: dict[str, str]


def usual_fraction(free: int, *, on_cpu: bool) -> float:
    """The share of `free` bytes that an engine uses, in whole percent."""
    if on_cpu:
        return CPU_FRACTION
    left = free - RESERVE - free // RESERVE_SHARE
    return max(LEAST_FRACTION, int(100 * left / max(free, 1)) / 100)


def choose(
    config: EngineConfig,
    left: Callable[[int, int], int],
    *,
    page_bytes: int,
    least: int,
    on_cpu: bool,
    rows: int,
    longest: int,
    is_sparse: bool,
) -> Capacity:
    """Complete `max_running` and `prefill_chunk` of a configuration.

    left: bytes for keys and values with so many requests and so many tokens of a pass; page_bytes: of one page, 0 if
    the number of pages is given; least: bytes of pages that are needed in any case; rows: of a verify per request;
    longest: tokens of the longest request; is_sparse: whether the model is a mixture of experts
    """
    reasons: dict[str, str] = {}
    chunk, running, job = config.prefill_chunk, config.max_running, config.job
    if chunk == AUTO:
        chunk, reasons["prefill_chunk"] = _chunk(job, left, least, on_cpu=on_cpu)
    if running == AUTO:
        tokens = min(_tokens(job), longest)
        shared = min(job.shared_tokens, tokens) // config.page_size if config.prefix_cache else 0  # pages
        each = max(-(-tokens // config.page_size) - shared, 1)

        def fits(running: int) -> bool:
            return left(running, chunk) >= max((shared + each * running) * page_bytes, least)

        if on_cpu:
            running, why = _running_on_cpu(lambda running: left(running, chunk) >= least)
        else:
            running, why = _running(job, fits, tokens, shared * config.page_size, rows, is_sparse=is_sparse)
        reasons["max_running"] = why
    return Capacity(running, chunk, reasons)


def most_that_fit(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 if none does."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _chunk(job: JobSize, left: Callable[[int, int], int], least: int, *, on_cpu: bool) -> tuple[int, str]:
    chunk, why = (CPU_CHUNK, "a CPU") if on_cpu else (MOST_CHUNK, "longer passes gain nothing")
    room = left(1, 1)
    while chunk > LEAST_CHUNK and left(1, chunk) < max(room - room // CHUNK_SHARE, least):
        chunk, why = chunk // 2, f"activations may take 1/{CHUNK_SHARE} of the memory"
    while chunk > SMALL_CHUNK and left(1, chunk) < max(room // 2, least):
        chunk, why = chunk // 2, "longer passes leave little memory for keys and values"
    if on_cpu:
        return chunk, why
    if job.requests is not None and job.prompt_tokens is not None:
        needed = int(2 * job.requests * job.prompt_tokens)  # twice, because their number is an estimate
        while chunk > SMALL_JOB and chunk // 2 >= needed:
            chunk, why = chunk // 2, f"all prompts have about {needed // 2} tokens"
    return chunk, why


def _running(
    job: JobSize, fits: Callable[[int], bool], tokens: int, shared: int, rows: int, *, is_sparse: bool
) -> tuple[int, str]:
    most = MOST_RUNNING_SPARSE if is_sparse else MOST_RUNNING
    why = "more gain nothing"
    if most * rows > MOST_ROWS:
        most, why = max(MOST_ROWS // rows, 1), f"{rows} rows are verified for each request"
    if job.requests is not None and job.requests < most:
        most, why = job.requests, "the job has no more requests"
    known = "unknown" if job.prompt_tokens is None and job.new_tokens is None else "expected"
    holding = f"each holds about {tokens} tokens ({known})"
    holding += f", of which {shared} are a common prefix, held once" if shared else ""
    running = most_that_fit(fits, most)
    if running == most:
        return most, f"{why}; {holding}"
    running -= running % (1 << max(running.bit_length() - 4, 0))  # the same if there are some MiB less next time
    return max(running, 1), f"as many as the memory holds; {holding}"


def _running_on_cpu(fits: Callable[[int], bool]) -> tuple[int, str]:
    running = max(most_that_fit(fits, CPU_RUNNING), 1)
    return running, "a CPU" if running == CPU_RUNNING else "as many as the memory holds"


def _tokens(job: JobSize) -> int:
    """Tokens that a running request holds on average: its prompt and half of its answer."""
    if job.prompt_tokens is None and job.new_tokens is None:
        return USUAL_TOKENS
    prompt = USUAL_TOKENS / 2 if job.prompt_tokens is None else job.prompt_tokens
    answer = ANSWER_TOKENS if job.new_tokens is None else min(job.new_tokens, ANSWER_TOKENS)
    return max(int(prompt + answer / 2), 1)
