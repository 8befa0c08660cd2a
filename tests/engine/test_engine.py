"""The engine's API: seeds, logprobs, order of completions, interruptions, aborts and records."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import crossed, slow_but
from released import check_released
from stand_ins import late_results
from watched_calls import Watch

from specbatch import Completion, Engine, SamplingParams, SpecbatchError, Speculation
from specbatch.engine.schedule.schedules import Overlapped

SPECULATIONS = {
    "none-v1": Speculation(schedule="v1"),
    "none-v2": Speculation(schedule="v2"),
    "ngram-v1": Speculation("ngram", "v1"),
    "ngram-v2": Speculation("ngram", "v2", draft_tokens=6, ngram_min=1),
    "self-v1": Speculation("standalone", "v1", draft="self:skip=1", draft_tokens=3),
    "self-v2": Speculation("standalone", "v2", draft="self:skip=1", draft_tokens=3),
}
LONG = SamplingParams(max_new_tokens=10, ignore_eos=True)


def prompts_of(toy: Any, count: int = 8) -> list[list[int]]:
    return [list(prompt) for prompt in toy.prompts()[:count]]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [item.token_ids for item in completions]


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_seeds_of_the_request_and_of_the_engine(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompt = [prompts_of(toy)[3]] * 2

    def run(engine_seed: int, seed: int | None = None) -> list[list[int]]:
        setting = SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True, seed=seed)
        return tokens_of(toy_engine(seed=engine_seed).generate(prompt, setting))

    first = run(0)
    assert first[0] != first[1], "requests without a seed differ"
    assert first == run(0)
    assert first != run(1)
    same = run(0, seed=5)
    assert same[0] == same[1]
    assert same == run(9, seed=5)
    assert same != run(0, seed=6)
    assert run(0, seed=-1) != same
    assert run(0, seed=2**63 - 1) != same


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(["none-v1", "self-v2"], SPECULATIONS))
def test_logprobs_match_naive_decoding(toy: Any, toy_engine: Callable[..., Engine], name: str) -> None:
    prompts = prompts_of(toy, 6)
    params = [
        SamplingParams(max_new_tokens=8, temperature=index % 2 * 0.8, top_k=4, seed=3, logprobs=index != 2)
        for index in range(6)
    ]
    engine = toy_engine(speculation=SPECULATIONS[name])
    for index, found in enumerate(engine.generate(prompts, params)):
        if index == 2:
            assert found.logprobs is None
            continue
        naive = toy.logits(prompts[index] + found.token_ids).log_softmax(-1)[len(prompts[index]) - 1 : -1]
        wanted = naive.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert found.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_request_times_add_up(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=2)
    completions = engine.generate(prompts_of(toy, 6), LONG)
    for item in completions:
        numbers = item.metrics
        assert numbers.ttft_s is not None
        assert numbers.tpot_s is not None
        assert 0 <= numbers.queue_s <= numbers.ttft_s <= numbers.e2e_s
        assert numbers.e2e_s == pytest.approx(numbers.ttft_s + sum(numbers.itl_s))
        assert numbers.tpot_s == pytest.approx(sum(numbers.itl_s) / 9)
    assert completions[5].metrics.queue_s > completions[0].metrics.queue_s
    window = engine.record().metrics["duration_s"] or 0
    assert window >= max(item.metrics.e2e_s for item in completions)


def test_a_record_covers_one_window(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(speculation=SPECULATIONS["ngram-v2"])
    empty = engine.record()
    assert (empty.metrics["requests"], empty.metrics["duration_s"], empty.metrics["output_throughput"]) == (0, 0, None)
    engine.generate(prompts_of(toy, 3), LONG)
    engine.generate(prompts_of(toy, 2), LONG)
    record = engine.record(concurrency=2, workload={"name": "two"})
    assert (record.metrics["requests"], record.metrics["output_tokens"], len(record.requests)) == (5, 50, 5)
    assert record.metrics["input_tokens"] == sum(map(len, prompts_of(toy, 3) + prompts_of(toy, 2)))
    window = record.metrics["duration_s"] or 0
    assert record.metrics["output_throughput"] == pytest.approx(50 / window)
    assert record.metrics["per_user_throughput"] == pytest.approx(25 / window)
    assert record.workload == {"name": "two"}
    assert record.caps["verify_rows"] == 7
    assert record.counters["iterations"] > 0
    engine.reset_record()
    assert engine.record().metrics["requests"] == 0
    assert engine.record().counters["iterations"] == 0


def test_aborted_requests_are_not_counted(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(speculation=SPECULATIONS["ngram-v1"])
    for event in engine.stream(prompts_of(toy, 4), LONG):
        if event.completion is None:
            engine.abort(0)
    record = engine.record()
    assert (record.metrics["requests"], len(record.requests)) == (3, 4)
    assert sum(record.counters["emitted_histogram"]) == record.metrics["verify_steps"]


def test_cached_prefixes_are_counted_and_give_equal_tokens(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    prompts = prompts_of(toy, 28)
    first = engine.generate(prompts, LONG)
    again = engine.generate(prompts, LONG)
    assert tokens_of(first) == tokens_of(again)
    assert all(item.metrics.cached_tokens == (len(item.prompt_token_ids) - 1) // 4 * 4 for item in again)
    assert sum(item.metrics.cached_tokens for item in first) >= 10 * 20


def test_next_logits_match_naive_decoding(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    for settings in ({}, {"prefill_chunk": 7}, {"speculation": SPECULATIONS["self-v2"]}):
        engine = toy_engine(**settings)
        for prompt in prompts_of(toy, 14)[-2:] * 2:  # the second time from the prefix cache
            wanted = toy.logits(prompt)[-1].float()
            torch.testing.assert_close(engine.next_logits(prompt), wanted, atol=1e-4, rtol=1e-4)
            assert engine.generate([prompt], LONG)[0].token_ids == list(toy.greedy(tuple(prompt))[:10])
        assert engine.parts.worker.prefill_step.on_logits is None
        check_released(engine)


# -- batches and arrivals ---------------------------------------------------------------------------------------------


def test_completions_have_the_order_of_the_prompts(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompts = prompts_of(toy, 6)
    params = [SamplingParams(max_new_tokens=limit, ignore_eos=True) for limit in (20, 1, 9, 2, 15, 3)]
    ended: list[Completion] = []
    completions = toy_engine().generate(prompts, params, on_completion=ended.append)
    assert [item.index for item in completions] == list(range(6))
    assert [len(item.token_ids) for item in completions] == [20, 1, 9, 2, 15, 3]
    assert sorted(ended, key=lambda item: item.index) == completions
    assert [item.index for item in ended] != list(range(6))


def test_text_prompts_are_encoded(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    text, ids = engine.generate(["hello b", toy.tokenizer.encode("hello b")], LONG)
    assert text.prompt_token_ids == toy.tokenizer.encode("hello b")
    assert text.token_ids == ids.token_ids
    assert text.text == toy.tokenizer.decode(text.token_ids)


def test_an_empty_batch(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    assert engine.generate([]) == []
    assert list(engine.stream([], [])) == []


def test_times_count_from_arrival(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """Also for requests that wait for a step or for `concurrency`; and no request starts early."""
    engine = toy_engine()
    prompts = prompts_of(toy, 4)
    want = tokens_of(engine.generate(prompts, LONG))
    engine.reset_record()
    spread = engine.generate(prompts, LONG, arrivals=[0.0, 0.0, 0.4, 0.8])
    assert tokens_of(spread) == want
    assert engine.record().metrics["duration_s"] >= 0.8
    assert all(item.metrics.e2e_s < 0.4 for item in spread), "no request waits for later arrivals"
    crowded = engine.generate(prompts, LONG, arrivals=[0.0] * 4, concurrency=1)
    assert tokens_of(crowded) == want
    waits = [item.metrics.queue_s for item in crowded]
    ends = [item.metrics.e2e_s for item in crowded]
    assert all(wait >= end for wait, end in zip(waits[1:], ends, strict=False))
    closed = engine.generate(prompts, LONG, concurrency=1)
    assert closed[3].metrics.queue_s < waits[3]
    for wrong in ([0.0], [0.0, 2.0, 1.0, 3.0]):
        with pytest.raises(SpecbatchError, match="arrivals"):
            engine.generate(prompts, LONG, arrivals=wrong)


@pytest.mark.parametrize("limit", [1, 3])
def test_concurrency_limits_submitted_requests(toy: Any, toy_engine: Callable[..., Engine], limit: int) -> None:
    engine = toy_engine()
    most, completions = 0, []
    for event in engine.stream(prompts_of(toy, 7), LONG, concurrency=limit):
        most = max(most, engine.parts.scheduler.unfinished)
        completions += [] if event.completion is None else [event.completion]
    completions.sort(key=lambda item: item.index)
    assert most == limit
    assert tokens_of(completions) == [list(toy.greedy(prompt)[:10]) for prompt in toy.prompts()[:7]]
    if limit == 1:  # each request is submitted when the previous one has ended, and does not queue
        assert all(item.metrics.queue_s < 0.05 for item in completions)


@pytest.mark.parametrize("name", slow_but(["ngram-v2"], ["none-v1", "ngram-v2", "self-v2"]))
def test_hundreds_of_prompts(toy: Any, toy_engine: Callable[..., Engine], name: str) -> None:
    engine = toy_engine(speculation=SPECULATIONS[name], max_running=64)
    prompts = [[3 + index % 30, 3 + index % 7] for index in range(500)]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [len(item.token_ids) for item in completions] == [3] * 500
    assert completions[0].token_ids == completions[210].token_ids
    check_released(engine)


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["v1", "v2", "v2-late"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "v2-late":
        late_results(monkeypatch)
    return str(request.param)[:2]


def check_usable(toy: Any, engine: Engine) -> None:
    check_released(engine)
    found = tokens_of(engine.generate(prompts_of(toy, 5), LONG))
    assert found == [list(toy.greedy(prompt)[:10]) for prompt in toy.prompts()[:5]]
    check_released(engine)


def test_an_interruption_keeps_finished_completions(toy: Any, toy_engine: Callable[..., Engine], schedule: str) -> None:
    engine = toy_engine(speculation=Speculation("ngram", schedule))
    ended: list[int] = []

    def stop_at_third(completion: Completion) -> None:
        ended.append(completion.index)
        if len(ended) == 3:
            raise KeyboardInterrupt

    params = [SamplingParams(max_new_tokens=3 + 2 * index, ignore_eos=True) for index in range(8)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of(toy), params, on_completion=stop_at_third)
    assert len(ended) == 3
    check_usable(toy, engine)


@pytest.mark.parametrize(
    ("place", "error"), crossed(["decode_step", "prefill_step"], [KeyboardInterrupt, RuntimeError])
)
def test_an_error_on_the_device_leaves_a_clean_engine(
    toy: Any,
    toy_engine: Callable[..., Engine],
    schedule: str,
    place: str,
    error: type[BaseException],
    watch: Watch,
) -> None:
    """The pages of the failed pass are shared already: no later request may read them."""
    engine = toy_engine(speculation=Speculation("ngram", schedule), prefill_chunk=30)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error("at the third")

    watch(type(getattr(engine.parts.worker, place)), "__call__", before=fail)
    with pytest.raises(error):
        engine.generate(prompts_of(toy, 12), LONG)
    check_usable(toy, engine)


def test_an_abandoned_stream_leaves_a_clean_engine(toy: Any, toy_engine: Callable[..., Engine], schedule: str) -> None:
    engine = toy_engine(speculation=Speculation("ngram", schedule))
    for number, event in enumerate(engine.stream(prompts_of(toy), LONG)):
        assert event.index in range(8)
        if number == 11:
            break
    gc.collect()
    check_usable(toy, engine)


def test_one_stream_at_a_time(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    never, first = engine.stream(prompts_of(toy), LONG), engine.stream(prompts_of(toy), LONG)
    next(first)
    with pytest.raises(SpecbatchError, match="busy"):
        engine.stream(prompts_of(toy), LONG)
    with pytest.raises(SpecbatchError, match="busy"):
        next(never)
    events = list(first)
    assert sum(event.completion is not None for event in events) == 8
    check_usable(toy, engine)


def test_a_stream_is_open_until_it_ends(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """Also after its last completion: closing it later must not end another stream's requests."""
    engine = toy_engine()
    first = engine.stream(prompts_of(toy, 1), SamplingParams(max_new_tokens=1))
    assert next(first).completion is not None
    with pytest.raises(SpecbatchError, match="busy"):
        engine.generate(prompts_of(toy), LONG)
    assert list(first) == []
    check_usable(toy, engine)


