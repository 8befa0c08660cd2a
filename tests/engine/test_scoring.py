"""Log-likelihoods of given texts match float64 and the logprobs of generation: for every family, in chunks and in one
pass, with every kind of draft, and without effect on later requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossed import slow_but
from targets import HYBRIDS, Targets

from specbatch import Graphs, Likelihood, SamplingParams, SpecbatchError, Speculation

Pair = tuple[list[int], list[int]]


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")(test))


def naive(toy: Any, context: list[int], continuation: list[int]) -> Likelihood:
    """The toy's in float64."""
    logits = toy.logits([*context, *continuation])[len(context) - 1 : -1]
    tokens = torch.tensor(continuation)
    value = logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    return Likelihood(float(value), bool((logits.argmax(-1) == tokens).all()))


def pairs_of(toy: Any) -> list[Pair]:
    """Of 1 to 90 tokens, some alike but for their last token, some greedy."""
    chance = random.Random(7)

    def draw(count: int) -> list[int]:
        return [chance.randrange(37) for _ in range(count)]

    pairs = [(draw(n), draw(m)) for n, m in ((1, 1), (1, 30), (12, 4), (60, 31), (30, 61), (5, 1), (119, 2), (1, 120))]
    pairs += [(pairs[2][0], [*pairs[2][1][:-1], 9]), (pairs[5][0], [8]), (pairs[5][0], [11]), pairs[5]]
    pairs.append(([*pairs[2][0], pairs[2][1][0]], pairs[2][1][1:]))  # the same text, cut elsewhere
    alike = draw(22)  # what follows one context begins alike for longer than a page
    pairs += [(draw(1) + alike[:5], [*alike[5:], n, 3]) for n in range(2)]
    pairs += [(alike[:6], [*alike[6:], n, 3]) for n in range(3)]
    for prompt in toy.prompts()[:4]:
        tokens = list(toy.greedy(prompt))
        pairs += [(list(prompt), tokens[:9]), (list(prompt), [*tokens[:8], (tokens[8] + 1) % 37])]
    return pairs


def compare(toy: Any, pairs: list[Pair], found: list[Likelihood], tolerance: float) -> None:
    for (context, continuation), likelihood in zip(pairs, found, strict=True):
        wanted = naive(toy, context, continuation)
        assert likelihood == (pytest.approx(wanted.logprob, abs=tolerance), wanted.is_greedy)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_chunk": 7, "max_running": 2, "kv_pages": 40},
        {"prefill_chunk": 500, "kv_pages": 34},
        {"prefill_chunk": 40, "prefix_cache": False},
        {"prefill_chunk": 3, "speculation": Speculation("eagle3", draft="dummy")},
        {"speculation": Speculation("dflash", draft="dummy"), "page_size": 16},
    ],
)
def test_scores_match_float64(toy: Any, toy_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    pairs, seen = pairs_of(toy), []
    with toy_engine(**settings) as engine:
        step = engine.parts.worker.score_step
        step.workspace = 3 * 16 * step.model.config.vocab_size  # three rows of logits at a time
        found = engine.score(pairs, on_score=lambda index, likelihood: seen.append((index, likelihood)))
    compare(toy, pairs, found, 1e-4)
    assert [likelihood.is_greedy for likelihood in found[-8:]] == [True, False] * 4
    assert sorted(seen) == list(enumerate(found))


@on_gpu
@pytest.mark.parametrize("graphs", [Graphs(), Graphs(decode="whole", prefill="piecewise")], ids=["eager", "graphs"])
@pytest.mark.parametrize("speculation", [Speculation(), Speculation("eagle3", draft="dummy")], ids=["none", "eagle3"])
@pytest.mark.parametrize("chunk", [7, 500])
def test_on_a_gpu(
    toy: Any, toy_engine: Callable[..., Any], graphs: Graphs, speculation: Speculation, chunk: int
) -> None:
    pairs, settings = pairs_of(toy), {"device": "cuda", "dtype": "float32", "prefill_chunk": chunk}
    with toy_engine(graphs=graphs, speculation=speculation, **settings) as engine:
        compare(toy, pairs, engine.score(pairs), 1e-3)
        counters = engine.record().counters["graphs"]["target_prefill"]
    assert (counters["replays"] > 0) == (graphs.prefill == "piecewise")


@on_gpu
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_family_on_a_gpu(targets: Targets, name: str) -> None:
    check_likelihoods(targets, name, 1e-3, device="cuda", dtype="float32")


@pytest.mark.parametrize("name", slow_but(["qwen3.5", "lfm2"], HYBRIDS))
def test_every_family(targets: Targets, name: str) -> None:
    check_likelihoods(targets, name, 1e-4)


def check_likelihoods(targets: Targets, name: str, tolerance: float, **settings: str) -> None:
    """Scores of generated tokens equal their logprobs, and generating after scoring gives the same tokens."""
    prompts, params = targets.prompts(name), SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True)
    with targets.engine(name, "ngram", prefill_chunk=5, **settings) as engine:
        generated = engine.generate(prompts, params)
        pairs = [(prompt, item.token_ids) for prompt, item in zip(prompts, generated, strict=True)]
        wrong = [(prompt, [*tokens[:-1], (tokens[-1] + 1) % 37]) for prompt, tokens in pairs]
        found = engine.score([*pairs, *wrong])
        again = engine.generate(prompts, params)
    assert [item.token_ids for item in generated] == [item.token_ids for item in again] == targets.greedy(name, 9)
    for item, likelihood in zip(generated, found, strict=False):
        assert item.logprobs is not None
        assert likelihood == (pytest.approx(math.fsum(item.logprobs), abs=tolerance), True)
    assert not any(likelihood.is_greedy for likelihood in found[len(pairs) :])


