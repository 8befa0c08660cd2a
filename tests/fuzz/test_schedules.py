"""Random engines, requests, arrivals and aborts: every answer is that of the request alone, and nothing leaks."""

from __future__ import annotations

import random as random_module
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
from fuzzing import Fuzz
from lossless import slots_per_step
from plain_decoding import check_end, check_logprobs, check_tokens, seed_of_sample
from released import check_released
from shared_prefixes import share_on_cpu
from stand_ins import fake_graphs, late_results, no_step_times, random_draft_lengths

from specbatch import Completion, Engine, SamplingParams, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.memory.page_pool import pages_for, reserved_length

Random = random_module.Random
LONGEST = 48  # tokens of prompt and output
POISON = 36  # of toy-nan
NARROW, FEW, MANY = 0.3, 10, 100  # share of narrow engines; prompts in a stream of those and of others
_TREE = {"draft_steps": 3, "draft_topk": 2, "draft_tokens": 5}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"algorithm": "ngram", "ngram_min": 1, "draft_tokens": 4},
    "ngram-long": {"algorithm": "ngram", "ngram_min": 1, "draft_tokens": 7},
    "ngram-tree": {"algorithm": "ngram", "ngram_min": 1, "draft_steps": 3, "draft_topk": 2},
    "ngram-auto": {"algorithm": "ngram", "ngram_min": 1, "draft_steps": 5, "draft_tokens": "auto"},
    "self": {"algorithm": "standalone", "draft": "self:skip=1", "draft_tokens": 3},
    "other-auto": {"algorithm": "standalone", "draft": "toy-2", "draft_steps": 3, "draft_tokens": "auto"},
    "other": {"algorithm": "standalone", "draft": "toy-2", "draft_tokens": 2},
    "self-tree": {"algorithm": "standalone", "draft": "self:skip=1", **_TREE},
    "eagle": {"algorithm": "eagle", "draft": "dummy", "draft_tokens": 3},
    "eagle3": {"algorithm": "eagle3", "draft": "dummy", "draft_tokens": 3},
    "eagle3-auto": {"algorithm": "eagle3", "draft": "dummy", "draft_tokens": "auto"},
    "eagle3-tree": {"algorithm": "eagle3", "draft": "dummy", **_TREE},
    "mtp": {"algorithm": "mtp", "draft_tokens": 2},
    "dflash": {"algorithm": "dflash", "draft": "toy-block", "draft_tokens": 4},
    "dflash-auto": {"algorithm": "dflash", "draft": "toy-block", "draft_tokens": "auto"},
    "dflash2": {"algorithm": "dflash2", "draft": "dummy", "draft_tokens": 4},
    "dspark": {"algorithm": "dspark", "draft": "dummy", "draft_tokens": 4},
    "domino": {"algorithm": "domino", "draft": "dummy", "draft_tokens": 4},
    "lilicorr-auto": {"algorithm": "lilicorr", "draft": "toy-block-lattice", "draft_tokens": "auto"},
    "uno": {"algorithm": "uno", "draft": "dummy", "draft_tokens": 4},
    "xpress": {"algorithm": "xpress", "draft": "toy-block-refiner", "draft_tokens": 4},
}
# The draft state of a prefix's last token depends on the token after it, which need not be that of a later prompt.
FEATURE_HEADS = ("eagle", "eagle3", "mtp")
WITHOUT_OWN_MODEL = (
    "none",
    "ngram",
    "ngram-long",
    "ngram-auto",
    "ngram-tree",
)  # never draft a poisonous token that was not read


