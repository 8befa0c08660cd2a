"""Schedules: the order in which decode steps are launched and results are handled."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from stand_ins import late_results
from watched_calls import Watch

from specbatch import Engine, SamplingParams, Speculation
from specbatch.engine.schedule.runner import Runner
from specbatch.engine.schedule.scheduler import Scheduler


@pytest.fixture
def order(watch: Watch) -> list[str]:
    """ "launch" and "handle" of decode steps, and "first" when first tokens are handled, as they happen."""
    found: list[str] = []
    watch(Runner, "decode", after=lambda launched, *_, **__: found.extend(["launch"] if launched else []))
    watch(Runner, "handle", before=lambda _, launched, **__: found.append("first" if launched.first else "handle"))
    return found


def drafting(accept_length: float) -> Speculation:
    """v2 with three drafts a step."""
    return Speculation("standalone", "v2", draft="self:skip=1", draft_tokens=3, simulate_accept_length=accept_length)


@pytest.mark.parametrize("schedule", ["v1", "v2", "v2-late"])
def test_v2_launches_before_it_handles_and_v1_does_not(
    toy: Any, toy_engine: Callable[..., Engine], order: list[str], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    if schedule == "v2-late":
        late_results(monkeypatch)
    engine = toy_engine(speculation=Speculation(schedule=schedule[:2]))
    engine.generate([list(toy.prompts()[3])], SamplingParams(max_new_tokens=5, ignore_eos=True))
    if schedule == "v1":
        assert order == ["first", *["launch", "handle"] * 4]
    else:  # a first token that has arrived is handled before anything else
        begin = ["first", "launch"] if schedule == "v2" else ["launch", "first"]
        assert order == [*begin, *["launch", "handle"] * 3, "handle"]


@pytest.mark.parametrize(("limit", "accept_length"), [(12, 4), (13, 4), (14, 4), (9, 1)])
def test_v2_launches_nothing_after_a_step_that_should_end_all_requests(
    toy: Any,
    toy_engine: Callable[..., Engine],
    order: list[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    accept_length: int,
) -> None:
    """Every draft is accepted, or none. All steps but the last one of a request are launched ahead of a result."""
    late_results(monkeypatch)
    engine = toy_engine(speculation=drafting(accept_length))
    params = SamplingParams(max_new_tokens=limit, ignore_eos=True)
    completions = engine.generate([list(prompt) for prompt in toy.prompts()[:2]], params, concurrency=1)
    assert [len(item.token_ids) for item in completions] == [limit, limit]
    steps = -(-(limit - 1) // accept_length)
    assert order == ["launch", "first", *["launch", "handle"] * (steps - 1), "handle"] * 2
    counters = engine.record().counters
    assert (counters["iterations"], counters["void_results"]) == (2 * steps, 0)


def test_v2_launches_ahead_while_a_request_has_more_tokens_to_come(
    toy: Any, toy_engine: Callable[..., Engine], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two requests should end two steps before the other: a step is launched with both."""
    late_results(monkeypatch)
    engine = toy_engine(speculation=drafting(4))
    params = [SamplingParams(max_new_tokens=limit, ignore_eos=True) for limit in (9, 21)]
    engine.generate([list(prompt) for prompt in toy.prompts()[:2]], params)
    assert order == ["launch", "first", *["launch", "handle"] * 4, "handle"]
    assert engine.record().counters["void_results"] == 1


@pytest.mark.parametrize("drafter", ["chain", "ngram"])
def test_a_wrong_expectation_changes_no_token(
    toy: Any, toy_engine: Callable[..., Engine], order: list[str], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """All requests are expected to end now and then, at random."""
    late_results(monkeypatch)
    chance = random.Random(3)
    monkeypatch.setattr(Scheduler, "expects_all_to_end", lambda self: chance.random() < 0.5)
    chain = Speculation("standalone", "v2", draft="self:skip=1", draft_tokens=3)
    engine = toy_engine(speculation=chain if drafter == "chain" else Speculation("ngram", "v2"), max_running=2)
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [tuple(item.token_ids) for item in completions] == [toy.greedy(tuple(prompt))[:20] for prompt in prompts]
    handled_before = list(pairwise(order)).count(("handle", "handle"))
    assert handled_before > 8
