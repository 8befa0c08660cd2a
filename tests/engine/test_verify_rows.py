"""`verify_budget="auto"` in engines: tokens, measurements, counters, and that no choice looks at its own drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_ins import fake_graphs, late_results, steep_step_times
from watched_calls import Watch

from specbatch import Engine, SamplingParams, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.ngram import NGram
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.device.verify_budget import VerifyBudget
from specbatch.engine.schedule import verify_rows
from specbatch.engine.schedule.verify_rows import VerifyRows
from specbatch.models.decoder import Decoder

AUTO = Speculation("standalone", draft="self:skip=1", draft_tokens=4, verify_budget="auto")
BUDGETS = {"1.25", "1.5", "1.75", "2", "2.5", "3", "4", "5"}


@pytest.mark.parametrize(("schedule", "decode"), [("v1", "off"), ("v2", "whole")])
def test_steps_are_timed_and_counted(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: str, decode: str
) -> None:
    fake_graphs(monkeypatch)
    lines = list[str]()
    settings = {"graphs": Graphs(decode=decode), "log": lines.append}
    engine = toy_engine(speculation=replace(AUTO, schedule=schedule), max_running=4, **settings)
    assert "verify budget: auto, one of 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5 rows per request" in lines
    times = engine.caps["verify_budget_s"]
    assert {*times} == {"1", "2", "4"}
    assert {*times["4"]} == BUDGETS
    assert all(seconds > 0 for seconds in times["4"].values())
    assert "verify_budget" not in engine.caps
    step = engine.parts.worker.decode_step
    assert not vars(step)["budget"].counts.any(), "what was drafted for measurements is forgotten"

    prompts, params = [list(prompt) for prompt in toy.prompts()[:6]], SamplingParams(max_new_tokens=12, ignore_eos=True)
    done = engine.generate(prompts, params)
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:12] for prompt in prompts]
    record = engine.record()
    steps = record.counters["verify_budgets"]
    assert sum(count for row in steps.values() for count in row.values()) == record.counters["iterations"]
    assert {name for row in steps.values() for name in row} <= BUDGETS
    assert 1 < record.metrics["rows_per_verify"] <= 5
    assert record.counters["draft_lengths"] == {}


def test_target_computes_the_rows_that_were_chosen(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_graphs(monkeypatch)
    plan = [5.0, 1.5, 3.0, 1.25, 4.0]
    monkeypatch.setattr(VerifyRows, "form", lambda self, length: (4, plan.pop(0) if plan else 2.0))
    steep_step_times(monkeypatch)
    monkeypatch.setattr("specbatch.engine.setup.builder._time_draft_lengths", lambda parts: {"verify_budget_s": {}})
    rows, verifying = list[int](), list[bool]()
    watch(DecodeStep, "verify", before=lambda *_: verifying.append(True), after=lambda *_: verifying.clear())
    watch(Decoder, "enter", before=lambda model, tokens, *_, **__: rows.extend([len(tokens)] * len(verifying)))
    speculation = replace(AUTO, schedule="v1")
    engine = toy_engine(speculation=speculation, max_running=4, prefix_cache=False)
    prompts = [list(toy.prompts()[4])] * 4
    engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert rows[:5] == [20, 6, 12, 5, 16]


class Drafts:
    """N-gram lookup that drafts the right tokens or wrong ones, with random confidences. From step `changed` on they
    differ between seeds."""

    def __init__(self, answers: list[list[int]], seed: int, changed: int) -> None:
        self.answers, self.seed, self.changed = answers, seed, changed
        self.steps = 0

    def propose(self, step: StepInput) -> Proposal:
        own = self.seed if self.steps >= self.changed else 0
        chance = random.Random(f"{own} {self.steps}")
        self.steps += 1
        drafts, confidence = [], []
        for slot, length in zip(step.slots.tolist(), step.lengths.tolist(), strict=True):
            text = step.batch.tokens[slot, : length + 1].tolist()
            answer = next((answer for answer in self.answers if answer[: length + 1] == text), text)
            right = (answer[length + 1 :] + [0] * step.num_drafts)[: step.num_drafts]
            sure = [chance.random() for _ in right]
            drafts.append([abs(token - (chance.random() > share)) for token, share in zip(right, sure, strict=True)])
            confidence.append(sure)
        drafted = torch.full((len(drafts),), step.num_drafts)
        return Proposal(torch.tensor(drafts), drafted, confidence=torch.tensor(confidence))


@pytest.mark.parametrize(("schedule", "decode"), [("v1", "off"), ("v2", "off"), ("v2", "whole")])
def test_no_budget_depends_on_drafts_of_its_step(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: str, decode: str
) -> None:
    """With other drafts and confidences from a step on, the budgets up to that step are the same, in v2 that of the
    next one, too; later ones differ."""
    fake_graphs(monkeypatch)
    late_results(monkeypatch)
    steep_step_times(monkeypatch)
    monkeypatch.setattr(verify_rows, "NEWEST", 1.0)
    prompts = [list(prompt) for prompt in toy.prompts()[:4]]
    answers = [prompt + list(toy.greedy(tuple(prompt))) for prompt in prompts]
    changed = 4

    def chosen(seed: int) -> list[float]:
        drafts, budgets = Drafts(answers, seed, changed), list[float]()
        monkeypatch.setattr(NGram, "propose", lambda self, step: drafts.propose(step))
        speculation = Speculation("ngram", draft_tokens=4, verify_budget="auto", schedule=schedule)
        engine = toy_engine(speculation=speculation, max_running=4, graphs=Graphs(decode=decode), prefix_cache=False)
        drafts.steps = 0  # those before were recordings
        spend = VerifyBudget.spend

        def noted(self: VerifyBudget, step: StepInput, proposal: Proposal) -> Proposal:
            budgets.append(step.budget or 0.0)
            return spend(self, step, proposal)

        with monkeypatch.context() as patch:
            patch.setattr(VerifyBudget, "spend", noted)
            engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
        return budgets

    runs = [chosen(seed) for seed in range(4)]
    known = changed + (1 if schedule == "v1" else 2)
    assert len({tuple(run[:known]) for run in runs}) == 1
    assert len({tuple(run[known:]) for run in runs}) > 1


def test_with_drafts_of_auto_length_a_step_may_draft_nothing(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as one row per request, and timed with the budgets."""
    steep_step_times(monkeypatch, row_s=5.0)
    speculation = replace(AUTO, draft_tokens="auto", draft_steps=3, schedule="v1")
    engine = toy_engine(speculation=speculation, max_running=4)
    assert engine.parts.draft_length.draft_lengths == (0, 1, 2, 3, 4, 6, 8, 12)
    prompts, params = [list(prompt) for prompt in toy.prompts()[:4]], SamplingParams(max_new_tokens=40, ignore_eos=True)
    done = engine.generate(prompts, params)
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:40] for prompt in prompts]
    record = engine.record()
    steps = record.counters["verify_budgets"]["4"]
    assert steps["1"] > 10
    assert sum(count for name, count in steps.items() if name != "1") >= verify_rows.GUESSES
    assert {*engine.caps["verify_budget_s"]["4"]} == {"1", "1.25", "1.5", "1.75", "2", "2.5", "3", "4"}