def test_a_request_can_be_aborted_before_it_runs(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=1)
    found: dict[int, Completion] = {}
    for event in engine.stream(prompts_of(toy, 3), LONG):
        engine.abort(2)
        engine.abort(99)  # neither is in the stream: prompts that have ended are not known any more
        engine.abort("nope")
        if event.completion is not None:
            found[event.index] = event.completion
    assert (found[2].finish_reason, found[2].token_ids, found[2].metrics.ttft_s) == ("abort", [], None)
    assert [found[index].finish_reason for index in (0, 1)] == ["length", "length"]
    check_released(engine)


def test_aborting_all_requests_ends_the_stream(toy: Any, toy_engine: Callable[..., Engine], schedule: str) -> None:
    engine = toy_engine(speculation=Speculation(schedule=schedule))
    ends = []
    for number, event in enumerate(engine.stream(prompts_of(toy, 3), LONG)):
        ends += [event.completion.finish_reason] if event.completion else []
        if number == 4:
            for index in range(3):
                engine.abort(index)
    assert ends == ["abort"] * 3
    check_usable(toy, engine)


def test_a_closed_engine_refuses_work(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """Also the rest of a stream that was open."""
    with toy_engine() as engine:
        stream = engine.stream(prompts_of(toy), LONG)
        next(stream)
    for work in (lambda: list(stream), lambda: engine.generate(prompts_of(toy, 1), LONG)):
        with pytest.raises(SpecbatchError, match="closed"):
            work()
    engine.close()


def test_a_number_that_counts_the_root_is_logged(toy_engine: Callable[..., Engine]) -> None:
    lines: list[str] = []
    engine = toy_engine(log=lines.append, speculation=Speculation("ngram", draft_steps=3, draft_tokens=4))
    assert "draft_tokens=4 with draft_steps=3 counts the root, as SGLang does: 3 drafted" in lines
    assert engine.caps["verify_rows"] == 4


def test_models_and_plan_are_logged(toy_engine: Callable[..., Engine]) -> None:
    lines: list[str] = []
    toy_engine(log=lines.append, speculation=Speculation("standalone", draft="toy-2"))
    assert lines[0].startswith("model: toy (memory), float32 on cpu; ")
    assert lines[1].startswith("draft: toy-2 (memory)")
    assert any("KV pages" in line for line in lines)


@pytest.mark.slow  # waits for two seconds
def test_peak_throughput_and_the_record_of_a_closed_engine(toy: Any, toy_engine: Any) -> None:
    engine = toy_engine()
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for start in (0.0, 2.0):  # the second requests arrive two seconds after the first ones
        engine.generate([list(prompt) for prompt in toy.prompts()], params, arrivals=[start] * len(toy.prompts()))
    metrics = engine.record().metrics
    assert metrics["output_throughput"] <= metrics["peak_output_throughput"] <= metrics["output_tokens"]
    assert metrics["peak_concurrency"] == len(toy.prompts())
    engine.close()
    assert engine.record().metrics == metrics


def test_a_prompt_that_concurrency_delays_can_be_aborted(toy: Any, toy_engine: Any) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with toy_engine() as engine:
        done = engine.generate(prompts, params, concurrency=1, on_completion=lambda item: engine.abort(2))
        assert [item.finish_reason for item in done] == ["length", "length", "abort"]
        assert done[2].token_ids == []
        again = engine.generate(prompts, params)
        assert [item.finish_reason for item in again] == ["length"] * 3


def test_steps_run_with_the_engines_device_as_current_device(
    toy: Any, toy_engine: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            current.append(self._device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    engine = toy_engine()
    monkeypatch.setattr(torch.cuda, "device", Device)
    seen = watch(Overlapped, "step", before=lambda schedule: list(current))
    engine.device = torch.device("cuda", 1)
    for _ in engine.stream([list(toy.prompts()[0])], SamplingParams(max_new_tokens=4)):
        assert not current
    assert seen
    assert all(devices == [engine.device] for devices in seen)
