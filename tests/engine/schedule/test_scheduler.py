"""Single decisions of the scheduler: admission, retraction, full pools, and states of prefixes."""

from __future__ import annotations

import pytest
from scheduled import add, make, spans

from specbatch.core.request import Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.schedule.plans import ScheduledRequest
from specbatch.engine.schedule.scheduler import OutOfPagesError, Scheduler


def book(request: Request, count: int = 1, first: bool = False) -> None:
    request.pending -= 1
    if not first:
        request.in_flight -= 1
        request.committed += count
    request.append([1] * count, 0.0)


def test_prompts_are_computed_in_order_and_in_chunks() -> None:
    scheduler, _ = make(prefill_chunk=10)
    for index, prompt in enumerate([7, 8, 2]):
        add(scheduler, index, prompt)
    assert spans(scheduler) == [(0, 0, 7, True), (1, 0, 3, False)]
    assert spans(scheduler) == [(1, 3, 8, True), (2, 0, 2, True)]
    assert spans(scheduler) == []


@pytest.mark.parametrize(("prompt", "limit"), [(3, 1), (6, 1), (8, 20), (40, 20)])
def test_a_pool_of_exactly_the_pages_needed_runs_all_requests(prompt: int, limit: int) -> None:
    """Also where the output fits into the prompt's last page."""
    each = -(-(prompt + limit + 2) // 4)
    scheduler, _ = make(pages=4 * each, max_running=4, prefill_chunk=1000)
    requests = [add(scheduler, index, prompt, limit) for index in range(4)]
    assert [span[0] for span in spans(scheduler)] == [0, 1, 2, 3]
    for request in requests:
        book(request, first=True)
    while not all(request.finished for request in requests):
        plan = scheduler.plan_decode(may_retract=False)
        assert plan is not None
        assert len(plan.requests) == 4
        for request in requests:
            book(request)


@pytest.mark.parametrize(("pages", "expected"), [(40, [3, 3]), (8, [3, 2])])
def test_what_waits_is_expected_to_run_as_far_as_there_are_slots_and_pages(pages: int, expected: list[int]) -> None:
    scheduler, _ = make(pages=pages, max_running=3)
    requests = [add(scheduler, index, prompt=8) for index in range(5)]
    found = [scheduler.expected]
    spans(scheduler)
    assert [*found, scheduler.expected] == expected
    for request in requests[1:]:
        scheduler.finish(request)
    assert spans(scheduler) == []
    assert scheduler.expected == 1


def test_a_prompt_that_is_computed_in_the_same_pass_is_shared() -> None:
    scheduler, _ = make(cached=True)
    first, second = add(scheduler, 0, 9), add(scheduler, 1, 11)
    assert spans(scheduler) == [(0, 0, 9, True), (1, 8, 11, True)]
    assert second.pages[:2] == first.pages[:2]
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 8)


def test_a_request_that_waits_for_pages_takes_none_from_the_cache() -> None:
    scheduler, pool = make(pages=8, cached=True)
    done = add(scheduler, 0, 9)
    spans(scheduler)
    done.finish_reason = "abort"
    scheduler.finish(done)
    assert (pool.free, pool.idle) == (6, 2)
    add(scheduler, 1, 20, token=2)
    assert [span[0] for span in spans(scheduler)] == [1]
    add(scheduler, 2, 20, token=3)
    assert spans(scheduler) == []
    assert (pool.free, pool.idle) == (0, 2)


def test_a_request_longer_than_its_window_holds_few_pages() -> None:
    """One that reads all keys takes 30 pages for the same text."""
    scheduler, pool = make(pages=8, window=6)
    request = add(scheduler, 0, 9, 110)
    assert spans(scheduler) == [(0, 0, 9, True)]
    book(request, first=True)
    while not request.finished:
        plan = scheduler.plan_decode(may_retract=False)
        assert plan is not None
        assert pool.total - pool.free <= 4
        book(request)
    assert (len(request.pages), request.freed) == (30, 27)
    scheduler.finish(request)
    assert pool.free == pool.total


