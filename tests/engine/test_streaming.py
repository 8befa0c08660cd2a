"""Streams: lazy prompts, text deltas, request ids, and memory that does not grow with the number of requests."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from crossed import slow_but

from specbatch import Engine, SamplingParams, SpecbatchError, Speculation

LONG = SamplingParams(max_new_tokens=10, ignore_eos=True)


def prompts_of(toy: Any, count: int) -> list[list[int]]:
    return [list(prompt) for prompt in toy.prompts()[:count]]


@pytest.mark.parametrize(("concurrency", "most"), [(3, 3), (None, 16)])
def test_iterable_is_consumed_as_requests_end(
    toy: Any, toy_engine: Callable[..., Engine], concurrency: int | None, most: int
) -> None:
    engine = toy_engine()
    taken = ended = 0

    def lazily() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in prompts_of(toy, 28):
            taken += 1
            assert taken - ended <= most
            yield prompt

    found = {}
    for event in engine.stream(lazily(), LONG, concurrency=concurrency):
        if event.completion is not None:
            ended += 1
            found[event.index] = event.completion.token_ids
    assert taken == ended == 28
    assert [found[index] for index in range(28)] == [list(toy.greedy(prompt)[:10]) for prompt in toy.prompts()]


def test_params_and_ids_beside_an_iterable(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    params = (SamplingParams(max_new_tokens=count, ignore_eos=True) for count in range(1, 100))
    done = engine.generate(iter(prompts_of(toy, 5)), params, request_ids=(f"row-{n}" for n in range(5)))
    assert [(item.request_id, len(item.token_ids)) for item in done] == [(f"row-{n}", n + 1) for n in range(5)]


def test_prompt_that_cannot_run_ends_a_lazy_stream_after_what_is_finished(
    toy: Any, toy_engine: Callable[..., Engine]
) -> None:
    engine = toy_engine()
    prompts = [*prompts_of(toy, 3), [99], *prompts_of(toy, 3)]
    ended: list[int] = []
    with pytest.raises(SpecbatchError, match=r"prompt 3=\[99\]"):
        engine.generate(iter(prompts), LONG, concurrency=1, on_completion=lambda item: ended.append(item.index))
    assert ended == [0, 1, 2]
    with pytest.raises(SpecbatchError, match="params=2: there are more prompts"):
        engine.generate(iter(prompts_of(toy, 3)), [LONG, LONG])
    assert len(engine.generate(prompts_of(toy, 3), LONG)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("text",), "prompts='text'"),
        ((5,), "prompts=5"),
        (([[3]], {"temperature": 1}), "params='dict'"),
        (([[3]], 5), "params='int'"),
        (([[3]], [LONG, LONG]), "params=2: .* for each of the 1"),
        (([[3]], [{}]), "params='dict'"),
    ],
)
def test_malformed_calls_are_refused(toy_engine: Callable[..., Engine], arguments: Any, message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        toy_engine().stream(*arguments)


def test_request_ids_must_differ(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    for ids in (["a", "a"], ["a"], "ab", [1, 2]):
        with pytest.raises(SpecbatchError, match="request_ids"):
            engine.generate(prompts_of(toy, 2), LONG, request_ids=ids)  # type: ignore[arg-type]


def test_abort_by_request_id(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=1)
    reasons = {}
    for event in engine.stream(prompts_of(toy, 3), LONG, request_ids=["a", "b", "c"]):
        engine.abort("c")
        if event.completion is not None:
            reasons[event.request_id] = event.completion.finish_reason
    assert reasons == {"a": "length", "b": "length", "c": "abort"}


STOPS = [(), ("ab",), ("é",), ("a", "zz"), ("xyz", "ü", " ")]


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
def test_text_deltas_add_up_to_the_text(toy: Any, toy_engine: Callable[..., Engine], schedule: str) -> None:
    """With characters that consist of several tokens, and stop strings that nearly match."""
    engine = toy_engine(speculation=Speculation("ngram", schedule, ngram_min=1))
    prompts = prompts_of(toy, 28)
    params = [
        SamplingParams(
            temperature=1.5 * (index % 2), max_new_tokens=30, ignore_eos=index % 3 > 0, stop=STOPS[index % 5],
            skip_special_tokens=index % 4 > 0, seed=index,
        )
        for index in range(28)
    ]  # fmt: skip
    whole = engine.generate(prompts, params)
    shown = [""] * 28
    for event in engine.stream(prompts, params):
        shown[event.index] += event.text
    assert shown == [item.text for item in whole]
    assert {item.finish_reason for item in whole} == {"stop", "length"}
    assert all(event.text == "" for event in engine.stream(prompts[:2], LONG, text=False))


def test_memory_does_not_grow_with_finished_requests(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=64, prefix_cache=False)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)

    def run(count: int) -> None:
        prompts = ([3 + index % 30, 3 + index % 7] for index in range(count))
        for _ in engine.stream(prompts, params, text=False):
            pass
        gc.collect()

    engine.reset_record(rows=False)
    run(100)
    tracemalloc.start()
    try:
        run(50)
        before = tracemalloc.get_traced_memory()[0]
        run(200)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Five times of 8 bytes and what arrays allocate ahead are 160; a completion takes over 1,000.
    assert grown < 200 * 400
    record = engine.record()
    assert (record.metrics["requests"], record.requests) == (350, [])
