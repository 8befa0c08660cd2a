"""`verify_budget="auto"` in engines: greedy tokens, schedules, graphs, what is measured and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from stand_ins import fake_graphs, late_results, no_step_times

from specbatch import Engine, SamplingParams, Speculation
from specbatch.config.engine_config import Graphs

AUTO = Speculation("standalone", draft="self:skip=1", draft_tokens=4, verify_budget="auto")


@pytest.mark.parametrize(("schedule", "graphs"), [("v1", "off"), ("v2", "off"), ("v2", "whole")])
def test_greedy(toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: str, graphs: str) -> None:
    fake_graphs(monkeypatch)
    engine = toy_engine(speculation=replace(AUTO, schedule=schedule), graphs=Graphs(decode=graphs), log=print)
    prompts = [list(p) for p in toy.prompts()[:8]]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:24] for prompt in prompts]
    r = engine.record()
    print(r.counters["verify_budgets"], r.caps["verify_budget_s"], engine.parts.draft_length._expected, r.metrics["rows_per_verify"], r.metrics["accept_length"])
