"""`n` samples of a prompt, `min_tokens` and `top_logprobs`, with every drafter and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import crossed, slow_but
from lossless import settings_of
from plain_decoding import seed_of_sample
from stand_ins import fake_graphs, late_results
from targets import SPECULATIONS, Targets

from specbatch import Completion, Engine, SamplingParams, SpecbatchError, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.kernels.sampling.rng import uniform_ref

SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, n=4, seed=3)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [item.token_ids for item in completions]


def prompt_of(length: int) -> list[int]:
    return [3 + (index * index) % 31 for index in range(length)]


# -- n ----------------------------------------------------------------------------------------------------------------


def test_samples_are_consecutive_and_differ(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=3)
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    params = [SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, n=n) for n in (2, 1, 3)]
    done = engine.generate(prompts, params, request_ids=["a", "b", "c"])
    assert [(item.index, item.sample, item.request_id) for item in done] == [
        (0, 0, "a"), (0, 1, "a"), (1, 0, "b"), (2, 0, "c"), (2, 1, "c"), (2, 2, "c"),
    ]  # fmt: skip
    assert len(set(map(tuple, tokens_of(done)))) == 6
    assert [done[place].token_ids for place in (0, 2, 3)] == tokens_of(
        engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True))
    ), "the first sample is that of n=1"
    events = [event for event in engine.stream(prompts, params) if event.completion is not None]
    assert {(event.index, event.sample) for event in events} == {(item.index, item.sample) for item in done}


@pytest.mark.parametrize(("prefix_cache", "max_running"), crossed([True, False], [1, 8]))
def test_prompt_of_samples_is_computed_once(
    toy_engine: Callable[..., Engine], prefix_cache: bool, max_running: int
) -> None:
    """Without a prefix cache, too, and when the samples run one after the other."""
    engine = toy_engine(
        max_model_len=500, prefill_chunk=64, page_size=16, prefix_cache=prefix_cache, max_running=max_running
    )
    prompt = prompt_of(400)
    params = SamplingParams(temperature=1.0, max_new_tokens=4, ignore_eos=True, n=8)
    passes: list[int] = []
    engine.on_prefill = passes.append
    done = engine.generate([prompt], params)
    record = engine.record()
    assert sum(passes) == record.counters["prefill_tokens"]
    assert record.counters["prefill_tokens"] == 400 + 7 * 16
    assert [item.metrics.cached_tokens for item in done] == [0] + [384] * 7
    assert record.metrics["input_tokens"] == 400
    assert record.metrics["cached_tokens"] == 0
    assert record.metrics["output_tokens"] == 32
    again = engine.generate([prompt], params)
    assert tokens_of(again) == tokens_of(done)
    assert again[0].metrics.cached_tokens == (384 if prefix_cache else 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompt_of_samples_of_a_recurrent_model(targets: Targets, prefix_cache: bool) -> None:
    """Without cached states each sample computes the prompt."""
    with targets.engine("qwen3.5", max_model_len=120, prefill_chunk=32, prefix_cache=prefix_cache) as engine:
        done = engine.generate([prompt_of(78)], SAMPLED)
        alone = [targets_alone(engine, prompt_of(78), sample) for sample in range(4)]
        assert tokens_of(done) == alone
        cached = [item.metrics.cached_tokens for item in done]
    assert cached == ([0, 76, 76, 76] if prefix_cache else [0, 0, 0, 0])


def targets_alone(engine: Engine, prompt: list[int], sample: int) -> list[int]:
    """Tokens of one sample, from a run of its own."""
    params = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, seed=seed_of_sample(3, sample))
    engine.forget_prefixes()
    return engine.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize(("name", "schedule"), crossed(["none", "ngram", "model", "eagle-tree"], ["v1", "v2"]))
def test_samples_under_memory_pressure(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str
) -> None:
    """Retracted samples, and prompts whose shared pages are evicted, give the tokens of roomy engines."""
    late_results(monkeypatch)
    prompts = [prompt_of(9), prompt_of(14)[::-1], prompt_of(11)]
    params = SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True, n=3)
    with targets.engine("llama", "none") as engine:
        expected = tokens_of(engine.generate(prompts, params))
    for prefix_cache in (True, False):
        settings = {"page_size": 2, "kv_pages": 30, "max_model_len": 26, "prefill_chunk": 8}
        with targets.engine("llama", name, schedule, prefix_cache=prefix_cache, **settings) as engine:
            assert tokens_of(engine.generate(prompts, params)) == expected
            assert engine.record().metrics["retractions"] or name != "none"
            engine.forget_prefixes()
            assert engine.parts.scheduler.pool.free == 30


def test_aborting_a_prompt_ends_all_its_samples(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(max_running=2)
    prompts = [list(prompt) for prompt in toy.prompts()[:2]]
    reasons: dict[tuple[int, int], str] = {}
    for event in engine.stream(prompts, SAMPLED, request_ids=["a", "b"], concurrency=3):
        engine.abort("a")
        if event.completion is not None:
            reasons[event.index, event.sample] = event.completion.finish_reason
    assert reasons == {(index, sample): ("length" if index else "abort") for index in range(2) for sample in range(4)}


def test_samples_share_no_random_numbers() -> None:
    """Whatever the use: the target's tokens, acceptance, the residual, the draft."""
    seeds = torch.tensor([seed_of_sample(0, sample) for sample in range(64)])
    numbers = [uniform_ref(seeds, torch.tensor(9), stream) for stream in range(5)]
    assert len(set(torch.cat(numbers).tolist())) == 64 * 5


