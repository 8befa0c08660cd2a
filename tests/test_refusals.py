"""Errors of Python objects: one line that names the setting, its value and what works."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from limits import limited

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, SpecbatchError, Speculation
from specbatch.algorithms import ALGORITHMS
from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.errors import refuse
from specbatch.training.recipe import HEADS, Recipe

LONG = [3] * 117  # the toy engine takes 120 tokens
SHORT = SamplingParams(max_new_tokens=1)


def spec(algorithm: str, **settings: Any) -> Callable[..., Any]:
    entry = ALGORITHMS[algorithm]
    draft = "self:skip=1" if entry.drafts_by_model else "x" if entry.draft else None
    return partial(Speculation, algorithm, **{"draft": draft} | settings)


# Where a value is given, the setting, its values, and a part of what works.
VALUES: list[tuple[Callable[..., Any], str, list[Any], str]] = [
    (Speculation, "algorithm", ["eagle9", ""], "none, ngram, standalone"),
    (Speculation, "schedule", ["v3"], "v1, v2"),
    (Speculation, "draft_tokens", [0, -1], "at least 1"),
    (Speculation, "draft_tokens", [64], "at most 63"),
    (Speculation, "draft_tokens", [2.5, "4", True], "whole number"),
    (partial(Speculation, "eagle"), "draft", [None], "'eagle' needs an EAGLE head"),
    (partial(Speculation, "eagle3"), "draft", [None], "'eagle3' needs an EAGLE-3 head"),
    (partial(Speculation, "dflash"), "draft", [None], "made for the model"),
    (partial(Speculation, "standalone"), "draft", [None, ""], "self:skip="),
    (partial(Speculation, "mtp"), "draft", ["x"], "'standalone', 'eagle', 'eagle3'"),
    (partial(Speculation, "ngram"), "draft", ["x"], "'standalone'"),
    (Speculation, "draft", ["self:skip=1"], "'standalone'"),
    (spec("eagle"), "aux_layers", [(2,)], "only 'eagle3'"),
    (Speculation, "aux_layers", [(2,)], "only 'eagle3'"),
    (spec("eagle"), "ngram_min", [3], "only 'ngram'"),
    (spec("eagle3"), "aux_layers", [(), "2,3"], "tuple of layers"),
    (spec("mtp"), "draft_rope_theta", [1e4], "only 'eagle', 'eagle3'"),
    (spec("eagle"), "draft_rope_theta", [0.0, True], "positive"),
    (spec("eagle"), "draft_quantization", ["int4", ""], "use fp8"),
    (spec("ngram"), "draft_quantization", ["fp8"], "only 'standalone', 'eagle'"),
    (Speculation, "draft_quantization", ["fp8"], "only 'standalone', 'eagle'"),
    (spec("dflash", draft_tokens=5), "draft_steps", [2], "draft_tokens=5"),
    (spec("dflash"), "simulate_accept_length", [0.5], "1 to 16"),
    (spec("peagle"), "draft_topk", [2], "chains"),
    (spec("dspark"), "simulate_accept_length", [8.5], "1 to 8"),
    (Speculation, "draft_steps", [0], "at least 1"),
    (Speculation, "draft_steps", [64], "at most 63"),
    (spec("ngram", draft_topk=2), "draft_steps", [64], "at most 63"),
    (spec("standalone", draft_steps=63), "draft_topk", [2], "use draft_steps="),
    (Speculation, "draft_topk", [0], "at least 1"),
    (Speculation, "draft_topk", [True], "whole number"),
    (partial(Speculation, draft_tokens=5), "draft_steps", [3], "use draft_steps=3, draft_topk=2, draft_tokens=5"),
    (partial(Speculation, draft_topk=2, draft_tokens=3), "draft_steps", [5], "draft_topk=2, draft_tokens=5"),
    (spec("standalone", draft_steps=3, draft_topk=2), "draft_tokens", [11], "10 candidates (the root is not counted)"),
    (spec("ngram", draft_steps=3, draft_topk=2), "draft_tokens", [7], "draft_topk=2, draft_tokens=6"),
    (spec("standalone", draft_steps=8, draft_tokens=60), "draft_topk", [10], "draft_steps=7, draft_topk=10"),
    (spec("ngram"), "ngram_min", [0], "at least 1"),
    (spec("ngram"), "ngram_max", [0], "at least 1"),
    (spec("ngram"), "ngram_max", [17], "2 (ngram_min) to 16"),
    (spec("ngram"), "ngram_max", [None], "whole number"),
    (spec("ngram", ngram_min=5), "ngram_max", [4], "5 (ngram_min) to 16"),
    (spec("ngram", ngram_max=20), "ngram_min", [20], "at most 16"),
    (spec("ngram", draft_tokens="auto"), "draft_topk", [2], "drafts chains only; use 1"),
    (Speculation, "simulate_accept_length", [2.0], "drafts nothing"),
    (spec("ngram"), "simulate_accept_length", [0.9, 5.1, math.nan, "2"], "1 to 5"),
    (spec("standalone", draft_steps=5, draft_topk=3), "simulate_accept_length", [6.5], "1 to 6"),
    (spec("ngram"), "simulate_accept", ["0.5", [0.5], 0.5], "read_profile(TEXT)"),
    (Speculation, "simulate_accept", [AcceptanceProfile("", (0.5,))], "drafts nothing"),
    (
        spec("ngram", simulate_accept=AcceptanceProfile("", (0.5,) * 4)),
        "simulate_accept_length",
        [2.0],
        "leave one out",
    ),
    (Speculation, "corpus", ["run"], "algorithm 'none' drafts nothing; use 'ngram'"),
    (spec("ngram"), "corpus", ["", "run,", 5], "use run, or files separated by commas"),
    (spec("ngram", corpus="run"), "draft_topk", [2], "with a corpus chains are drafted; use 1"),
    (spec("ngram"), "corpus_tokens", [1023, 2**28 + 1], "use 1024 to 268435456"),
    (spec("ngram"), "corpus_min", [0, 17], "use 1 to 16"),
    (spec("ngram"), "corpus_min", [3], "there is no corpus to look up; add corpus='run' or files"),
    (spec("ngram"), "corpus_tokens", [4096], "there is no corpus that would hold them; add corpus='run' or files"),
    (spec("mtp", corpus="run"), "verification", ["block"], "leave the corpus out"),
    (spec("standalone"), "verification", ["whole"], "token, block"),
    (Speculation, "verification", ["block"], "algorithm 'none' samples no drafts; use 'token'"),
    (spec("ngram"), "verification", ["block"], "or one of 'standalone', 'eagle', 'eagle3'"),
    (spec("eagle", draft_steps=2, draft_topk=2), "verification", ["block"], "tree are not sampled; use 'token'"),
    (spec("mtp", simulate_accept_length=2.0), "verification", ["block"], "leave the simulation out"),
    (spec("dspark", draft_tokens=4), "verify_budget", [0.5, 1, -3], "use more than 1 and up to 5 (draft_tokens + 1)"),
    (spec("dspark", draft_tokens=4), "verify_budget", [5.5], "up to 5"),
    (spec("ngram"), "verify_budget", ["2", math.nan, math.inf, True], "use a number above 1"),
    (spec("ngram"), "verify_budget", ["all"], "use a number above 1, or auto"),
    (spec("eagle", draft_steps=2, draft_topk=2), "verify_budget", ["auto"], "use draft_topk=1"),
    (spec("mtp", simulate_accept_length=2.0), "verify_budget", ["auto"], "does not depend on confidence"),
    (Speculation, "verify_budget", [2.0], "algorithm 'none' drafts nothing"),
    (spec("eagle", draft_steps=2, draft_topk=2), "verify_budget", [2], "use draft_topk=1"),
    (spec("eagle3", draft_tokens="auto"), "verify_budget", [2], "use a number, or 'auto' for both"),
    (spec("mtp", verification="block"), "verify_budget", [2], "use 'token'"),
    (spec("mtp", simulate_accept_length=2.0), "verify_budget", [2], "leave the simulation or the budget out"),
    (
        partial(EngineConfig, speculation=Speculation("ngram", verify_budget=2)),
        "tensor_parallel",
        [2],
        "verify_budget=2 is for models on one device; use 1",
    ),
    (EngineConfig, "kv_dtype", ["int4"], "auto, fp8"),
    (EngineConfig, "attention_backend", ["x"], "auto, gluon, triton, torch"),
    (EngineConfig, "draft_attention_backend", ["triton"], "'none' computes no attention for the prompts of a draft"),
    (EngineConfig, "model", ["", 5], "smollm2-135m"),
    (EngineConfig, "speculation", [{"algorithm": "ngram"}], "Speculation("),
    (EngineConfig, "graphs", ["whole"], "Graphs("),
    (EngineConfig, "device", ["tpu", "cuda:", "cuda:-1", 0], "auto, cpu, cuda or cuda:N"),
    (EngineConfig, "dtype", ["int8"], "auto, float32, bfloat16, float16"),
    (EngineConfig, "load_format", ["pickle"], "auto, safetensors, gguf, dummy"),
    (EngineConfig, "max_running", [0], "at least 1"),
    (EngineConfig, "max_running", [1.5, None], "whole number"),
    (EngineConfig, "max_model_len", [1], "at least 2"),
    (EngineConfig, "page_size", [0], "at least 1"),
    (EngineConfig, "kv_pages", [1], "at least 2"),
    (EngineConfig, "kv_pages", ["many"], "whole number"),
    (EngineConfig, "prefill_chunk", [0], "at least 1"),
    (EngineConfig, "memory_fraction", [0.0, 1.1, True, math.nan, "half"], "above 0 and up to 1"),
    (EngineConfig, "seed", [-1], "at least 0"),
    (EngineConfig, "seed", [0.5, None], "whole number"),
    (EngineConfig, "prefix_cache", ["no"], "use a boolean"),
    (SamplingParams, "temperature", [-0.1, math.nan, math.inf, "hot", None], "0 (greedy) or a positive number"),
    (SamplingParams, "top_p", [0, 1.01, math.nan, "0.9"], "above 0 and up to 1"),
    (SamplingParams, "top_k", [-1], "0 (off)"),
    (SamplingParams, "top_k", [1.5], "whole number"),
    (SamplingParams, "min_p", [-0.1, 2, math.nan], "0 (off) to 1"),
    (SamplingParams, "max_new_tokens", [0, -5], "at least 1"),
    (SamplingParams, "max_new_tokens", [1.5, "9", None], "whole number"),
    (SamplingParams, "stop", [("",), ("a", "")], "not be empty"),
    (SamplingParams, "stop", [5, (5,)], "list of texts"),
    (SamplingParams, "stop_token_ids", [7, ("a",), (-1,)], "list of token ids"),
    (SamplingParams, "seed", ["x", 1.5], "whole number"),
    (Recipe, "algorithm", ["magic"], f"heads that can be trained are {', '.join(HEADS)}"),
    (partial(Recipe, "eagle3"), "block_size", [8], "algorithm 'eagle3' has no such setting; it belongs to dflash"),
    (partial(Recipe, "dflash"), "vocab", [8], "it belongs to eagle3"),
    (partial(Recipe, "dflash"), "block_size", [1], "use 2 to 64"),
    (partial(Recipe, "dflash"), "draft_layers", [0], "use 1 to 64"),
    (partial(Recipe, "dflash"), "markov_rank", [8], "it belongs to dspark"),
    (partial(Recipe, "lilicorr"), "lattice_width", [12, 0], "use a multiple of 8"),
    (partial(Recipe, "domino"), "block_size", [64], "use at most 63, as the first row drafts, too"),
    (partial(Recipe, "dspark"), "block_size", [64], "use at most 63, as the first row drafts, too"),
    (partial(Recipe, "eagle3"), "unroll", [17], "use 1 to 16"),
    (partial(Recipe, "eagle3"), "vocab", [0], "at least 1"),
    (partial(Recipe, "eagle3"), "steps", [0], "at least 1"),
    (partial(Recipe, "eagle3"), "lr", [0, 3], "above 0 and below 1"),
    (partial(Recipe, "eagle3"), "batch_tokens", [100], "use at least max_len=1024"),
]
CASES = [(make, name, value, works) for make, name, values, works in VALUES for value in values]

# Settings of an engine over the toy model (4 layers, 37 tokens, 512 positions), refused when it is built.
ENGINES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_model_len": 600}, "max_model_len=600", "at most 512"),
    ({"kv_pages": 2, "page_size": 1, "max_model_len": None}, "kv_pages=2", "at least 4"),
    ({"kv_pages": 20, "max_model_len": 79}, "max_model_len=79", "use at most that, or kv_pages=21"),
    ({"kv_pages": 10**9}, "kv_pages=1000000000", "use at most"),
    ({"memory_fraction": 1e-9}, "memory_fraction=1e-09", "or a memory_fraction of at least"),
    ({"device": "cuda:7777"}, "device='cuda:7777'", "count from 0" if torch.cuda.is_available() else "cpu or auto"),
    ({"graphs": Graphs(decode="whole")}, "graphs.decode='whole'", "needs a CUDA device"),
    ({"graphs": Graphs(prefill="piecewise")}, "graphs.prefill='piecewise'", "needs a CUDA device"),
    *(
        ({"speculation": Speculation("standalone", draft=draft)}, f"draft={draft!r}", works)
        for draft, works in [
            ("toy-foreign", "shares no text with it"),
            ("self:skip=3", "layers 0-2"),
            ("self:skip=0-2", "keep at least one"),
            ("self:skip=2-1", "self:skip=FIRST-LAST"),
            ("self:skip=", "self:skip=FIRST-LAST"),
            ("self:skip=a-b", "self:skip=FIRST-LAST"),
            ("self:skip=1,,2", "self:skip=FIRST-LAST"),
            ("self:skip=-1", "self:skip=FIRST-LAST"),
            ("self:skip=1-99999999999", "layers 0-2"),
            ("self:layers=1", "self:skip=FIRST-LAST"),
            ("self:", "self:skip=FIRST-LAST"),
        ]
    ),
]

# Prompts, parameters and options of a call, refused before any work.
CALLS: list[tuple[Any, Any, dict[str, Any], str, str]] = [
    ("hello", SHORT, {}, "prompts='hello'", "[prompt]"),
    (["a", ""], SHORT, {}, "prompt 1=''", "at least one"),
    ([[]], SHORT, {}, "prompt 0=''", "at least one"),
    ([[3], [4, 37]], SamplingParams(max_new_tokens=1), {}, "prompt 1=[37]", "from 0 to 36"),
    ([[30, -1]], SamplingParams(max_new_tokens=1), {}, "prompt 0=[-1]", "from 0 to 36"),
    ([[3, 4.5]], SHORT, {}, "prompt 0='[3, 4.5]'", "text or a list of token ids"),
    ([[3, "a"]], SHORT, {}, "prompt 0=", "text or a list of token ids"),
    ([None], SHORT, {}, "prompt 0='None'", "text or a list of token ids"),
    ([3, 4], SHORT, {}, "prompt 0='3'", "text or a list of token ids"),
    ([LONG], SamplingParams(max_new_tokens=4), {}, "max_new_tokens of prompt 0=4", "leave room for 3 of max_model_len"),
    ([[3] * 120], SamplingParams(max_new_tokens=1), {}, "max_new_tokens of prompt 0=1", "has 120 tokens"),
    ([[3], [4]], [SamplingParams()], {}, "params=1", "one for each of the 2 prompts"),
    ([[3]], [{"temperature": 1}], {}, "params='dict'", "SamplingParams"),
    ([[3]], {"temperature": 1}, {}, "params='dict'", "SamplingParams"),
    ([[3]], SHORT, {"concurrency": 0}, "concurrency=0", "at least 1"),
    ([[3]], SHORT, {"concurrency": -1}, "concurrency=-1", "at least 1"),
    ([[3]], SHORT, {"concurrency": 1.5}, "concurrency=1.5", "whole number"),
]


def one_line(caught: pytest.ExceptionInfo[SpecbatchError], named: str, works: str) -> None:
    message = str(caught.value)
    assert named in message
    assert works in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(("make", "name", "value", "works"), CASES, ids=[f"{row[1]}={row[2]!r}" for row in CASES])
def test_invalid_value_is_refused(make: Callable[..., Any], name: str, value: Any, works: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        make(**{name: value})
    one_line(caught, f"{name}={value!r}", works)


@pytest.mark.parametrize(
    ("make", "named", "works"),
    [
        (partial(Graphs, decode="on"), "graphs.decode='on'", "off, whole"),
        (partial(Graphs, prefill="whole"), "graphs.prefill='whole'", "off, piecewise"),
        (spec("eagle3", aux_layers=(0, 2)), "aux_layers=0", "at least 1"),
        (partial(SamplingParams, stop=""), "stop=('',)", "not be empty"),
    ],
)
def test_invalid_part_of_a_value_is_refused(make: Callable[..., Any], named: str, works: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        make()
    one_line(caught, named, works)


@pytest.mark.parametrize(("settings", "named", "works"), ENGINES, ids=[row[1] for row in ENGINES])
def test_impossible_engine_is_refused_at_construction(
    toy_engine: Callable[..., Engine], settings: dict[str, Any], named: str, works: str
) -> None:
    with pytest.raises(SpecbatchError) as caught:
        toy_engine(**settings)
    one_line(caught, named, works)


@pytest.fixture(scope="module")
def engine(toy_engine: Callable[..., Engine]) -> Engine:
    return toy_engine()


@pytest.mark.parametrize(("prompts", "params", "options", "named", "works"), CALLS, ids=[row[3] for row in CALLS])
def test_invalid_call_is_refused_before_any_work(
    engine: Engine, prompts: Any, params: Any, options: dict[str, Any], named: str, works: str
) -> None:
    ended: list[Any] = []
    with pytest.raises(SpecbatchError) as caught:
        engine.generate(prompts, params, on_completion=ended.append, **options)
    one_line(caught, named, works)
    assert ended == []
    assert engine.generate([LONG], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].finish_reason == "length"


def test_numpy_numbers_are_accepted() -> None:
    import numpy as np

    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_new_tokens=np.int32(4))  # type: ignore[arg-type]


def test_numpy_token_ids_are_accepted(engine: Engine) -> None:
    import numpy as np

    params = SamplingParams(max_new_tokens=2, temperature=1.0, seed=np.int64(7))  # type: ignore[arg-type]
    found = engine.generate([np.array([3, 4])], params)  # type: ignore[list-item]
    assert found[0].prompt_token_ids == [3, 4]


@pytest.mark.parametrize(
    "value", ["a" * 10**6, 10**5_000, list(range(10**5)), "line\nline"], ids=("long", "digits", "list", "lines")
)
def test_refusals_are_one_line_of_bounded_length(value: object) -> None:
    message = str(refuse("model", value, "two\nlines " + "b" * 10**6))
    assert "\n" not in message
    assert len(message) < 2_000
    assert message.startswith("model=")
    assert "two lines" in message


def test_a_value_nested_too_deeply_is_not_shown() -> None:
    value: list[object] = []
    for _ in range(10**5):
        value = [value]
    assert str(refuse("model", value, "use another")) == "model=<list>: use another"


def test_prompts_of_30_mb_are_refused_at_once() -> None:
    with Engine(EngineConfig(model="toy", load_format="dummy", device="cpu", kv_pages=16, max_running=2)) as engine:
        with limited(5, 1 << 28), pytest.raises(SpecbatchError, match="prompt='30000000 characters': its first"):
            engine.generate(["a" * 30_000_000], SHORT)
        assert engine.generate(["a"], SHORT)[0].token_ids


def test_profiles_must_have_a_probability_for_every_draft() -> None:
    short, wrong = AcceptanceProfile("short.json", (0.5,) * 3), AcceptanceProfile("wrong.json", (0.5, 1.5, -1.0))
    assert spec("ngram", draft_tokens=3)(simulate_accept=short).simulated == short
    assert spec("ngram", draft_tokens=1)(simulate_accept=wrong).simulated.conditional == (0.5,)
    with pytest.raises(SpecbatchError) as error:
        spec("ngram")(simulate_accept=short)
    assert str(error.value) == (
        "simulate_accept='short.json': has 3 positions, but 4 tokens would be drafted in a row; draft at most 3, "
        "or use a longer profile"
    )
    with pytest.raises(SpecbatchError, match=r"the probability of draft 2 is 1\.5; use 0 to 1, or draft at most 1"):
        spec("ngram", draft_tokens=2)(simulate_accept=wrong)
