"""A closed loop of requests with a verify budget on a simulated device: confidences and acceptance are drawn, the
budget's own reference kernels divide the rows and count, and steps take times of Qwen3-8B and EAGLE-3 on an H200."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from exact_acceptance import sampling_of
from simulated_device import MODEL, PROMPT_S, STEPS

from specbatch.config.draft_shape import auto_budgets
from specbatch.core.step_input import Proposal, StepInput
from specbatch.engine.device.verify_budget import VerifyBudget
from specbatch.engine.schedule.draft_length import Choice, Requests
from specbatch.engine.schedule.step_model import StepModel
from specbatch.engine.schedule.verify_rows import VerifyRows
from specbatch.runtime.cuda_graphs import batch_buckets

CONTEXT = 1024


def step_s(rows: int, drafts: int, budget: float) -> float:
    """Seconds of a step of so many requests, which draft so many tokens: of the time that three drafts add, what they
    add at a single request is the draft's, and the rest is that of the rows."""
    plain, head = MODEL.expected((rows, 0, 0), 0), STEPS[1][3] - STEPS[1][0]
    of_rows = max(MODEL.expected((rows, 3, rows), 0) - plain - head, 0.0)
    return 1e-3 * (plain + head * drafts / 3 + of_rows * (budget - 1) / 3)


def chooser(rows: int, drafts: int, clock: float = 0.95, *, may_idle: bool = False) -> VerifyRows:
    """As at start: times at a faster clock than later."""
    buckets, budgets = batch_buckets(rows), auto_budgets(drafts)
    found = VerifyRows(drafts, budgets, buckets, pads=True, may_idle=may_idle)

    def seconds(size: int, length: int) -> float:
        num_drafts, budget = found.form(length)
        return clock * step_s(size, num_drafts, budget or 1.0)

    found.model = StepModel(buckets, {size: {n: seconds(size, n) for n in found.draft_lengths} for size in buckets})
    if may_idle:
        found.catch_up_s, found.idle_tokens = PROMPT_S, 5
    return found


@dataclass
class Loop:
    """Of `rows` requests with `drafts` each. Texts differ, and change: the confidence in a draft is about that of its
    request. right: the share of drafts with a confidence and a place that is accepted is confidence ** right[0] *
    right[1] ** place."""

    rows: int
    drafts: int
    sure: float
    right: tuple[float, float]
    budget: float | None = None  # None: chosen; 1: nothing is drafted
    may_idle: bool = False
    late: int = 1  # steps whose results are not known at a choice
    seed: int = 0
    used: Counter[float] = field(default_factory=Counter)

    def run(self, steps: int) -> float:
        """Tokens per second."""
        generator = torch.Generator().manual_seed(self.seed)
        mine = VerifyBudget.of(self.budget, self.rows, torch.device("cpu"), mixes_seeds=False)
        chooses = None if self.budget is not None else chooser(self.rows, self.drafts, may_idle=self.may_idle)
        lacking = 0
        slots, width = torch.arange(1, self.rows + 1), self.drafts
        drafted, tokens = torch.full((self.rows,), width), torch.zeros(self.rows, width, dtype=torch.int64)
        sampling = sampling_of(self.rows, temperature=0.0)
        place, text = torch.arange(width), torch.rand(self.rows, generator=generator)
        seconds, emitted = 0.0, 0
        waiting: list[tuple[Choice, float, list[list[float]]]] = []
        for _ in range(steps):
            choice = Choice(width, budget=self.budget)
            if chooses is not None:
                choice = chooses.choose(
                    self.rows, partial(Requests, [CONTEXT] * self.rows, [lacking] * self.rows, [512] * self.rows)
                )
            self.used[choice.budget or 1.0] += 1
            if choice.budget in (None, 1):
                seconds += step_s(self.rows, 0, 1)
                emitted += self.rows
                lacking += 1 if lacking else 6
                if chooses is not None:
                    chooses.took(choice, step_s(self.rows, 0, 1))
                continue
            seconds += PROMPT_S * lacking * self.rows
            lacking = 0
            changed = torch.rand(self.rows, generator=generator) < 0.1
            text = torch.where(changed, torch.rand(self.rows, generator=generator), text)
            noise = torch.rand(self.rows, width, generator=generator)
            confidence = (0.7 * text[:, None] + 0.3 * noise) ** (1 / self.sure - 1)
            is_right = torch.rand(self.rows, width, generator=generator) < (
                confidence ** self.right[0] * self.right[1] ** place
            )
            step = StepInput(None, slots, slots, width, 4, 9, sampling, budget=choice.budget)  # type: ignore[arg-type]
            proposal = mine.spend(step, Proposal(tokens, drafted, confidence=confidence))
            accepted = torch.minimum(is_right.long().cumprod(1).sum(1), proposal.drafted)
            mine.learn(step, proposal, accepted)
            assert choice.budget is not None
            took = step_s(self.rows, width, choice.budget)
            seconds += took
            emitted += self.rows + int(accepted.sum())
            if chooses is not None:
                assert proposal.values is not None
                waiting.append((choice, took, proposal.values.tolist()))
                if len(waiting) > self.late:
                    before, its_s, values = waiting.pop(0)
                    chooses.took(before, its_s)
                    chooses.learn(before, (), 0, 0, 0, values)
        return emitted / seconds
