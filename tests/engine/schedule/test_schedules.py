"""Schedules: stops, limits, aborts and random settings do not change greedy tokens; first tokens and counts; and no
launch waits for the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import crossed, first_quick
from hypothesis import given, settings
from hypothesis import strategies as st
from released import check_released
from stand_ins import late_results
from torch.utils._python_dispatch import TorchDispatchMode
from watched_calls import Watch

from specbatch import Engine, SamplingParams, Speculation
from specbatch.engine.schedule.launched import Launched
from specbatch.engine.schedule.runner import Runner

_SELF = {"algorithm": "standalone", "draft": "self:skip=1"}
DRAFTERS = {
    "none": {},
    "ngram": {"algorithm": "ngram"},
    "ngram-1-2": {"algorithm": "ngram", "draft_tokens": 1, "ngram_min": 2, "ngram_max": 2},
    "ngram-7-1": {"algorithm": "ngram", "draft_tokens": 7, "ngram_min": 1, "ngram_max": 3},
    "self": {"algorithm": "standalone", "draft": "self:skip=1", "draft_tokens": 3},
    "self-deep": {"algorithm": "standalone", "draft": "self:skip=0,2", "draft_tokens": 5},
    "other": {"algorithm": "standalone", "draft": "toy-2", "draft_tokens": 2},
    "block": {"algorithm": "dflash", "draft": "toy-block-34", "draft_tokens": 4},
    "ngram-tree": {"algorithm": "ngram", "draft_steps": 4, "draft_topk": 3, "draft_tokens": 9, "ngram_min": 1},
    "tree": {"algorithm": "standalone", "draft": "self:skip=1", "draft_steps": 5, "draft_topk": 3, "draft_tokens": 7},
    # More nodes are run than are verified, and the other way round.
    "tree-pruned": {**_SELF, "draft_steps": 4, "draft_topk": 4, "draft_tokens": 4},
    "tree-whole": {**_SELF, "draft_steps": 2, "draft_topk": 3, "draft_tokens": 12},
    "tree-flat": {"algorithm": "standalone", "draft": "toy-2", "draft_steps": 1, "draft_topk": 4, "draft_tokens": 3},
}
SCHEDULES = ["v1", "v2", "v2-late"]


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """v2-late: the device is never done when the host asks, like a busy GPU."""
    if request.param == "v2-late":
        late_results(monkeypatch)
    return str(request.param)[:2]


def mixed(toy: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths; limits from 1 on; stops of every kind."""
    chance = random.Random(7)
    prompts = [list(prompt) for prompt in toy.prompts()[::2]]
    params = []
    for index, prompt in enumerate(prompts):
        tokens = toy.greedy(tuple(prompt))
        limit = [1, 2, 3, 12, 25][index % 5]
        kind = chance.choice(["none", "token", "string", "both"])
        params.append(
            SamplingParams(
                max_new_tokens=limit,
                ignore_eos=index % 3 == 0,
                stop_token_ids=(tokens[chance.randrange(25)],) if kind in ("token", "both") else (),
                stop=(stop_string(toy, tokens, chance.randrange(25)),) if kind in ("string", "both") else (),
            )
        )
    return prompts, params


def stop_string(toy: Any, tokens: tuple[int, ...], at: int) -> str:
    """Text across two tokens of the output, which may be parts of characters."""
    text: str = toy.tokenizer.decode(list(tokens[at : at + 2]))
    return text or "a"


