"""Asynchronous streams, and `chat`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

import specbatch
from specbatch import Engine, SamplingParams, SpecbatchError
from specbatch.engine.requests.async_stream import WAITING_EVENTS
from specbatch.runtime.cuda_graphs import Result

LONG = SamplingParams(max_new_tokens=10, ignore_eos=True)


def prompts_of(toy: Any, count: int = 8) -> list[list[int]]:
    return [list(prompt) for prompt in toy.prompts()[:count]]


async def texts(engine: Engine, prompts: Any, params: SamplingParams = LONG) -> list[str]:
    found = [""] * len(prompts)
    async for event in engine.stream_async(prompts, params):
        found[event.index] += event.text
    return found


def test_asynchronous_stream_has_the_events_of_a_stream(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    expected = [item.text for item in engine.generate(prompts_of(toy), LONG)]
    assert asyncio.run(texts(engine, prompts_of(toy))) == expected
    assert [item.text for item in engine.generate(prompts_of(toy), LONG)] == expected


def test_event_loop_runs_on(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    decode = engine.parts.worker.decode

    def slow(*arguments: Any) -> Result:
        time.sleep(0.02)
        return decode(*arguments)

    engine.parts.worker.decode = slow  # type: ignore[method-assign]

    async def both() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await texts(engine, prompts_of(toy, 2))
        ticking.cancel()
        return ticks

    assert asyncio.run(both()) > 50  # over 10 steps of 20 ms


@pytest.mark.parametrize("how", ["break", "cancel", "error"])
def test_leaving_a_stream_frees_the_engine(toy: Any, toy_engine: Callable[..., Engine], how: str) -> None:
    engine = toy_engine()
    expected = [item.text for item in engine.generate(prompts_of(toy), LONG)]

    async def leave() -> None:
        async with aclosing(engine.stream_async(prompts_of(toy), LONG)) as events:
            async for _ in events:
                if how == "break":
                    break
                if how == "error":
                    raise LookupError
                await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(leave())
        if how == "cancel":
            await asyncio.sleep(0.2)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [item.text for item in engine.generate(prompts_of(toy), LONG)] == expected

    asyncio.run(run())
    pool = engine.parts.scheduler.pool
    engine.forget_prefixes()
    assert pool.free == pool.total


def test_second_stream_is_refused_and_the_first_goes_on(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()

    async def both() -> list[Any]:
        tasks = [asyncio.create_task(texts(engine, prompts_of(toy))) for _ in range(2)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = sorted(asyncio.run(both()), key=lambda found: isinstance(found, Exception))
    assert first == [item.text for item in engine.generate(prompts_of(toy), LONG)]
    assert isinstance(second, SpecbatchError)
    assert "busy" in str(second)


def test_errors_reach_the_reader(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    with pytest.raises(SpecbatchError, match=r"prompt 1=\[99\]"):
        asyncio.run(texts(engine, [[3], [99]]))
    with pytest.raises(SpecbatchError, match=r"sampling_params=.*use params"):
        engine.stream_async([[3]], sampling_params=LONG)
    assert len(engine.generate([[3]], LONG)) == 1


def test_abort_while_the_engine_runs_in_its_thread(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()

    async def run() -> dict[str | None, str]:
        reasons = {}
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        async for event in engine.stream_async(prompts_of(toy, 3), params, request_ids=["a", "b", "c"]):
            engine.abort("b")
            if event.completion is not None:
                reasons[event.request_id] = event.completion.finish_reason
        return reasons

    assert asyncio.run(run()) == {"a": "length", "b": "abort", "c": "length"}


def test_engine_waits_for_a_slow_reader(toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.engine.requests.async_stream.WAITING_EVENTS", 5)
    assert WAITING_EVENTS > 5
    engine = toy_engine()
    taken = 0

    def lazily() -> Any:
        nonlocal taken
        for index in range(100):
            taken += 1
            yield [3 + index % 30]

    async def run() -> int:
        async with aclosing(engine.stream_async(lazily(), SamplingParams(max_new_tokens=1), concurrency=1)) as events:
            async for _ in events:
                await asyncio.sleep(0.3)
                break
        return taken

    assert asyncio.run(run()) < 20


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_renders_conversations(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()

    def render(messages: list[dict[str, str]], *, enable_thinking: bool | None = None) -> str:
        return "".join(f"{item['role'][0]} {item['content']} " for item in messages) + ("t" if enable_thinking else "a")

    engine.tokenizer.apply_chat_template = render
    one = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    prompt = engine.tokenizer.encode("s be u hello a")
    assert engine.chat(one, LONG)[0].prompt_token_ids == prompt
    done = engine.chat([one, one[1:]], LONG, request_ids=["a", "b"])
    assert [item.request_id for item in done] == ["a", "b"]
    assert done[0].token_ids == engine.generate([prompt], LONG)[0].token_ids
    assert engine.chat([one[1:]], LONG, thinking=True)[0].prompt_token_ids == engine.tokenizer.encode("u hello t")
    for wrong in ("hello", {"role": "user"}, [[]], ["hello"], [{"role": "user"}], 5):
        with pytest.raises(SpecbatchError, match="messages"):
            engine.chat(wrong, LONG)  # type: ignore[arg-type]


def test_public_names_are_listed() -> None:
    assert {"Engine", "EngineConfig", "SamplingParams", "Completion", "StreamEvent"} <= set(dir(specbatch))
    assert all(hasattr(specbatch, name) for name in dir(specbatch))
