"""Data-parallel engines have the tokens, scores and records of one engine, and survive replicas that end."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import slow_but
from thread_replicas import ThreadReplicas

from specbatch import (
    DataParallelEngine,
    EmbeddedPrompt,
    Engine,
    EngineConfig,
    JobSize,
    SamplingParams,
    SpecbatchError,
    Speculation,
)
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.errors import ShortOfMemoryError
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.replicas import pool, replica, scoring
from specbatch.replicas.engine import of_one
from specbatch.replicas.messages import Built, Completed, Message, Returned

CONFIG = EngineConfig(
    model="toy", load_format="dummy", device="cpu", max_model_len=96, max_running=4, page_size=4,
    speculation=Speculation("ngram", "v2", ngram_min=1), memory_fraction=0.1,
)  # fmt: skip
PROMPTS = [f"prompt {number}" * (1 + number % 3) for number in range(16)]
SAMPLED = SamplingParams(max_new_tokens=8, temperature=0.8, ignore_eos=True)
PAIRS = [([1, 2, 3 + number % 7], [4, 5 + number]) for number in range(150)]

Answers = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def one() -> Any:
    with Engine(CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(one: Engine) -> Answers:
    """What one engine answers."""
    return tokens(one.generate(PROMPTS, SAMPLED))


def replicas(count: int = 2, **how: Any) -> tuple[DataParallelEngine, ThreadReplicas]:
    starter = ThreadReplicas(count, **how)
    return DataParallelEngine(replace(CONFIG, data_parallel=count), starter=starter), starter


def tokens(completions: list[Any]) -> Answers:
    return [(item.index, item.sample, item.prompt_token_ids, item.token_ids, item.text) for item in completions]


@pytest.mark.parametrize("count", slow_but([3], [1, 3]))
def test_tokens_scores_and_counts_are_those_of_one_engine(one: Engine, count: int) -> None:
    engine, _ = replicas(count)
    with engine:
        several = replace(SAMPLED, n=3, seed=5, logprobs=True)
        runs = ((len(PROMPTS), SAMPLED, None), (9, several, 5), (5, SamplingParams(max_new_tokens=5), 1))
        for prompts, params, concurrency in runs:
            one.reset_record()
            engine.reset_record()
            wanted = one.generate(PROMPTS[:prompts], params, concurrency=concurrency)
            found = engine.generate(iter(PROMPTS[:prompts]), params, concurrency=concurrency)
            assert tokens(found) == tokens(wanted)
            assert all(a.logprobs == pytest.approx(b.logprobs) for a, b in zip(found, wanted, strict=True))
            record, expected = engine.record(concurrency=5), one.record(concurrency=5)
            for name in ("requests", "input_tokens", "output_tokens"):
                assert record.metrics[name] == expected.metrics[name]
            assert sorted(row["index"] for row in record.requests) == sorted(item.index for item in found)
        seen: list[int] = []
        assert engine.score(PAIRS, on_score=lambda index, found: seen.append(index)) == one.score(PAIRS)
        assert sorted(seen) == list(range(150))
        assert engine.next_logits([1, 2, 3]).tolist() == one.next_logits([1, 2, 3]).tolist()
        with pytest.raises(SpecbatchError, match=r"max_new_tokens of prompt 1=500"):
            engine.generate(["a", "b"], [SAMPLED, replace(SAMPLED, max_new_tokens=500)])
        with pytest.raises(SpecbatchError, match=r"context of pair 1"):
            engine.score([([1], [2]), ([], [3])])
    with pytest.raises(SpecbatchError, match="closed"):
        engine.generate(PROMPTS)


def test_all_replicas_work_and_their_counters_add_up() -> None:
    worked: set[int] = set()
    engine, _ = replicas(spoil=lambda number, message: worked.add(number) if isinstance(message, Completed) else None)
    with engine:
        engine.generate(PROMPTS, SAMPLED)
        record = engine.record(concurrency=8)
    assert worked == {0, 1}
    assert record.counters["iteration_rows"] == record.metrics["verify_steps"]
    assert record.config["data_parallel"] == 2
    rows = record.counters["steps_by_rows"]
    assert record.metrics["full_batch_steps"] == rows["4"][0]  # each replica runs half of them


def test_a_record_has_the_numbers_of_one_engine(one: Engine) -> None:
    engine, _ = replicas()
    with engine:
        for other in (one, engine):
            other.reset_record()
            other.generate(PROMPTS[:4], SAMPLED)
        found, wanted = engine.record(concurrency=4), one.record(concurrency=4)
    for part in ("config", "caps", "metrics", "counters"):
        assert getattr(found, part).keys() == getattr(wanted, part).keys()
    assert found.metrics["peak_concurrency"] == wanted.metrics["peak_concurrency"] == 4


def test_a_stream_can_be_closed_and_requests_aborted(wanted: Answers) -> None:
    engine, _ = replicas()
    with engine:
        events = engine.stream(PROMPTS, replace(SAMPLED, max_new_tokens=60))
        next(events)
        with pytest.raises(SpecbatchError, match="busy"):
            engine.generate(PROMPTS)
        events.close()
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
        ids = [f"id {number}" for number in range(len(PROMPTS))]
        reasons = {}
        for event in engine.stream(PROMPTS, replace(SAMPLED, max_new_tokens=24), request_ids=ids):
            engine.abort("id 23")
            engine.abort(22)
            assert event.completion is not None
            reasons[event.request_id] = event.completion.finish_reason
        assert reasons == dict.fromkeys(ids[:22], "length") | dict.fromkeys(ids[22:], "abort")


def test_an_asynchronous_stream_and_aborts_by_other_threads(one: Engine) -> None:
    engine, _ = replicas()
    prompts = PROMPTS[:12]
    wanted = {(item.index, item.sample): item.text for item in one.generate(prompts, replace(SAMPLED, n=2))}

    async def texts(**how: Any) -> dict[tuple[int, int], str]:
        stream = engine.stream_async(prompts, replace(SAMPLED, n=2), **how)
        return {(event.index, event.sample): event.text async for event in stream}

    async def closed_early() -> None:
        stream = engine.stream_async(iter(PROMPTS), SAMPLED)
        async for _ in stream:
            break
        await stream.aclose()

    with engine:
        assert asyncio.run(texts()) == wanted
        assert set(asyncio.run(texts(text=False)).values()) == {""}
        asyncio.run(closed_early())
        # The last prompts wait in the leading process when they are aborted.
        many = [[5, 6, 7]] * 40
        stream = engine.stream(many, replace(SAMPLED, max_new_tokens=10))
        next(stream)
        for index in (38, 39):
            thread = threading.Thread(target=engine.abort, args=(index,))
            thread.start()
            thread.join()
        done = [event.completion for event in stream]
        assert sorted(item.index for item in done if item and item.finish_reason == "abort") == [38, 39]
        assert len(done) == 39


def test_embedded_prompts_have_the_tokens_of_one_engine(one: Engine) -> None:
    values = torch.randn(3, one.model_config.hidden_size, generator=torch.Generator().manual_seed(0))
    prompts = [EmbeddedPrompt([5, 6, 7, 8, 9 + index], {1: values[: index % 3 + 1]}) for index in range(6)]
    engine, _ = replicas()
    with engine:
        assert tokens(engine.generate(prompts, SAMPLED)) == tokens(one.generate(prompts, SAMPLED))
        with pytest.raises(SpecbatchError, match="embeddings of prompt 0"):
            engine.generate([EmbeddedPrompt([5], {0: values[:, :2]})])


def test_prompts_arrive_by_a_clock() -> None:
    engine, _ = replicas()
    arrivals = [0.02 * number for number in range(10)]
    with engine:
        start = time.perf_counter()
        done = engine.generate(PROMPTS[:10], replace(SAMPLED, max_new_tokens=2), arrivals=arrivals, concurrency=2)
        assert time.perf_counter() - start > arrivals[-1]
    assert all(item.metrics.ttft_s is not None and item.metrics.ttft_s < 1 for item in done)


def test_engines_share_weights_and_replicas(wanted: Answers) -> None:
    engine, starter = replicas()
    plain = replace(CONFIG, speculation=Speculation(), data_parallel=2)
    with engine, DataParallelEngine(plain, weights_of=engine) as other:
        assert tokens(other.generate(PROMPTS, SAMPLED)) == wanted == tokens(engine.generate(PROMPTS, SAMPLED))
        starter.links[0].kill()  # the successor builds both
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted == tokens(other.generate(PROMPTS, SAMPLED))
        with pytest.raises(SpecbatchError, match="weights_of"):
            DataParallelEngine(replace(plain, seed=1), weights_of=engine)
    assert len(starter.links) == 3


def test_a_refused_engine_leaves_the_others_and_their_replicas(wanted: Answers) -> None:
    engine, starter = replicas(3)
    config = replace(CONFIG, data_parallel=3)
    with engine:
        for _ in range(2):
            with pytest.raises(SpecbatchError, match="max_model_len"):
                DataParallelEngine(replace(config, max_model_len=100_000), weights_of=engine)
        with DataParallelEngine(replace(config, speculation=Speculation()), weights_of=engine) as other:
            assert tokens(other.generate(PROMPTS, SAMPLED)) == wanted == tokens(engine.generate(PROMPTS, SAMPLED))
    assert len(starter.links) == 3  # no replica was replaced


def test_replicas_log_what_they_all_say_once() -> None:
    alone: list[str] = []
    together: list[str] = []
    Engine(CONFIG, log=alone.append).close()
    several = replace(CONFIG, data_parallel=3)
    with (
        DataParallelEngine(several, starter=ThreadReplicas(3), log=together.append) as engine,
        DataParallelEngine(several, weights_of=engine, log=together.append),
    ):
        pass
    words = [[line.split()[0] for line in lines] for lines in (alone, together)]
    assert words[1] == 2 * ["replicas:", *words[0]]


# -- replicas that end -------------------------------------------------------------------------------------------------


def test_prompts_of_a_replica_that_ends_run_again(wanted: Answers) -> None:
    completed: list[int] = []

    def kill(number: int, message: Message) -> None:
        if isinstance(message, Completed):
            completed.append(number)
            if completed.count(number) == 4 and number < 2:
                starter.links[number].kill()

    lines: list[str] = []
    starter = ThreadReplicas(2, spoil=kill)
    with DataParallelEngine(replace(CONFIG, data_parallel=2), starter=starter, log=lines.append) as engine:
        seen = [event.index for event in engine.stream(PROMPTS, SAMPLED)]
        assert sorted(seen) == list(range(len(PROMPTS)))
        assert engine.record().counters["replaced_replicas"] == 2
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
    assert "replica 0 ended (killed); starting another" in lines


def test_a_prompt_that_ends_three_replicas_is_given_up_and_the_others_finish(wanted: Answers) -> None:
    poison = {5, 11}

    def kill(number: int, message: Message) -> None:
        if isinstance(message, Completed) and message.completion.index in poison:
            starter.links[number].kill()

    engine, starter = replicas(spoil=kill)
    with engine:
        done = engine.generate(PROMPTS, SAMPLED)
        assert [item.index for item in done if item.error is not None] == [5, 11]
        assert done[5].error == "3 replicas ended while they ran it; the last: killed"
        assert tokens([item for item in done if item.error is None]) == [
            item for item in wanted if item[0] not in poison
        ]
        assert engine.record().counters["errors"] == {done[5].error: 2}


def test_scores_of_a_replica_that_ends_are_computed_again(one: Engine) -> None:
    calls = 0

    def kill(number: int, message: Message) -> None:
        nonlocal calls
        if isinstance(message, Returned) and isinstance(message.value, list):
            calls += 1
            if number == 0 or fatal:
                starter.links[number].kill()

    fatal = False
    engine, starter = replicas(spoil=kill)
    with engine:
        assert engine.score(PAIRS) == one.score(PAIRS)
        assert calls > 3
        fatal = True
        with pytest.raises(SpecbatchError, match=r"3 replicas ended while they scored pairs \d+ to \d+; .*killed"):
            engine.score(PAIRS)


def failing(error: Callable[[], Exception]) -> ThreadReplicas:
    """Two replicas, each of which raises an exception instead of its first answer."""

    def fail(number: int, message: Message) -> None:
        if isinstance(message, Completed):
            raise error()

    return ThreadReplicas(2, spoil=fail)


def test_an_exception_in_a_replica_is_the_reason_of_its_end() -> None:
    starter = failing(lambda: RuntimeError("device-side assert\nmore"))
    with DataParallelEngine(replace(CONFIG, data_parallel=2), starter=starter) as engine:
        done = engine.generate(PROMPTS[:2], SAMPLED)
    assert {item.error for item in done} == {
        "3 replicas ended while they ran it; the last: RuntimeError: device-side assert"
    }


@pytest.mark.slow
def test_replicas_that_are_idle_or_slow_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STUCK_S", 0.5)
    monkeypatch.setattr(replica, "ALIVE_S", 0.0)
    step = Engine._step
    monkeypatch.setattr(Engine, "_step", lambda self: bool(time.sleep(0.05)) or step(self))
    engine, _ = replicas()
    with engine:
        engine.generate([[5, 6]], replace(SAMPLED, max_new_tokens=24))  # for more than a second
        engine.generate([[5, 6], [7]], replace(SAMPLED, max_new_tokens=1), arrivals=[0, 1.2])
        assert "replaced_replicas" not in engine.record().counters


@pytest.mark.slow
def test_a_place_at_which_nothing_works_is_left_out_and_costs_no_prompt(wanted: Answers) -> None:
    def fail(number: int, message: Message) -> None:
        if isinstance(message, Completed) and starter.places[number] == 1:
            raise RuntimeError("uncorrectable memory error")

    lines: list[str] = []
    starter = ThreadReplicas(3, spoil=fail)
    with DataParallelEngine(replace(CONFIG, data_parallel=3), starter=starter, log=lines.append) as engine:
        while "going on" not in "".join(lines):
            assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
    ended = "replica 1 ended (RuntimeError: uncorrectable memory error)"
    assert lines.count(f"{ended}; starting another") >= 5
    assert lines[-1] == f"{ended}; going on with 2 others"


def test_a_traceback_is_logged_once() -> None:
    lines: list[str] = []
    starter = failing(lambda: SpecbatchError("out of memory"))
    with DataParallelEngine(replace(CONFIG, data_parallel=2), starter=starter, log=lines.append) as engine:
        engine.generate(PROMPTS[:2], SAMPLED)
    assert sum("Traceback" in line for line in lines) == 1
    assert "replica 0 ended (SpecbatchError: out of memory); starting another" in lines


@pytest.mark.slow  # waits until it counts as stuck
@pytest.mark.parametrize("scores", [False, True])
def test_a_replica_that_is_stuck_is_replaced(one: Engine, monkeypatch: pytest.MonkeyPatch, *, scores: bool) -> None:
    def work(engine: Any) -> Any:
        return engine.score(PAIRS) if scores else tokens(engine.generate(PROMPTS, SAMPLED))

    wanted = work(one)
    monkeypatch.setattr(pool, "STUCK_S", 2)  # more than a step takes here beside other work
    monkeypatch.setattr(scoring, "LOOK_S", 0.1)
    over, stuck = threading.Event(), []

    def hold(number: int, message: Message) -> None:
        result = message.value if isinstance(message, Returned) else isinstance(message, Completed)
        if number == 1 and result and not stuck:
            stuck.append(number)
            over.wait(60)

    lines: list[str] = []
    starter = ThreadReplicas(2, spoil=hold)
    with DataParallelEngine(replace(CONFIG, data_parallel=2), starter=starter, log=lines.append) as engine:
        assert work(engine) == wanted
    over.set()
    starter.links[1].thread.join(10)
    assert stuck == [1]
    assert lines[-1].startswith("replica 1 ended (it has not made a step for")


def test_lines_about_a_replica_are_those_of_the_engine_that_it_worked_for() -> None:
    first: list[str] = []
    second: list[str] = []
    ended: list[int] = []

    def fail(number: int, message: Message) -> None:
        if number == 1 and isinstance(message, Completed) and not ended:
            ended.append(number)
            raise RuntimeError("lost")

    config = replace(CONFIG, data_parallel=2)
    shares = [MemoryShare(index, 2) for index in range(2)]
    with (
        DataParallelEngine(config, starter=ThreadReplicas(2, spoil=fail), log=first.append, share=shares[0]) as one,
        DataParallelEngine(config, weights_of=one, log=second.append, share=shares[1]) as other,
    ):
        other.generate(PROMPTS, SAMPLED)
    assert ended
    line = "replica 1 ended (RuntimeError: lost); starting another"
    assert line in second
    assert line not in first


def test_what_cannot_be_built_is_refused_as_by_one_engine() -> None:
    with pytest.raises(SpecbatchError, match="max_model_len=100000: the model supports at most 2048"):
        DataParallelEngine(replace(CONFIG, data_parallel=2, max_model_len=100_000), starter=ThreadReplicas(2))
    with pytest.raises(SpecbatchError, match="data_parallel=2: an Engine is one replica; use DataParallelEngine"):
        Engine(replace(CONFIG, data_parallel=2))


@pytest.mark.parametrize("processes", slow_but([False], [False, True]))
def test_memory_for_which_replicas_are_too_many_is_refused_as_by_one_engine(*, processes: bool) -> None:
    starter = None if processes else ThreadReplicas(2)
    with pytest.raises(SpecbatchError, match=r"^memory_fraction=1e-05: .* may be used by each of 2 replicas and"):
        DataParallelEngine(replace(CONFIG, data_parallel=2, memory_fraction=1e-5), starter=starter)


def test_replicas_that_cannot_be_replaced_are_left_out_and_the_last_one_ends_the_engine(wanted: Answers) -> None:
    def kill(number: int, message: Message) -> None:
        if number > 1 and isinstance(message, Built):
            raise RuntimeError("no memory")

    lines: list[str] = []
    starter = ThreadReplicas(2, spoil=kill)
    with DataParallelEngine(replace(CONFIG, data_parallel=2), starter=starter, log=lines.append) as engine:
        starter.links[0].kill()
        while len(lines) < 2 or "going on with 1 other" not in lines[-1]:
            assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
        starter.links[1].kill()
        with pytest.raises(SpecbatchError, match=r"data_parallel=2: no replica is left; replica 1 ended"):
            engine.generate(PROMPTS, SAMPLED)
        with pytest.raises(SpecbatchError, match="no replica is left"):
            engine.generate(PROMPTS, SAMPLED)


def test_a_replica_is_built_for_its_share_of_the_job() -> None:
    config = EngineConfig(device="cpu", data_parallel=4, job=JobSize(10, 300, 200))
    own, share = of_one(config, EXCLUSIVE)
    assert (own.data_parallel, own.job) == (1, JobSize(3, 300, 200))
    assert share == MemoryShare(replicas=4)


# -- lack of memory ----------------------------------------------------------------------------------------------------


def short(launch: Callable[..., Any], replica: int, fails: Callable[[int], bool]) -> Callable[..., Any]:
    """A decode step that runs out of memory on one replica at some batch sizes."""
    places: dict[Any, int] = {}  # of the engines' workers, in the order in which they decode first

    def call(self: Any, slots: list[int], *args: Any) -> Any:
        if places.setdefault(self, len(places)) == replica and fails(len(slots)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return launch(self, slots, *args)

    return call


def test_a_replica_with_a_smaller_batch_is_named(wanted: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    config = replace(CONFIG, data_parallel=2)
    with DataParallelEngine(config, starter=ThreadReplicas(2), log=lines.append) as engine:
        monkeypatch.setattr(DeviceWorker, "decode", short(DeviceWorker.decode, 1, lambda count: count > 2))
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
        record = engine.record()
    [line] = [line for line in lines if "ran out of memory" in line]
    assert re.match(
        r"replica [01]: max_running: [12] \(lowered from 4: a decode step of [34] requests ran out of", line
    )
    assert line.split()[3] == str(record.caps["max_running"])
    assert record.caps["reasons"]["max_running"] in line
    assert "replaced_replicas" not in record.counters


def test_all_replicas_with_a_smaller_batch_are_named(wanted: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the same words."""
    lines: list[str] = []

    def call(self: Any, slots: list[int], *args: Any) -> Any:
        if len(slots) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return decode(self, slots, *args)

    decode = DeviceWorker.decode
    monkeypatch.setattr(DeviceWorker, "decode", call)
    config = replace(CONFIG, data_parallel=2)
    with DataParallelEngine(config, starter=ThreadReplicas(2), log=lines.append) as engine:
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
    last = [line for line in lines if "max_running: 1 (" in line]
    assert sorted(line[:9] for line in last) == ["replica 0", "replica 1"]


