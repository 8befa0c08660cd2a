"""Drafts of DFlash in whole engines over the toy model."""

from __future__ import annotations

from typing import Any

import pytest
from block_drafts import Reference
from crossed import crossed, slow_but
from stand_ins import fake_graphs
from watched_blocks import Watch, check_trees

from specbatch import SamplingParams, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.drafters.dflash import DFlashDrafter, DFlashTree


@pytest.mark.parametrize(
    ("settings", "schedule"),
    crossed(
        [{"prefill_chunk": 7, "page_size": 3}, {"graphs": "both"}, {"prefix_cache": False, "max_running": 3}],
        ["v1", "v2"],
    ),
)
def test_engine_drafts_match_reference(
    toy: Any, toy_engine: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], schedule: str
) -> None:
    """Some prompts share a prefix: the second takes its context from the pages of the first."""
    if settings.get("graphs"):
        settings = settings | {"graphs": Graphs("whole", "piecewise")}
        fake_graphs(monkeypatch)
    watch = Watch(toy, monkeypatch, DFlashDrafter, Reference)
    prompts = [list(prompt) for prompt in (*toy.prompts()[6:9], *toy.prompts()[-3:])]
    engine = toy_engine(speculation=Speculation("dflash", schedule, draft="toy-block"), **settings)
    for part in (prompts[:2], prompts):  # the second time with pages of the first
        done = engine.generate(part, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:8] for prompt in part]
    assert watch.compared > 150


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
def test_trees_match_the_reference_after_accepted_paths(
    toy: Any, toy_engine: Any, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    check_trees(toy, toy_engine, monkeypatch, DFlashTree, Reference, Speculation("dflash", schedule, draft="toy-block"))