# -- min_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "temperature"),
    slow_but(
        [("none", "v1", 0.0), ("model", "v2", 1.0), ("eagle-tree", "v2", 0.0), ("ngram-tree", "v1", 1.0)],
        [(name, schedule, heat) for name in SPECULATIONS for schedule in ("v1", "v2") for heat in (0.0, 1.0)],
    ),
)
def test_end_tokens_are_not_sampled_before_min_tokens(
    targets: Targets, name: str, schedule: str, temperature: float
) -> None:
    """Greedy tokens are the likeliest of the allowed ones; sampled ones are never end tokens."""
    ends, count = tuple(range(3, 33)), 7
    params = [
        SamplingParams(
            temperature=temperature, max_new_tokens=9, ignore_eos=True, stop_token_ids=ends, seed=seed,
            min_tokens=0 if seed == 2 else count, logprobs=seed % 2 == 1,
        )
        for seed in range(6)
    ]  # fmt: skip
    prompts = targets.prompts("llama")
    with targets.engine("llama", name, schedule, **settings_of("llama", name)) as engine:
        done = engine.generate(prompts, params)
    for seed, (prompt, item) in enumerate(zip(prompts, done, strict=True)):
        logits = targets.logits("llama", [prompt + item.token_ids])[0][len(prompt) - 1 : -1]
        if seed == 2:
            assert len(item.token_ids) < count, "nothing shows that end tokens are likely"
            continue
        assert len(item.token_ids) > count or not temperature
        assert not set(item.token_ids[:count]) & set(ends)
        if item.logprobs is not None:  # of the model, unmasked
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(item.token_ids)[:, None])[:, 0]
            assert item.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
        if not temperature:
            logits[:count, list(ends)] = -torch.inf
            assert item.token_ids == logits.argmax(-1).tolist()


