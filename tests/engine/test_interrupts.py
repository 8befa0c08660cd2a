"""Ctrl-C while an engine works: it takes effect between two steps, and the engine can be used afterwards."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from released import check_released
from stand_ins import fake_graphs
from watched_calls import Watch

from specbatch import Engine, SamplingParams, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.core.async_copy import AsyncCopy
from specbatch.engine.device.deferred_interrupts import DeferredInterrupts
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.memory.page_pool import PagePool

PARAMS = [SamplingParams(max_new_tokens=12, **({} if place % 2 else {"regex": "[a-k]{2}.*"})) for place in range(6)]


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [
        (Scheduler, "_allocate_grammar", 3),  # of a request that is in no list yet
        (DecodeStep, "__call__", 4),  # between the host's turn in the ring of results and the device's
        (PagePool, "decref", 2),
        (AsyncCopy, "wait", 5),
    ],
)
def test_an_interrupted_engine_can_be_used(
    toy: Any,
    toy_engine: Callable[..., Engine],
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    call: int,
) -> None:
    fake_graphs(monkeypatch)
    engine = toy_engine(
        speculation=Speculation(algorithm="ngram", ngram_min=1, draft_tokens=3), graphs=Graphs(decode="whole")
    )
    prompts, usual = [list(prompt) for prompt in toy.prompts()[8:14]], gc.get_threshold()
    expected = [item.token_ids for item in engine.generate(prompts, PARAMS)]
    engine.forget_prefixes()
    calls: list[None] = []

    def interrupt(*_: object) -> None:
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)

    watch(kind, name, after=interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, PARAMS)
    assert len(calls) >= call
    assert gc.get_threshold() == usual
    check_released(engine)
    assert [item.token_ids for item in engine.generate(prompts, PARAMS)] == expected


@pytest.mark.parametrize(
    ("contexts", "finished"),
    [
        ([DeferredInterrupts(once=True)], 1),
        ([DeferredInterrupts()], 3),
        ([DeferredInterrupts(once=True), DeferredInterrupts()], 3),
    ],
)
def test_the_second_interrupt_takes_effect_at_once_where_work_may_take_long(
    contexts: list[DeferredInterrupts], finished: int
) -> None:
    done = []

    def work() -> None:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            for place in range(3):
                signal.raise_signal(signal.SIGINT)
                done.append(place)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(done) == finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