@dataclass
class Work:
    """Prompts with their parameters, and what is done to them while they run.

    aborts       (event, prompt): abort the prompt after so many events
    closes_at    close the stream after so many events
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    concurrency: int | None
    lazy: bool
    aborts: list[tuple[int, int]]
    closes_at: int | None


def random_engine(random: Random, toy_engine: Callable[..., Engine]) -> tuple[str, str, Engine]:
    """Its model, its drafter, and an engine. Of narrow ones, which take many steps, the pages may hold little more than
    one request."""
    narrow = random.random() < NARROW
    model = random.choice(["toy"] * 4 + ["toy-nan"])
    drafter = random.choice(WITHOUT_OWN_MODEL if model == "toy-nan" else list(DRAFTERS))
    page_size = random.choice([1, 2, 4, 16])
    need = pages_for(reserved_length(LONGEST, slots_per_step(**DRAFTERS[drafter])), page_size)
    engine = toy_engine(
        model=model,
        dtype="float32",
        speculation=Speculation(**DRAFTERS[drafter], schedule=random.choice(["v1", "v2", "v2"])),
        max_running=random.choice([1, 2, 5] if narrow else [16, 32, 48]),
        max_model_len=LONGEST,
        page_size=page_size,
        kv_pages=need * random.choice([1, 2] if narrow else [4, 8, 40]) + random.randrange(need),
        prefix_cache=random.random() < 0.7,
        prefill_chunk=random.choice([3, 8, 17] if narrow else [64, 100, 256]),
        graphs=Graphs(
            decode=random.choice(["off", "off", "whole"]),
            # Padding of a prefill graph may keep NaN, which attention by torch multiplies by a weight of 0.
            prefill=random.choice(["off", "piecewise"]) if model == "toy" else "off",
        ),
        seed=random.randrange(100) if drafter in WITHOUT_OWN_MODEL else 0,  # it decides on random draft heads, too
    )
    return model, drafter, engine


def random_params(random: Random, room: int) -> SamplingParams:
    """Parameters of a prompt that leaves `room` tokens."""

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if random.random() < chance else otherwise

    limit = random.randint(1, min(room, 14))
    stops = ["a", "b", "zz", "é", "ab", "x ", "\n", "qrs"]
    return SamplingParams(
        temperature=sometimes(0.5, 0.0, random.choice([0.5, 1.0, 1.5])),
        top_k=sometimes(0.2, random.randint(1, 40), 0),
        top_p=sometimes(0.2, random.uniform(0.3, 1.0), 1.0),
        min_p=sometimes(0.1, random.uniform(0.0, 0.3), 0.0),
        max_new_tokens=limit,
        stop=sometimes(0.3, random.sample(stops, random.randint(1, 3)), ()),
        stop_token_ids=sometimes(0.3, [random.randrange(37) for _ in range(random.randint(1, 9))], ()),
        ignore_eos=random.random() < 0.5,
        seed=sometimes(0.6, random.choice([0, -5, 7, 2**40, random.randrange(2**63)]), None),
        min_tokens=sometimes(0.3, random.randint(0, limit), 0),
        n=sometimes(0.15, random.randint(2, 4), 1),
        top_logprobs=sometimes(0.15, random.randint(1, 20), 0),
        logprobs=random.random() < 0.2,
        skip_special_tokens=random.random() < 0.8,
    )


def random_work(random: Random, model: str, prefixes: list[list[int]], count: int) -> Work:
    prompts, params = [], []
    for _ in range(count):
        prompt = random.choice(prefixes) + [random.randint(3, 35) for _ in range(random.randint(1, 7))]
        if model == "toy-nan" and random.random() < 0.2:
            prompt[random.randrange(len(prompt))] = POISON
        prompts.append(prompt)
        params.append(random_params(random, LONGEST - len(prompt)))
    events = 4 * len(prompts)
    aborts = [(random.randrange(events), random.randrange(len(prompts))) for _ in range(random.choice([0, 0, 2, 6]))]
    return Work(
        prompts,
        params,
        concurrency=random.choice([None, None, None, 1, 3] if count <= FEW else [None, None, 20, 40]),
        lazy=random.random() < 0.3,
        aborts=aborts,
        closes_at=random.randrange(events) if random.random() < 0.1 else None,
    )


def run(engine: Engine, work: Work) -> list[Completion]:
    """What ends before the stream is closed. The text of its events adds up to that of the completion."""
    done, shown = [], {}
    prompts = iter(work.prompts) if work.lazy else work.prompts
    with closing(engine.stream(prompts, work.params, concurrency=work.concurrency)) as events:
        for number, event in enumerate(events):
            key = event.index, event.sample
            shown[key] = shown.get(key, "") + event.text
            if event.completion is not None:
                assert shown.pop(key) == event.completion.text
                done.append(event.completion)
            for at, index in work.aborts:
                if at == number:
                    engine.abort(index)
            if number == work.closes_at:
                return done
    assert not shown
    assert sorted((item.index, item.sample) for item in done) == [
        (index, sample) for index, params in enumerate(work.params) for sample in range(params.n)
    ]
    return done


def check_record(engine: Engine, done: list[Completion]) -> None:
    """Sums over the requests, and what they must satisfy."""
    record = engine.record()
    ended = [item for item in done if item.is_complete]
    metrics = record.metrics
    assert metrics["requests"] == len(ended)
    assert len(record.requests) == len(done)
    assert metrics["output_tokens"] == sum(len(item.token_ids) for item in ended)
    assert metrics["input_tokens"] == sum(len(item.prompt_token_ids) for item in ended if not item.sample)
    assert sum(record.counters.get("errors", {}).values()) == sum(item.finish_reason == "error" for item in done)
    for item in ended:
        found = item.metrics
        assert found.output_tokens == len(item.token_ids)
        assert sum(found.emitted_histogram) == found.verify_steps
        assert sum(place * count for place, count in enumerate(found.emitted_histogram)) == found.emitted
        assert 1 <= len(item.token_ids) - found.emitted <= 1 + found.retractions
        assert found.accepted <= found.drafted
        assert found.cached_tokens < len(item.prompt_token_ids)
        assert len(found.itl_s) == len(item.token_ids) - 1


def check_poisoned(item: Completion, params: SamplingParams) -> bool:
    """Whether a request failed, which those that read the token of NaN must."""
    read = [*item.prompt_token_ids, *item.token_ids[:-1]]
    if POISON in read:
        assert item.finish_reason in ("error", "abort")
    if item.finish_reason == "error":
        assert POISON in (*read, *item.token_ids[-1:])
    return item.finish_reason == "error"


@pytest.fixture(scope="module")
def check_answer(toy: Any, toy_engine: Callable[..., Engine]) -> Callable[..., None]:
    """Compare a completion with the naive model, or with a roomy engine where drafts are sampled."""

    @cache
    def naive(model: str) -> Any:
        return type(toy)(model)

    @cache
    def roomy(drafter: str) -> Engine:
        return toy_engine(
            speculation=Speculation(**DRAFTERS[drafter], schedule="v1"),
            max_model_len=LONGEST,
            max_running=32,
            prefix_cache=False,
        )

    def check(
        model: str, drafter: str, engine: Engine, items: list[tuple[Completion, SamplingParams]], fuzz: Fuzz
    ) -> None:
        ends, decode = engine.tokenizer.eos_ids, engine.tokenizer.decode
        texts = [[*item.prompt_token_ids, *item.token_ids] for item, _ in items]
        others = []
        for (item, params), logits in zip(items, naive(model).logits_of(texts), strict=True):
            own = partial(decode, skip_special_tokens=params.skip_special_tokens)
            check_end(item, params, ends, own)
            check_logprobs(item, params, logits)
            if not params.temperature or "tree" in drafter or drafter.startswith(("none", "ngram")):
                assert check_tokens(item, params, ends, logits, engine_seed=engine.config.seed), item
                fuzz.outcome("equal to naive decoding")
            elif (
                drafter.endswith("auto")
                or item.metrics.retractions
                or (drafter in FEATURE_HEADS and item.metrics.cached_tokens)
            ):
                fuzz.outcome("sampled, with another draft state")
            else:
                others.append((item, params))
        if others:  # sampled drafts: the same algorithm and seed in an engine with room, some of them alone
            prompts = [item.prompt_token_ids for item, _ in others]
            found = roomy(drafter).generate(
                prompts[:2], [alone(engine, *other) for other in others[:2]], concurrency=1
            ) + roomy(drafter).generate(prompts[2:], [alone(engine, *other) for other in others[2:]])
            for (item, _), other in zip(others, found, strict=True):
                assert other.token_ids[: len(item.token_ids)] == item.token_ids
                assert not item.is_complete or other.token_ids == item.token_ids
            fuzz.outcome("equal to a roomy engine", len(others))

    return check


def alone(engine: Engine, item: Completion, params: SamplingParams) -> SamplingParams:
    """Parameters that give one sample in another engine."""
    seed = params.seed if params.seed is not None else (engine.config.seed << 32) + item.index
    return replace(params, n=1, seed=seed_of_sample(seed, item.sample))


def test_random_schedules(
    fuzz: Fuzz, toy_engine: Callable[..., Engine], check_answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_graphs(monkeypatch)
    for random in fuzz.rounds(quick=2):
        prefixes = [[random.randint(3, 35) for _ in range(random.randint(0, 26))] for _ in range(5)]
        prefixes += [[*prefix, *prefixes[0][:3]] for prefix in prefixes[:2]]  # and those that go on
        everything, recorded = [], []
        with monkeypatch.context() as patch:
            sharing = share_on_cpu(patch)
            no_step_times(patch)
            model, drafter, engine = random_engine(random, toy_engine)
            if engine.parts.draft_length.is_auto:
                random_draft_lengths(patch, seed=fuzz.seed)
            if random.random() < 0.5:
                late_results(patch)
            for _ in range(1 if fuzz.total is None else 4):
                work = random_work(random, model, prefixes, FEW if engine.plan.max_running < 16 else MANY)
                done = run(engine, work)
                check_released(engine)
                everything += [(item, work.params[item.index]) for item in done]
                if work.closes_at is not None:  # what was not read before the stream was closed is in the record only
                    fuzz.outcome("closed streams")
                    engine.reset_record()
                    recorded.clear()
                else:
                    recorded += done
        fuzz.outcome("requests", len(everything))
        fuzz.outcome("requests in passes that share", sum(sharing))
        fuzz.outcome("retractions", int(engine.record().metrics["retractions"]))
        check_record(engine, recorded)
        failed = [check_poisoned(item, params) for item, params in everything] if model == "toy-nan" else [False]
        fuzz.outcome("failed requests", sum(failed))
        check_answer(model, drafter, engine, [pair for pair in everything if pair[0].finish_reason != "error"], fuzz)
        fuzz.outcome("aborted", sum(item.finish_reason == "abort" for item, _ in everything))
        engine.forget_prefixes()
        assert engine.parts.scheduler.pool.free == engine.parts.scheduler.pool.total
        engine.close()