def expected(toy: Any, prompt: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, finish reason and text in plain Python."""
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {toy.eos})
    kept: list[int] = []
    for token in toy.greedy(tuple(prompt))[: params.max_new_tokens]:
        kept.append(token)
        if token in ends:
            return kept, "stop", toy.tokenizer.decode(kept[:-1])
        text = toy.tokenizer.decode(kept)
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        if cuts:
            return kept, "stop", text[: min(cuts)]
    return kept, "length", toy.tokenizer.decode(kept)


def check(toy: Any, engine: Engine, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> None:
    completions = engine.generate(prompts, params, **options)
    for index, (prompt, setting, found) in enumerate(zip(prompts, params, completions, strict=True)):
        wanted = expected(toy, prompt, setting)
        assert (found.token_ids, found.finish_reason, found.text) == wanted, f"prompt {index}: {setting}"
        assert found.prompt_token_ids == prompt
        numbers = found.metrics
        if not numbers.retractions:
            assert numbers.emitted == len(found.token_ids) - 1
        assert numbers.verify_steps == sum(numbers.emitted_histogram)
        assert numbers.emitted == sum(kept * count for kept, count in enumerate(numbers.emitted_histogram))
        assert 0 <= numbers.accepted <= numbers.drafted
    check_released(engine)


@pytest.mark.parametrize(
    ("drafter", "schedule"),
    crossed(["none", "ngram-7-1", "self-deep", "tree", "block"], SCHEDULES),
    indirect=["schedule"],
)
def test_stops_and_limits(toy: Any, toy_engine: Callable[..., Engine], schedule: str, drafter: str) -> None:
    """Stop tokens and strings in the middle of accepted drafts, texts of one token, and texts that end the batch."""
    engine = toy_engine(speculation=Speculation(schedule=schedule, **DRAFTERS[drafter]))
    prompts, params = mixed(toy)
    check(toy, engine, prompts, params)
    record = engine.record()
    if drafter != "none":
        assert (record.metrics["drafted_tokens"] or 0) > 0
        assert (record.metrics["accept_length"] or 0) > 1
    assert (record.metrics["verify_steps"] or 0) > 0


@settings(max_examples=3)
@given(data=st.data())
def test_any_settings_give_the_tokens_of_the_baseline(
    data: st.DataObject, toy: Any, toy_engine: Callable[..., Engine]
) -> None:
    """Random batches, limits, stops, pools, chunks and arrivals."""
    draw = data.draw
    drafter = draw(st.sampled_from(sorted(DRAFTERS)), "drafter")
    schedule, late = draw(st.sampled_from([("v1", False), ("v2", False), ("v2", True)]), "schedule")
    shape = Speculation(**DRAFTERS[drafter]).shape
    rows = max(shape.tokens + 1, shape.draft_slots)
    size = draw(st.sampled_from([1, 3, 4, 16]), "page_size")
    least = -(-(90 + 2 * rows) // size)
    engine = toy_engine(
        speculation=Speculation(schedule=schedule, **DRAFTERS[drafter]),
        page_size=size,
        max_model_len=90,
        kv_pages=least + draw(st.sampled_from([0, 1, 3, 10, 200]), "spare pages"),
        max_running=draw(st.integers(1, 9), "max_running"),
        prefill_chunk=draw(st.sampled_from([1, 4, 9, 40, 2048]), "prefill_chunk"),
        prefix_cache=draw(st.booleans(), "prefix_cache"),
    )
    pool = toy.prompts()
    prompts = [list(pool[i]) for i in draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=6), "prompts")]
    params = []
    for prompt in prompts:
        tokens = toy.greedy(tuple(prompt))
        place = st.integers(0, 30)
        params.append(
            SamplingParams(
                max_new_tokens=draw(st.sampled_from([1, 2, 3, 4, 9, 24])),
                ignore_eos=draw(st.booleans()),
                stop_token_ids=(tokens[draw(place)],) if draw(st.booleans()) else (),
                stop=(stop_string(toy, tokens, draw(place)),) if draw(st.booleans()) else (),
            )
        )
    concurrency = draw(st.one_of(st.none(), st.integers(1, 4)), "concurrency")
    with pytest.MonkeyPatch.context() as patch:
        if late:
            late_results(patch)
        check(toy, engine, prompts, params, concurrency=concurrency)
        check(toy, engine, prompts[::-1], params[::-1])  # again, with cached prefixes


@pytest.mark.parametrize(
    ("drafter", "schedule"), crossed(["none", "ngram-7-1", "self", "tree"], SCHEDULES), indirect=["schedule"]
)
def test_aborts_do_not_affect_other_requests(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str, drafter: str
) -> None:
    engine = toy_engine(speculation=Speculation(schedule=schedule, **DRAFTERS[drafter]), kv_pages=34, max_model_len=90)
    prompts = [list(prompt) for prompt in toy.prompts()[:16]]
    params = SamplingParams(max_new_tokens=14, ignore_eos=True)
    chance = random.Random(5)
    got: dict[int, list[int]] = {index: [] for index in range(16)}
    ended: dict[int, Any] = {}
    aborted = set()
    for event in engine.stream(prompts, params):
        assert event.index not in ended, "nothing comes after the completion"
        got[event.index] += event.token_ids
        if event.completion is not None:
            ended[event.index] = event.completion
        if chance.random() < 0.2:
            victim = chance.randrange(16)
            if victim not in ended:
                aborted.add(victim)
                engine.abort(victim)
    assert len(aborted) >= 3
    assert set(ended) == set(range(16))
    for index, completion in ended.items():
        wanted = toy.greedy(tuple(prompts[index]))[:14]
        assert tuple(completion.token_ids) == wanted[: len(completion.token_ids)]
        assert got[index] == completion.token_ids
        if completion.finish_reason == "abort":
            assert index in aborted
        else:
            assert len(completion.token_ids) == 14
    check_released(engine)


# -- first tokens and counts -----------------------------------------------------------------------------------------


def test_the_first_token_comes_alone_and_first(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str, watch: Watch
) -> None:
    handled: list[tuple[int, bool]] = []

    def note(runner: Runner, launched: Launched, **_: bool) -> None:
        handled.extend((row.request.index, launched.first) for row in launched.requests)

    watch(Runner, "handle", before=note)
    engine = toy_engine(speculation=Speculation("ngram", schedule), max_running=3)
    prompts = [list(prompt) for prompt in toy.prompts()[:9]]
    counts: dict[int, list[int]] = {}
    for event in engine.stream(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True)):
        counts.setdefault(event.index, []).append(len(event.token_ids))
    assert all(sizes[0] == 1 for sizes in counts.values())
    for index in range(9):
        kinds = [first for who, first in handled if who == index]
        assert kinds[0]
        assert not any(kinds[1:])


def test_the_first_token_does_not_wait_for_the_next_step(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str
) -> None:
    """After one call of the schedule: prefill and first decode step are launched, and the first token has arrived."""
    engine = toy_engine(speculation=Speculation(schedule=schedule))
    stream = engine.stream([list(toy.prompts()[3])], SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert next(stream).token_ids == [toy.greedy(toy.prompts()[3])[0]]
    assert engine.iterations == 1
    stream.close()  # type: ignore[attr-defined]
    check_released(engine)


@pytest.mark.parametrize("drafter", first_quick(1, ["self", "ngram"]))
def test_accepted_drafts_save_steps(toy: Any, toy_engine: Callable[..., Engine], drafter: str) -> None:
    """The same counts with both schedules, and fewer steps than without drafts."""
    prompts = [list(prompt) for prompt in toy.prompts()[:4]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    numbers = {}
    for name in ("none", drafter):
        for schedule in ("v1", "v2"):
            engine = toy_engine(speculation=Speculation(schedule=schedule, **DRAFTERS[name]))
            completions = engine.generate(prompts, params)
            record = engine.record()
            verifies = sum(item.metrics.verify_steps for item in completions)
            emitted = sum(len(item.token_ids) - 1 for item in completions)  # all but the first token
            accepted = sum(item.metrics.accepted for item in completions)
            assert record.metrics["accept_length"] == pytest.approx(emitted / verifies)
            assert record.metrics["verify_steps"] == verifies
            counts = record.counters["emitted_histogram"]
            assert sum(counts) == verifies
            assert sum(place * count for place, count in enumerate(counts)) == emitted
            assert record.counters["iteration_rows"] == verifies + record.counters["void_results"]
            numbers[name, schedule] = (verifies, emitted, accepted, record.metrics["accept_rate"])
            if name == "none":
                assert (record.metrics["accept_length"], record.metrics["accept_rate"]) == (1.0, None)
                assert record.counters["iterations"] == 23
                assert record.counters["void_results"] == 0
    assert numbers["none", "v1"] == numbers["none", "v2"]
    assert numbers[drafter, "v1"] == numbers[drafter, "v2"]
    verifies, emitted, accepted, rate = numbers[drafter, "v2"]
    assert verifies < numbers["none", "v2"][0]
    assert 0 < rate < 1
    assert (
        accepted >= emitted - verifies
    )  # an output cut at its limit may end with an accepted draft and no bonus token


@pytest.mark.parametrize(("chain", "tree"), first_quick(1, [("ngram", "ngram-tree"), ("self", "tree-chain")]))
def test_a_tree_accepts_more_than_a_chain(toy: Any, toy_engine: Callable[..., Engine], chain: str, tree: str) -> None:
    shapes = DRAFTERS | {"tree-chain": {**_SELF, "draft_steps": 3, "draft_topk": 3, "draft_tokens": 12}}
    shapes["ngram"] = {"algorithm": "ngram", "draft_tokens": 4, "ngram_min": 1}
    prompts = [list(prompt) for prompt in toy.prompts()[::4]]
    found = {}
    for name in (chain, tree):
        engine = toy_engine(speculation=Speculation(**shapes[name]))
        engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
        found[name] = engine.record().metrics["accept_length"]
    assert found[tree] > found[chain] > 1


@pytest.mark.parametrize("drafter", first_quick(1, ["tree", "self"]))
def test_cached_prefixes_hold_the_drafts_keys_too(toy: Any, toy_engine: Callable[..., Engine], drafter: str) -> None:
    """Prompts that continue finished texts are drafted as without the cache."""
    numbers = {}
    for prefix_cache in (True, False):
        engine = toy_engine(
            speculation=Speculation(**DRAFTERS[drafter], schedule="v1"), prefix_cache=prefix_cache, page_size=1
        )
        firsts = [list(prompt) for prompt in toy.prompts()[::7]]
        ends = engine.generate(firsts, SamplingParams(max_new_tokens=9, ignore_eos=True))
        longer = [prompt + end.token_ids for prompt, end in zip(firsts, ends, strict=True)]
        done = engine.generate(longer, SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert any(item.metrics.cached_tokens for item in done) is prefix_cache
        numbers[prefix_cache] = [item.metrics.emitted_histogram for item in done]
    assert numbers[True] == numbers[False]


# -- launches never wait ----------------------------------------------------------------------------------------------


class NoHostRead(TorchDispatchMode):
    """Like CUDA's sync debug mode: operators for whose result the host must wait raise."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.FORBIDDEN), f"{name} waits for the device"
        if name.startswith("index"):
            for index in args[1] if isinstance(args[1], (list, tuple)) else []:
                assert index is None or index.dtype != torch.bool, "indexing by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("drafter", "sampled"), crossed(["none", "ngram", "self", "other", "ngram-tree", "tree", "block"], [True, False])
)
def test_launching_reads_nothing_from_the_device(
    toy: Any,
    toy_engine: Callable[..., Engine],
    drafter: str,
    sampled: bool,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = toy_engine(speculation=Speculation(schedule="v2", **DRAFTERS[drafter]), kv_pages=40, max_model_len=80)
    launching = 0

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal launching
            launching += 1
            try:
                with NoHostRead():
                    return method(*arguments, **options)
            finally:
                launching -= 1

        return call

    def check(name: str) -> None:
        assert not launching, f"Tensor.{name} waits for the device"

    for name in ("decode", "prefill"):
        monkeypatch.setattr(Runner, name, guarded(getattr(Runner, name)))
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        watch(torch.Tensor, name, before=lambda *_, name=name, **__: check(name))
    params = SamplingParams(
        max_new_tokens=8, temperature=0.8 * sampled, top_k=9, top_p=0.9, min_p=0.01, logprobs=sampled, seed=1
    )
    completions = engine.generate([list(prompt) for prompt in toy.prompts()[:10:2]], params)
    assert len(completions) == 5