def test_the_request_with_the_fewest_tokens_is_retracted_and_readmitted_first() -> None:
    scheduler, pool = make(pages=7)
    old, young = add(scheduler, 0, 7, 15), add(scheduler, 1, 6, 15)
    waiting = add(scheduler, 2, 9, 15)
    assert [span[0] for span in spans(scheduler)] == [0, 1]
    for request in (old, young):
        book(request, first=True)
    scheduler.plan_decode(may_retract=True)
    book(old)
    book(young)
    old.append([1] * 3, 0.0)  # as if a verify had left more
    old.committed += 3
    while True:
        plan = scheduler.plan_decode(may_retract=True)
        assert plan is not None
        if len(plan.requests) == 1:
            break
        for row in plan.requests:
            book(row.request)
    assert plan.requests[0].request is old
    assert (young.slot, young.pages, young.epoch, young.metrics.retractions) == (None, [], 1, 1)
    assert scheduler.is_void(young, 0)
    old.finish_reason = "abort"
    scheduler.finish(old)
    assert spans(scheduler) == [(1, 0, len(young.tokens), True)]
    assert waiting.slot is None
    assert pool.free == 7 - len(young.pages)


def test_nothing_is_retracted_while_results_are_in_flight() -> None:
    scheduler, _ = make(pages=5, max_running=2)
    requests = [add(scheduler, index, 6, 8) for index in range(2)]
    spans(scheduler)
    for request in requests:
        book(request, first=True)
    for _ in range(2):
        assert scheduler.plan_decode(may_retract=False) is not None
    with pytest.raises(OutOfPagesError):
        scheduler.plan_decode(may_retract=False)
    assert all(request.epoch == 0 for request in requests)


def test_steps_past_the_output_limit_are_not_launched() -> None:
    scheduler, _ = make()
    request = add(scheduler, 0, 3, limit=3)
    spans(scheduler)
    assert scheduler.plan_decode(may_retract=True) is not None  # the first token is pending, this leaves the second
    assert scheduler.plan_decode(may_retract=True) is not None
    assert scheduler.plan_decode(may_retract=True) is None
    assert request.pending == 3


def test_thousands_of_waiting_requests_can_be_aborted() -> None:
    scheduler, pool = make()
    requests = [add(scheduler, index, 3) for index in range(5000)]
    spans(scheduler)
    for request in requests:
        request.finish_reason = "abort"
        scheduler.finish(request)
    assert (scheduler.unfinished, pool.free) == (0, 50)


def test_uncomputed_pages_are_not_shared() -> None:
    scheduler, _ = make(cached=True, prefill_chunk=6)
    dropped = add(scheduler, 0, 20)
    assert spans(scheduler) == [(0, 0, 6, False)]
    dropped.finish_reason = "abort"
    scheduler.finish(dropped)
    add(scheduler, 1, 20)
    assert spans(scheduler) == [(1, 4, 10, False)]


def crowded(tokens: list[int]) -> tuple[Scheduler, list[Request]]:
    """Requests that run, each with its last page full but for one place, and no page free."""
    scheduler, pool = make(pages=2 * len(tokens), kv_slots_per_step=1)
    requests = [add(scheduler, index, 6, 2) for index in range(len(tokens))]
    for request, generated in zip(requests, tokens, strict=True):
        request.params, request.most_tokens = SamplingParams(max_new_tokens=30), request.prompt_len + 30
        request.pages, request.slot = pool.allocate(2), scheduler.free_slots.pop()
        request.tokens += [1] * generated
        request.committed = 8
        scheduler._waiting.remove(request)
        scheduler._running[request] = ScheduledRequest(request, request.epoch, request.slot)
    return scheduler, requests


def test_a_retracted_request_leaves_the_plan() -> None:
    scheduler, (first, second, third) = crowded([3, 2, 5])
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert [row.request for row in plan.requests] == [first, third]
    assert second.slot is None
    scheduler, (first, second, third) = crowded([2, 2, 5])
    first.committed = second.committed = 7  # they need no page, the third does
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert [row.request for row in plan.requests] == [first, third]
    assert (first.pending, second.pending) == (1, 0)


def test_pages_of_an_ended_request_do_not_reach_the_next_owner_of_its_slot() -> None:
    scheduler, (first, second) = crowded([3, 3])
    scheduler.pool.decref(second.pages.pop())  # room for one more page, not for two
    second.committed = 12
    with pytest.raises(OutOfPagesError):
        scheduler.plan_decode(may_retract=False)
    assert len(first.pages) == 3
    slot = first.slot
    for request in (first, second):
        request.finish_reason = "stop"
        scheduler.finish(request)
    assert scheduler.plan_decode(may_retract=True) is None
    heir = add(scheduler, 2, 2, 2)
    add(scheduler, 3, 2, 2)
    spans(scheduler)
    assert slot in (heir.slot, list(scheduler._running)[-1].slot)
    plan = scheduler.plan_decode(may_retract=True)
    assert plan is not None
    assert plan.new_pages == []


