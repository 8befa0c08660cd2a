"""What the draft lacks after passes and steps without it, and what it computes to catch up."""

from __future__ import annotations

import pytest
from scheduled import add, make, spans

from specbatch.core.request import Request
from specbatch.engine.schedule.draft_kv import DraftKV
from specbatch.engine.schedule.scheduler import Scheduler


def catch_up(scheduler: Scheduler, request: Request, own: int = 0) -> list[tuple[int, int]]:
    rows = [scheduler._running[request]]
    return [(chunk.start, chunk.end) for chunk in scheduler.draft_kv.plan_catch_up(rows, own)]


def pass_of(scheduler: Scheduler, *, drafts: bool) -> None:
    plan = scheduler.plan_prefill(0.0)
    assert plan is not None
    scheduler.draft_kv.prompts_launched(plan.chunks, drafts=drafts)


def step(scheduler: Scheduler, request: Request, *, drafts: bool) -> None:
    """A step that leaves one token, whose result has arrived."""
    plan = scheduler.plan_decode(may_retract=False)
    assert plan is not None
    if not drafts:
        scheduler.draft_kv.idles(plan.requests)
    scheduler.receive(request, 0)


def test_a_draft_that_always_runs_lacks_nothing() -> None:
    scheduler, _ = make(cached=True)
    request = add(scheduler, 0, 9)
    pass_of(scheduler, drafts=True)
    scheduler.receive(request, None)
    step(scheduler, request, drafts=True)
    assert scheduler.draft_kv.lacking(request) == 0
    assert catch_up(scheduler, request) == []


@pytest.mark.parametrize("own", [0, 1])
def test_after_steps_without_it_the_draft_computes_what_it_missed_once(own: int) -> None:
    """From the newest position on that it may not have written when it stopped."""
    scheduler, _ = make(cached=True, uncached_tail=1)
    request = add(scheduler, 0, 9)
    pass_of(scheduler, drafts=True)
    scheduler.receive(request, None)
    for _ in range(3):
        step(scheduler, request, drafts=False)
    scheduler.plan_decode(may_retract=False)
    assert scheduler.draft_kv.lacking(request) == 4
    assert catch_up(scheduler, request, own) == [(8, 12 - own)]
    assert scheduler.draft_kv.lacking(request) == 0
    assert catch_up(scheduler, request, own) == []


def test_a_page_that_one_request_caught_up_with_is_not_computed_again() -> None:
    scheduler, _ = make(cached=True)
    first, second = add(scheduler, 0, 9), add(scheduler, 1, 11)
    pass_of(scheduler, drafts=False)
    for request in (first, second):
        scheduler.receive(request, None)
    scheduler.plan_decode(may_retract=False)
    assert scheduler.draft_kv.undrafted == {*first.pages[:2]} == {*second.pages[:2]}
    assert catch_up(scheduler, first) == [(0, 9)]
    assert scheduler.draft_kv.undrafted == set()
    assert catch_up(scheduler, second) == [(8, 11)]


def test_a_page_with_a_new_owner_is_computed_by_it() -> None:
    found = DraftKV(4, 1)
    found.undrafted = {1, 2, 3}
    found.allocated([2, 7])
    assert found.undrafted == {1, 3}


def test_a_prompt_that_shares_pages_of_its_own_pass_lacks_drafts_from_there_on() -> None:
    """The draft skips the pass, which also computes the shared pages."""
    scheduler, _ = make(cached=True)
    first, second, third = add(scheduler, 0, 9), add(scheduler, 1, 11), add(scheduler, 2, 6, token=3)
    plan = scheduler.plan_prefill(0.0)
    assert plan is not None
    scheduler.draft_kv.prompts_launched(plan.chunks, drafts=False)
    assert [request.draft_kv_valid_until for request in (first, second, third)] == [0, 0, 0]
    assert catch_up(scheduler, second) == [(0, 10)]


@pytest.mark.parametrize("skipped", [[True, False, False], [True, False, True], [False, True, False]])
def test_pages_that_the_draft_computes_after_a_gap_are_noted(skipped: list[bool]) -> None:
    """A chunk ends within a page, which the next one completes."""
    scheduler, _ = make(cached=True, prefill_chunk=3)
    add(scheduler, 0, 9)
    for skips in skipped:
        plan = scheduler.plan_prefill(0.0)
        assert plan is not None
        scheduler.draft_kv.prompts_launched(plan.chunks, drafts=not skips)
    other = add(scheduler, 1, 11)
    assert spans(scheduler) == [(1, 8, 11, True)]
    assert other.draft_kv_valid_until == 0