def test_end_tokens_of_the_last_request_in_a_slot_are_forgotten(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """By a request with `min_tokens` and without end tokens, beside one that has some."""
    engine = toy_engine(max_running=2)
    prompts = [list(prompt) for prompt in toy.prompts()[:4]]
    masked = SamplingParams(max_new_tokens=6, min_tokens=6, ignore_eos=True, stop_token_ids=tuple(range(3, 37, 2)))
    free = SamplingParams(max_new_tokens=6, min_tokens=6, ignore_eos=True)
    done = engine.generate(prompts, [masked, masked, free, masked])
    assert tuple(done[2].token_ids) == toy.greedy(tuple(prompts[2]))[:6]


def test_stop_strings_are_ignored_within_min_tokens(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    whole = engine.generate([[3, 4, 5]], params)[0]
    letter = whole.text[0]
    late = SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(letter,), min_tokens=3)
    found = engine.generate([[3, 4, 5]], late)[0]
    assert found.token_ids[:3] == whole.token_ids[:3]
    assert len(found.token_ids) > 3
    assert found.text.startswith(letter)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens=9: use at most max_new_tokens=8"),
        ({"min_tokens": 1, "stop_token_ids": (37,)}, "stop_token_ids=37: token ids go from 0 to 36"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(37))}, "min_tokens=1: there are 37 end tokens"),
        ({"top_logprobs": 21}, "top_logprobs=21: use 0 to 20"),
        ({"n": 0}, "n=0"),
        ({"logprobs": 5}, "logprobs=5: use a boolean; top_logprobs=K"),
        ({"max_tokens": 5}, "max_tokens=5: use max_new_tokens"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1: use a number from -2 to 2; 0 is off"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: use a number from 0.01"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty=1e-39: use a number from 0.01"),
        ({"logit_bias": {37: 1}}, "logit_bias=37: token ids go from 0 to 36"),
        ({"logit_bias": {5: 1, "5": 2}}, "logit_bias=5: this token id is there more than once"),
        ({"logit_bias": {"5": 1, "05": None}}, "logit_bias=.*use a mapping"),
        ({"logit_bias": [[5, 1], [5, 1]]}, "logit_bias=5: this token id is there more than once"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias=.*use a mapping"),
        ({"bad_words": ["\ud800"]}, "bad_words=.*half of a surrogate pair"),
        ({"logit_bias": {"x": 1}}, "logit_bias=.*use a mapping of at most 300 token ids to numbers from -100 to 100"),
        ({"logit_bias": {3: 101}}, "logit_bias=.*use a mapping"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias=.*at most 300"),
        ({"bad_words": ["x", " "]}, "bad_words=.*a word must not be empty"),
        ({"bad_words": "x" * 17}, "bad_words=.*one has 1[78] tokens; use words of at most 16"),
        (
            {"bad_words": [a + b for a in "abcdef" for b in "abcdef"]},
            "bad_words=.*spellings as tokens; use words with at most 64",
        ),
        ({"best_of": 2}, "best_of=2: .*use n"),
    ],
)
def test_sampling_params_that_cannot_work_are_refused(
    toy_engine: Callable[..., Engine], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbatchError, match=message):
        toy_engine().generate([[3]], SamplingParams(**{"max_new_tokens": 100} | params))
    with pytest.raises(SpecbatchError, match=r"sampling_params=.*use params"):
        toy_engine().generate([[3]], sampling_params=SamplingParams())


def test_bad_words_without_tokens_are_refused_and_those_of_other_vocabularies_are_never_chosen(
    toy_engine: Callable[..., Engine],
) -> None:
    engine, params = toy_engine(), SamplingParams(max_new_tokens=4)
    plain = engine.generate([[4]], params)[0].token_ids
    assert (
        engine.generate([[4]], params.updated({"bad_words": ["x"]}))[0].token_ids == plain
    )  # a byte above the 37 tokens
    # As by tokenizers that remove characters without a width.
    engine.tokenizer.encode = lambda *_, **__: []  # type: ignore[method-assign]
    with pytest.raises(SpecbatchError, match=r"bad_words=.*the tokenizer has no tokens for it"):
        engine.generate([[3]], params.updated({"bad_words": ["y"]}))


# -- top_logprobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "graphs"),
    slow_but(
        [("none", "v2", "off"), ("model", "v1", "whole"), ("eagle-tree", "v2", "whole")],
        [(name, schedule, graphs) for name in SPECULATIONS for schedule in ("v1", "v2") for graphs in ("off", "whole")],
    ),
)
def test_top_logprobs_are_those_of_the_model(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, graphs: str
) -> None:
    fake_graphs(monkeypatch)
    params = [
        SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=count % 2, seed=count, top_logprobs=count)
        for count in (0, 1, 5, 20, 2, 0)
    ]
    prompts = targets.prompts("llama")
    graph = Graphs(decode=graphs)  # type: ignore[arg-type]
    with targets.engine("llama", name, schedule, graphs=graph, **settings_of("llama", name)) as engine:
        done = engine.generate(prompts, params)
    for prompt, wanted, item in zip(prompts, params, done, strict=True):
        if not wanted.top_logprobs:
            assert item.logprobs is None
            assert item.top_logprobs is None
            continue
        logprobs = targets.logits("llama", [prompt + item.token_ids])[0][len(prompt) - 1 : -1].log_softmax(-1)
        assert item.top_logprobs is not None
        assert item.logprobs is not None
        assert len(item.top_logprobs) == len(item.logprobs) == 6
        for row, found, token, own in zip(logprobs, item.top_logprobs, item.token_ids, item.logprobs, strict=True):
            best = row.topk(wanted.top_logprobs)
            assert list(found.values()) == pytest.approx(best.values.tolist(), abs=1e-3)
            assert [row[other].item() for other in found] == pytest.approx(list(found.values()), abs=1e-3)
            assert own == found.get(token, own), "one number for a token"


# -- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", [Speculation(), Speculation("ngram", "v2", ngram_min=1)])
def test_seed_gives_the_same_tokens_in_any_batch(
    toy: Any, toy_engine: Callable[..., Engine], speculation: Speculation
) -> None:
    """In float32, alone, in any order and among other requests."""
    engine = toy_engine(speculation=speculation)
    prompts = [list(prompt) for prompt in toy.prompts()[:12]]
    params = [SamplingParams(temperature=1.0, max_new_tokens=10, seed=seed, ignore_eos=True) for seed in range(12)]
    together = tokens_of(engine.generate(prompts, params))
    assert [tokens_of(engine.generate([one], own))[0] for one, own in zip(prompts, params, strict=True)] == together
    assert tokens_of(engine.generate(prompts[::-1], params[::-1]))[::-1] == together
    assert tokens_of(engine.generate(prompts[3:8], params[3:8], concurrency=2)) == together[3:8]