# -- states of prefixes -----------------------------------------------------------------------------------------------


def passes(scheduler: Scheduler, tokens: list[int], index: int = 0) -> list[tuple[int, int]]:
    """The chunks of a prompt that runs alone, and ends with it."""
    request = submit(scheduler, tokens, index)
    found = []
    while request.prefilled < len(tokens):
        found += [(start, end) for _, start, end, _ in spans(scheduler)]
    end(scheduler, request)
    return found


def submit(scheduler: Scheduler, tokens: list[int], index: int) -> Request:
    params = SamplingParams(max_new_tokens=4)
    request = Request(index, tokens, params, end_tokens=frozenset(), decode=lambda _: "", submitted=0.0)
    scheduler.add(request)
    return request


def end(scheduler: Scheduler, request: Request) -> None:
    request.finish_reason = "abort"
    scheduler.finish(request)


COMMON = list(range(10, 21))  # 11 tokens, 2 pages and a part


def test_the_second_prompt_with_a_prefix_saves_its_state() -> None:
    scheduler, _ = make(places=8)
    assert passes(scheduler, [*COMMON, *[1] * 7]) == [(0, 18)]
    assert passes(scheduler, [*COMMON, *[2] * 7]) == [(0, 8), (8, 18)]
    assert scheduler.state_cache is not None
    assert len(scheduler.state_cache._protected) == 1, "branch points are protected"
    assert passes(scheduler, [*COMMON, *[3] * 9]) == [(8, 20)]
    assert (scheduler.state_cache.counters.kept, scheduler.state_cache.counters.loaded) == (2, 1)  # 20 is a full page


def test_a_repeated_prompt_computes_its_last_page_only() -> None:
    scheduler, _ = make(places=8)
    prompt = [*COMMON, 1, 2, 3]
    assert [passes(scheduler, prompt) for _ in range(3)] == [[(0, 14)], [(0, 12), (12, 14)], [(12, 14)]]


def test_three_prompts_with_a_new_prefix_in_one_pass() -> None:
    """The second computes its prefix as there is no state of the first's; the third waits for that, one pass."""
    scheduler, pool = make(places=8)
    requests = [submit(scheduler, [*COMMON, *[kind] * 3], kind) for kind in (1, 2, 3)]
    first, second, third = (scheduler.plan_prefill(0.0) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is None
    assert [(chunk.request.index, chunk.start, chunk.end) for chunk in first.chunks] == [(1, 0, 14), (2, 0, 8)]
    assert [(chunk.request.index, chunk.start, chunk.end) for chunk in second.chunks] == [(2, 8, 14), (3, 8, 14)]
    ((slot, place),) = first.saves
    assert slot == requests[1].slot
    assert (first.loads, second.loads) == ([], [(place, requests[2].slot)])
    assert [request.metrics.cached_tokens for request in requests] == [0, 0, 8]
    # Pages after the state that a prompt begins with are its own.
    assert [len(request.pages) for request in requests] == [4, 4, 4]
    for request in requests:
        end(scheduler, request)
    assert pool.free + pool.idle == pool.total


def test_each_turn_of_a_conversation_computes_itself_and_the_previous_one() -> None:
    scheduler, _ = make(places=8, pages=200)
    texts = [[*range(100, 114)]]
    for turn in range(1, 4):
        texts.append([*texts[-1], *range(100 * turn + 500, 100 * turn + 511)])
    # With the pages of the answer, too: the next turn finds them known, and saves a state after them.
    assert passes(scheduler, texts[0]) == [(0, 14)]
    assert passes(scheduler, texts[1]) == [(0, 12), (12, 25)]
    assert passes(scheduler, texts[2]) == [(12, 24), (24, 36)]
    assert passes(scheduler, texts[3]) == [(36, 47)]  # 36 is a full page: there the whole prompt has its state


@pytest.mark.parametrize(
    ("chunk", "length", "expected"),
    [
        (10, 18, [(0, 8), (8, 18)]),
        (10, 20, [(0, 10), (10, 20)]),  # at full pages: 8, 16 and 20
        (8, 21, [(0, 8), (8, 16), (16, 21)]),
        (3, 8, [(0, 3), (3, 6), (6, 8)]),  # 4 and 8 are reached in no chunk more, but not from 3
    ],
)
def test_chunks_end_at_full_pages_where_that_needs_no_more_passes(
    chunk: int, length: int, expected: list[tuple[int, int]]
) -> None:
    scheduler, _ = make(places=8, prefill_chunk=chunk)
    assert passes(scheduler, list(range(length))) == expected
