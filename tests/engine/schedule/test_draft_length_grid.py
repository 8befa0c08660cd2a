"""`draft_tokens="auto"` over a grid of requests and contexts, with times of Qwen3-8B and EAGLE-3 on an H200 and an
acceptance that falls with the context: throughput of closed loops against no drafts and each fixed length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from crossed import slow_but

from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests
from specbatch.engine.schedule.step_model import StepModel
from specbatch.runtime.cuda_graphs import batch_buckets

# Milliseconds of steps with 0 to 3 drafts and short contexts (results/h200: qwen3-8b, qwen3-8b-eagle3-auto; 256 and 512
# from closed loops), and nanoseconds per cached token.
STEPS = {
    1: (3.8, 4.15, 4.6, 5.05),
    8: (4.4, 4.75, 5.1, 5.5),
    32: (4.9, 5.5, 6.0, 6.5),
    128: (5.8, 8.0, 11.0, 14.0),
    256: (8.3, 14.5, 20.5, 27.0),
    512: (14.0, 27.0, 40.0, 53.0),
}
CACHED_NS = (33.0, 34.0, 35.0, 36.0)
PROMPT_S = 22e-6  # per prompt token, and at the end of a context of 32,768 ...
LONGER_S = 21e-6  # ... so much more
HEAD = 0.015  # of the first, more where the head runs for the prompt, too
LENGTHS = (0, 1, 2, 3)
GRID = list(itertools.product((1, 8, 32, 128, 256, 512), (512, 2048, 8192, 32_768)))

Times = Callable[[int, int, int], float]


MODEL = StepModel([*STEPS], {size: dict(enumerate(times)) for size, times in STEPS.items()})


def true_time(rows: int, drafts: int, cached: int) -> float:
    return 1e-3 * MODEL.expected((rows, drafts, rows if drafts else 0), 0) + 1e-9 * CACHED_NS[drafts] * cached


def falling(first: float, last: float) -> Callable[[float], Sequence[float]]:
    """Acceptance that falls from `first` at 512 tokens to `last` at 32,768, linear in the logarithm of the context."""

    def shares(context: float) -> list[float]:
        p = first + (last - first) * min(max(math.log2(context / 512) / 6, 0.0), 1.0)
        return [p, 0.95 * p, 0.9 * p]

    return shares


@dataclass
class Loop:
    """A closed loop of requests with prompts of some tokens, in turn one of `contexts`, and 256 tokens of output. What
    a request accepts follows from numbers that are evenly distributed, not random, so that few steps have the mean."""

    rows: int
    contexts: Sequence[int]
    acceptance: Callable[[float], Sequence[float]]
    output: int = 256
    chooser: DraftLength | None = None  # None: `fixed` drafts
    fixed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    drawn: int = 0
    active: list[list[int]] = field(default_factory=list)  # generated tokens, and those that the draft lacks
    late: list[tuple[Any, ...]] = field(default_factory=list)
    used: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index in range(self.rows):  # as in the middle of a run
            self.active.append([self.output * index // self.rows, 0])
            self._prompt(index, count_time=False)

    def _prompt(self, index: int, *, count_time: bool = True) -> int:
        """Compute the prompt of a request. Returns how many of its tokens the draft lacks."""
        context = self.contexts[index % len(self.contexts)]
        seconds = context * (PROMPT_S + LONGER_S * context / 32_768)
        runs = self.fixed > 0
        if self.chooser is not None:
            runs = self.chooser.drafts_prompts(self.rows, [context], [self.output], context)
        self.seconds += seconds + HEAD * PROMPT_S * context * runs if count_time else 0.0
        return 0 if runs else context

    def run(self, tokens: int) -> float:
        """Tokens per second of so many tokens. It should not end where a prompt comes."""
        while self.tokens < tokens:
            self._step()
        return self.tokens / self.seconds

    def _step(self) -> None:
        prompts = itertools.cycle(self.contexts)
        contexts = [context + done for context, (done, _) in zip(prompts, self.active, strict=False)]
        choice = Choice(self.fixed)
        if self.chooser is not None:
            missing = [lacking for _, lacking in self.active]
            left = [max(self.output - done, 4) for done, _ in self.active]
            choice = self.chooser.choose(self.rows, lambda: Requests(contexts, missing, left))
        drafting = range(self.rows) if choice.members is None else choice.members
        members = set(drafting) if choice.num_drafts else set()
        shown = set() if choice.timing else members
        self.used[choice.num_drafts, len(members)] = self.used.get((choice.num_drafts, len(members)), 0) + 1
        self.seconds += self._time(choice.num_drafts, len(members), sum(contexts))
        found: list[tuple[int, int]] = []
        all_kept = ended = 0
        for index, request in enumerate(self.active):
            accepted = 0
            if index in shown:
                self.seconds += request[1] * (PROMPT_S + LONGER_S * contexts[index] / 32_768)
                request[1] = 0
                accepted = self._accepted(contexts[index], choice.num_drafts)
                found.append((contexts[index], accepted))
            else:
                request[1] += 1 if request[1] else 6
            kept = min(accepted + 1, self.output - request[0])
            all_kept += kept
            request[0] += kept
            if request[0] >= self.output:
                ended += 1
                request[:] = [0, self._prompt(index)]
        self.tokens += all_kept
        if self.chooser is not None:
            emitted = self.rows + sum(count for _, count in found)
            took = self._time(choice.num_drafts, len(members), sum(contexts))
            self.late.append((choice, took, found, emitted, all_kept, ended))
            if len(self.late) > 1:
                before, seconds, *shown = self.late.pop(0)
                self.chooser.took(before, seconds)
                self.chooser.learn(before, *shown)

    def _time(self, drafts: int, drafting: int, cached: int) -> float:
        plain = true_time(self.rows, 0, cached)
        if not drafts:
            return plain
        single = true_time(1, drafts, 0) - true_time(1, 0, 0)
        return plain + single + (true_time(self.rows, drafts, cached) - plain - single) * drafting / self.rows

    def _accepted(self, context: int, drafts: int) -> int:
        self.drawn += 1
        number = self.drawn * 0.6180339887498949 % 1.0
        reached = itertools.accumulate(self.acceptance(context)[:drafts], lambda one, other: one * other)
        return sum(number < share for share in reached)


def auto(most_requests: int, clock: float = 0.95) -> DraftLength:
    """As at start: times at a faster clock than later, for powers of two."""
    buckets = batch_buckets(most_requests)
    found = DraftLength(LENGTHS, buckets)
    sizes = [size for size in buckets if size & (size - 1) == 0]
    found.model = StepModel(
        buckets,
        {size: {n: clock * true_time(size, n, 0) for n in LENGTHS} for size in sizes},
        {size: {n: 1e-9 * CACHED_NS[n] for n in LENGTHS} for size in sizes},
    )
    found.catch_up_s, found.prompt_s, found.idle_tokens, found.can_split = PROMPT_S, HEAD * PROMPT_S, 5, True
    return found


def compare(rows: int, contexts: Sequence[int], acceptance: tuple[float, float], tokens: int) -> tuple[float, float]:
    """Throughput of `auto` over that of no drafts, and over that of the best fixed number."""
    shares = falling(*acceptance)
    found = Loop(rows, contexts, shares, chooser=auto(512)).run(tokens)
    fixed = [Loop(rows, contexts, shares, fixed=n).run(tokens) for n in LENGTHS]
    return found / fixed[0], found / max(fixed)


ACCEPTANCE = [(0.8, 0.25), (0.67, 0.1), (0.45, 0.03)]
QUICK = [((1, 32_768), ACCEPTANCE[1]), ((32, 8192), ACCEPTANCE[0]), ((128, 2048), ACCEPTANCE[2])]


@pytest.mark.parametrize(("point", "acceptance"), slow_but(QUICK, itertools.product(GRID, ACCEPTANCE)))
def test_auto_is_as_fast_as_no_drafts_and_as_the_best_number(
    point: tuple[int, int], acceptance: tuple[float, float]
) -> None:
    """What it has to learn included, in some hundred tokens of each request."""
    rows, context = point
    tokens = 2560 * rows + 128 if rows < 32 else 300 * rows
    over_none, over_best = compare(rows, [context], acceptance, tokens)
    assert over_none > 0.99
    assert over_best > 0.98


@pytest.mark.parametrize(
    ("rows", "contexts", "least"),
    slow_but(
        [(64, [512, 16_384], 1.02)], [(64, [512, 16_384], 1.02), (128, [512, 8192], 1.1), (256, [512, 4096], 1.05)]
    ),
)
def test_long_requests_stop_drafting_while_short_ones_go_on(rows: int, contexts: Sequence[int], least: float) -> None:
    """That beats every number of drafts that is common to all."""
    assert compare(rows, contexts, (0.75, 0.03), 180 * rows)[1] > least


def test_what_remains_of_a_large_batch_catches_up_and_drafts() -> None:
    """512 requests draft nothing, nor does the head run for their prompts. As they end, the last ones draft again,
    where that takes less time than it saves."""
    shares = falling(0.5, 0.5)
    loop = Loop(512, [512], shares, chooser=auto(512))
    loop.run(512 * 40)
    drafting = {drafts for drafts, _ in list(loop.used)[-1:]}
    assert drafting == {0}
    assert sum(lacking > 0 for _, lacking in loop.active) > 500
    loop.rows, loop.output = 4, 1000
    loop.active = [[0, 700] for _ in range(4)]
    loop.used.clear()
    loop.run(loop.tokens + 4 * 500)
    assert sum(count for (drafts, members), count in loop.used.items() if drafts and members == 4) > 0.9 * sum(
        loop.used.values()
    )
    loop.active = [[990, 700] for _ in range(4)]  # too late for that
    loop.used.clear()
    loop.run(loop.tokens + 4 * 6)
    assert set(loop.used) == {(0, 0)}