def test_what_does_not_fit_on_one_replica_runs_on_another(wanted: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    config = replace(CONFIG, data_parallel=2)
    with DataParallelEngine(config, starter=ThreadReplicas(2), log=lines.append) as engine:
        monkeypatch.setattr(DeviceWorker, "decode", short(DeviceWorker.decode, 0, lambda count: True))
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
        assert engine.record().counters["replaced_replicas"] == 1
    [line] = [line for line in lines if " ended (" in line]
    words = (
        r"replica [01] ended \(out of memory: a decode step of 1 request does not fit beside .*\); starting another$"
    )
    assert re.match(words, line)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_replica_of_ranks_is_replaced_by_one_with_a_smaller_batch(
    wanted: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks end with the error that names what is half as much. Its prompts are not to blame, however often."""
    lines, config = list[str](), replace(CONFIG, max_running=16)

    def call(self: Any, slots: list[int], *args: Any) -> Any:
        if len(slots) > 1:
            smaller = {"max_running": len(slots) // 2, "kv_pages": 90}
            raise ShortOfMemoryError("out of memory: of a test", smaller=smaller)
        return decode(self, slots, *args)

    decode = DeviceWorker.decode
    monkeypatch.setattr(DeviceWorker, "decode", call)
    with DataParallelEngine(config, starter=ThreadReplicas(1), log=lines.append) as engine:
        assert tokens(engine.generate(PROMPTS, SAMPLED)) == wanted
        assert engine.record().caps["max_running"] == 1
    ended = "replica 0 ended (out of memory: of a test); starting another with"
    expected = [f"{ended} max_running={most} and kv_pages=90" for most in (8, 4, 2, 1)]
    assert [line for line in lines if line.startswith(ended)] == expected


def test_scores_without_memory_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    monkeypatch.setattr(DeviceWorker, "score", call)
    engine, _ = replicas()
    words = r"^of the pairs from \d+ on: out of memory: a prefill pass of 1 token does not fit beside weights .*"
    with engine, pytest.raises(ShortOfMemoryError, match=words):
        engine.score(PAIRS)
