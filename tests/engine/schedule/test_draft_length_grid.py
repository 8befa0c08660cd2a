"""`draft_tokens="auto"` over a grid of requests and contexts, with times of Qwen3-8B and EAGLE-3 on an H200 and an
acceptance that falls with the context: throughput of closed loops against no drafts and each fixed length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from crossed import slow_but
from simulated_device import HEAD, LENGTHS, PROMPT_S, Acceptance, Draws, auto, falling, prompt_s, step_s

from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests

GRID = list(itertools.product((1, 8, 32, 128, 256, 512), (512, 2048, 8192, 32_768)))


@dataclass
class Loop:
    """A closed loop of requests with prompts of some tokens, in turn one of `contexts`, and 256 tokens of output."""

    rows: int
    contexts: Sequence[int]
    acceptance: Acceptance
    output: int = 256
    chooser: DraftLength | None = None  # None: `fixed` drafts
    fixed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    active: list[list[int]] = field(default_factory=list)  # generated tokens, and those that the draft lacks
    late: list[tuple[Any, ...]] = field(default_factory=list)
    used: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draws = Draws(self.acceptance)
        for index in range(self.rows):  # as in the middle of a run
            self.active.append([self.output * index // self.rows, 0])
            self._prompt(index, count_time=False)

    def _prompt(self, index: int, *, count_time: bool = True) -> int:
        """Compute the prompt of a request. Returns how many of its tokens the draft lacks."""
        context = self.contexts[index % len(self.contexts)]
        seconds = prompt_s(0, context)
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
        split = len(members) if len(members) < self.rows else None
        took = step_s(self.rows, choice.num_drafts, sum(contexts), split)
        self.seconds += took
        found: list[tuple[int, int]] = []
        all_kept = ended = 0
        for index, request in enumerate(self.active):
            accepted = 0
            if index in shown:
                self.seconds += prompt_s(contexts[index] - request[1], contexts[index])
                request[1] = 0
                accepted = self.draws.accepted(contexts[index], choice.num_drafts)
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
            self.late.append((choice, took, found, emitted, all_kept, ended))
            if len(self.late) > 1:
                before, seconds, *shown = self.late.pop(0)
                self.chooser.took(before, seconds)
                self.chooser.learn(before, *shown)


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
