"""Events of open requests: which of them a stream has, and when completions are built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from stand_ins import late_results

from specbatch import Engine, SamplingParams
from specbatch.engine.interface import Events
from specbatch.engine.requests.open_requests import OpenRequests, StreamEvent

MANY = 40


def prompts(count: int) -> list[list[int]]:
    return [[3 + index % 20, 4, 5] for index in range(count)]


def params() -> list[SamplingParams]:
    """All but the last request end in one step."""
    return [SamplingParams(max_new_tokens=4 if index < MANY else 30, ignore_eos=True) for index in range(MANY + 1)]


def completions(events: list[StreamEvent]) -> int:
    return sum(event.completion is not None for event in events)


def collect(events: Events, done: list[int]) -> None:
    for event in events:
        if event.completion is not None:
            done.append(event.index)


@pytest.mark.parametrize("text", [True, False])
def test_completions_of_one_step_are_built_during_several(
    toy_engine: Callable[..., Engine], watch: Any, text: bool
) -> None:
    built = watch(OpenRequests, "take_events", after=lambda events, *_, **__: completions(events))
    engine = toy_engine(max_running=MANY + 1, max_model_len=48)
    with closing(engine.stream(prompts(MANY + 1), params(), text=text)) as events:
        found = list(events)
    assert [count for count in built if count] == [8] * 5 + [1]
    shown: dict[int, list[int]] = {}
    for event in found:
        shown.setdefault(event.index, []).extend(event.token_ids)
        if event.completion is not None:
            assert shown.pop(event.index) == event.completion.token_ids
    assert not shown


def test_completions_are_built_while_the_host_waits(
    toy_engine: Callable[..., Engine], watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_results(monkeypatch)
    built = watch(OpenRequests, "take_events", after=lambda events, *_, **__: completions(events))
    engine = toy_engine(max_running=MANY + 1, max_model_len=48)
    assert len(engine.generate(prompts(MANY + 1), params())) == MANY + 1
    assert [count for count in built if count] == [8, MANY - 8, 1]


def test_no_more_completions_are_left_than_requests_run(toy_engine: Callable[..., Engine]) -> None:
    """Otherwise a job that is killed loses most short answers, and its progress counts them as running."""
    engine = toy_engine(max_running=MANY)
    some = [SamplingParams(max_new_tokens=1 + index % 3, ignore_eos=True) for index in range(20 * MANY)]
    with closing(engine.stream(prompts(len(some)), some, concurrency=MANY)) as events:
        assert all(len(engine._requests._ended) <= MANY for _ in events)


def test_a_record_has_all_that_has_ended(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=MANY + 1, max_model_len=48)
    with closing(engine.stream(prompts(MANY + 1), params())) as events:
        while next(events).completion is None:
            pass
        assert len(engine.record().requests) == MANY
        engine.reset_record()
        assert sum(event.completion is not None for event in events) == MANY
    assert len(engine.record().requests) == 1


def test_a_record_has_what_had_ended_when_the_stream_was_closed(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=MANY + 1, max_model_len=48)
    with closing(engine.stream(prompts(MANY + 1), params())) as events:
        while next(events).completion is None:
            pass
    assert len(engine.record().requests) == engine.record().metrics["requests"] == MANY


def test_nothing_waits_where_nothing_runs(toy_engine: Callable[..., Engine], watch: Any) -> None:
    built = watch(OpenRequests, "take_events", after=lambda events, *_, **__: len(events))
    engine = toy_engine(max_running=MANY)
    done = engine.generate(prompts(MANY), SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(done) == MANY
    assert [count for count in built if count] == [MANY]  # no events of tokens, which `generate` does not use


def test_an_interruption_keeps_all_that_has_ended(toy_engine: Callable[..., Engine], watch: Any) -> None:
    done: list[int] = []

    def interrupt(engine: Engine) -> None:
        if done:
            raise KeyboardInterrupt

    watch(Engine, "_step", before=interrupt)
    engine = toy_engine(max_running=MANY + 1, max_model_len=48)
    with closing(engine.stream(prompts(MANY + 1), params())) as events, pytest.raises(KeyboardInterrupt):
        collect(events, done)
    assert sorted(done) == list(range(MANY))