def test_ties_are_greedy_for_the_lowest_token(toy_engine: Callable[..., Any]) -> None:
    with toy_engine() as engine:
        head = engine.parts.model.logits
        engine.parts.model.logits = lambda hidden: torch.zeros_like(head(hidden)).index_fill_(
            1, torch.tensor([5, 9]), 1.0
        )
        low, high = engine.score([([1], [5]), ([1], [9])])
    assert low.logprob == high.logprob
    assert (low.is_greedy, high.is_greedy) == (True, False)


def test_logprobs_are_float32_of_half_precision_logits(toy: Any, toy_engine: Callable[..., Any]) -> None:
    contexts = [list(prompt) for prompt in toy.prompts()[:6]]
    with toy_engine(dtype="bfloat16") as engine:
        found = engine.score([(context, [token]) for context in contexts for token in range(37)])
        wanted = [engine.next_logits(context).log_softmax(0) for context in contexts]
    assert [likelihood.logprob for likelihood in found] == pytest.approx(torch.cat(wanted).tolist(), abs=1e-5)


def test_texts_share_common_prefixes(toy_engine: Callable[..., Any]) -> None:
    """The choices of two questions: 30 and 41 tokens in pages of 4, and of each choice what its tokens need."""
    chance = random.Random(5)
    questions = [[chance.randrange(37) for _ in range(count)] for count in (30, 41)]
    pairs = [(question, [n, *[5] * n]) for question in questions for n in range(5)]
    found, computed = [], []
    for settings in ({}, {"prefill_chunk": 16}, {"prefix_cache": False}):
        with toy_engine(max_running=10, **settings) as engine:
            forward, seen = engine.parts.worker.score_step.forward, []
            engine.parts.worker.score_step.forward = lambda metadata, *rest, seen=seen, forward=forward: (
                seen.append(metadata.count) or forward(metadata, *rest)
            )
            found.append(engine.score(pairs))
            computed.append(sum(seen))
    whole = sum(len(question) + len(choice) - 1 for question, choice in pairs)
    assert computed == [whole - 4 * 28 - 4 * 40] * 2 + [whole]
    for some in found[:2]:
        assert [item.logprob for item in some] == pytest.approx([item.logprob for item in found[2]], abs=1e-5)


def test_the_record_of_scoring(toy_engine: Callable[..., Any]) -> None:
    with toy_engine(speculation=Speculation("ngram")) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        engine.reset_record()
        engine.score([([1, 2, 3], [4, 5]), ([6], [7])])
        first = engine.record()
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        both = engine.record()
        engine.reset_record()
        nothing = engine.record()
        engine.score([([1], [2])])
    assert engine.record().metrics["requests"] == 1  # of a closed engine, too
    assert first.metrics.keys() == {
        *("requests", "duration_s", "input_tokens", "scored_tokens", "request_throughput", "input_throughput")
    }
    assert (first.metrics["requests"], first.metrics["input_tokens"], first.metrics["scored_tokens"]) == (2, 7, 3)
    assert first.metrics["input_throughput"] == pytest.approx(7 / (first.metrics["duration_s"] or 0))
    assert [(row["index"], row["prompt_tokens"], row["scored_tokens"]) for row in first.requests] == [
        (0, 3, 2),
        (1, 1, 1),
    ]
    assert (both.metrics["requests"], both.metrics["output_tokens"]) == (1, 4)
    assert both.counters["scoring"]["requests"] == 2
    assert "scoring" not in nothing.counters
    assert nothing.metrics["requests"] == 0


@pytest.mark.parametrize(
    ("pair", "complaint"),
    [
        (([], [1]), "context of pair 1=[]: give the token that begins a text"),
        (([1], []), "continuation of pair 1=[]: it has no tokens"),
        (([1], [37]), "pair 1=[37]: token ids go from 0 to 36"),
        (([-1], [3]), "pair 1=[-1]"),
        (("ab", [3]), "pair 1="),
        (7, "pair 1="),
        (([1] * 60, [2] * 62), "max_model_len=120: pair 1 has 121 tokens before its last"),
    ],
)
def test_refused_pairs(toy_engine: Callable[..., Any], pair: Any, complaint: str) -> None:
    """Before any work; the engine goes on."""
    seen: list[Any] = []
    with toy_engine() as engine:
        with pytest.raises(SpecbatchError) as refused:
            engine.score([([1], [2]), pair], on_score=lambda *what: seen.append(what))
        assert str(refused.value).startswith(complaint)
        assert not seen
        assert len(engine.score([([1] * 60, [2] * 61)])) == 1
        assert engine.score([]) == []
        stream = engine.stream([[1]], SamplingParams(max_new_tokens=3))
        next(stream)
        with pytest.raises(SpecbatchError, match="the engine is busy"):
            engine.score([([1], [2])])


def test_non_finite_logits_name_the_pair(toy_engine: Callable[..., Any]) -> None:
    with toy_engine(model="toy-nan") as engine:
        with pytest.raises(SpecbatchError, match=r"logits of pair 1 are not finite: .*dtype"):
            engine.score([([1, 2], [3]), ([1, 36], [3])])
        assert len(engine.generate([[5, 6]], SamplingParams(max_new_tokens=1))) == 1


def test_the_engine_is_usable_after_an_interrupted_call(toy: Any, toy_engine: Callable[..., Any]) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    prompts = [list(prompt) for prompt in toy.prompts()[:6]]
    with toy_engine() as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.score(pairs_of(toy), on_score=stop)
        done = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:8] for prompt in prompts]
