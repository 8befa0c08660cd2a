"""What cannot be run is refused in one line that names the setting, its value and what works."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbatch import Engine, EngineConfig, Graphs, SamplingParams, SpecbatchError, Speculation

LONG = [3] * 117  # the toy engine takes 120 tokens
SHORT = SamplingParams(max_new_tokens=1)


def speculation(**settings: Any) -> Callable[[], Any]:
    return lambda: Speculation(**settings)


def standalone(**settings: Any) -> Callable[[], Any]:
    return lambda: Speculation("standalone", draft="self:skip=1", **settings)


def config(**settings: Any) -> Callable[[], Any]:
    return lambda: EngineConfig(**settings)


def sampling(**settings: Any) -> Callable[[], Any]:
    return lambda: SamplingParams(**settings)


# What is asked, the setting with its value, and a part of what works.
VALUES: list[tuple[Callable[[], Any], str, str]] = [
    (speculation(algorithm="eagle9"), "algorithm='eagle9'", "none, ngram, standalone"),
    (speculation(algorithm=""), "algorithm=''", "none, ngram"),
    (speculation(schedule="v3"), "schedule='v3'", "v1, v2"),
    (speculation(draft_tokens=0), "draft_tokens=0", "at least 1"),
    (speculation(draft_tokens=-1), "draft_tokens=-1", "at least 1"),
    (speculation(draft_tokens=64), "draft_tokens=64", "at most 63"),
    (speculation(draft_tokens=2.5), "draft_tokens=2.5", "whole number"),
    (speculation(draft_tokens="4"), "draft_tokens='4'", "whole number"),
    (speculation(draft_tokens=True), "draft_tokens=True", "whole number"),
    (speculation(algorithm="eagle"), "draft=None", "'eagle' needs an EAGLE head"),
    (speculation(algorithm="eagle3"), "draft=None", "'eagle3' needs an EAGLE-3 head"),
    (speculation(algorithm="mtp", draft="x"), "draft='x'", "'standalone', 'eagle', 'eagle3'"),
    (speculation(algorithm="eagle", draft="x", aux_layers=(2,)), "aux_layers=(2,)", "only 'eagle3'"),
    (speculation(aux_layers=(2,)), "aux_layers=(2,)", "only 'eagle3'"),
    (speculation(algorithm="eagle3", draft="x", aux_layers=()), "aux_layers=()", "tuple of layers"),
    (speculation(algorithm="eagle3", draft="x", aux_layers="2,3"), "aux_layers='2,3'", "tuple of layers"),
    (speculation(algorithm="eagle3", draft="x", aux_layers=(0, 2)), "aux_layers=0", "at least 1"),
    (speculation(algorithm="mtp", draft_rope_theta=1e4), "draft_rope_theta=10000.0", "only 'eagle', 'eagle3'"),
    (speculation(algorithm="eagle", draft="x", draft_rope_theta=0.0), "draft_rope_theta=0.0", "positive"),
    (speculation(algorithm="eagle", draft="x", draft_rope_theta=True), "draft_rope_theta=True", "positive"),
    (speculation(algorithm="dflash"), "draft=None", "made for the model"),
    (speculation(algorithm="dflash", draft="x", draft_tokens=5, draft_steps=2), "draft_steps=2", "draft_tokens=5"),
    (speculation(algorithm="dflash", draft="x", simulate_accept_length=0.5), "simulate_accept_length=0.5", "1 to 16"),
    (speculation(algorithm="dflash", draft="x", draft_topk=2), "draft_topk=2", "chains"),
    (speculation(draft_steps=0), "draft_steps=0", "at least 1"),
    (speculation(draft_steps=64), "draft_steps=64", "at most 63"),
    (speculation(algorithm="ngram", draft_steps=64, draft_topk=2), "draft_steps=64", "at most 63"),
    (standalone(draft_steps=63, draft_topk=2), "draft_topk=2", "use draft_steps="),
    (speculation(draft_topk=0), "draft_topk=0", "at least 1"),
    (speculation(draft_topk=True), "draft_topk=True", "whole number"),
    (
        speculation(draft_steps=3, draft_tokens=4),
        "draft_steps=3",
        "as many steps (the root is not counted); use draft_steps=3, draft_topk=1, draft_tokens=3",
    ),
    (
        speculation(draft_steps=5, draft_topk=2, draft_tokens=3),
        "draft_steps=5",
        "use draft_steps=5, draft_topk=2, draft_tokens=5",
    ),
    (
        standalone(draft_steps=3, draft_topk=2, draft_tokens=11),
        "draft_tokens=11",
        "10 candidates (the root is not counted); use draft_steps=3, draft_topk=2, draft_tokens=10",
    ),
    (
        speculation(algorithm="ngram", draft_steps=3, draft_topk=2, draft_tokens=7),
        "draft_tokens=7",
        "use draft_steps=3, draft_topk=2, draft_tokens=6",
    ),
    (
        standalone(draft_steps=8, draft_topk=10, draft_tokens=60),
        "draft_topk=10",
        "draft_steps=7, draft_topk=10, draft_tokens=60",
    ),
    (speculation(algorithm="standalone"), "draft=None", "self:skip="),
    (speculation(algorithm="standalone", draft=""), "draft=''", "self:skip="),
    (speculation(algorithm="ngram", draft="x"), "draft='x'", "'standalone'"),
    (speculation(draft="self:skip=1"), "draft='self:skip=1'", "'standalone'"),
    (speculation(algorithm="ngram", ngram_min=0), "ngram_min=0", "at least 1"),
    (speculation(algorithm="ngram", ngram_max=0), "ngram_max=0", "at least 1"),
    (speculation(algorithm="ngram", ngram_min=5), "ngram_max=4", "ngram_min=5 to 16"),
    (speculation(algorithm="ngram", ngram_max=17), "ngram_max=17", "ngram_min=2 to 16"),
    (speculation(algorithm="ngram", ngram_min=20, ngram_max=20), "ngram_min=20", "at most 16"),
    (speculation(algorithm="ngram", ngram_max=None), "ngram_max=None", "whole number"),
    (speculation(algorithm="ngram", draft_tokens="auto", draft_topk=2), "draft_topk=2", "drafts chains only; use 1"),
    (lambda: Graphs(decode="on"), "graphs.decode='on'", "off, whole"),
    (lambda: Graphs(prefill="whole"), "graphs.prefill='whole'", "off, piecewise"),
    (lambda: EngineConfig(kv_dtype="int4"), "kv_dtype='int4'", "auto, fp8"),
    (lambda: EngineConfig(attention_backend="x"), "attention_backend='x'", "auto, triton, torch, flashinfer"),
    (speculation(simulate_accept_length=2.0), "simulate_accept_length=2.0", "drafts nothing"),
    (speculation(algorithm="ngram", simulate_accept_length=0.9), "simulate_accept_length=0.9", "1 to 5"),
    (speculation(algorithm="ngram", simulate_accept_length=5.1), "simulate_accept_length=5.1", "1 to 5"),
    (speculation(algorithm="ngram", simulate_accept_length=math.nan), "simulate_accept_length=nan", "1 to 5"),
    (speculation(algorithm="ngram", simulate_accept_length="2"), "simulate_accept_length='2'", "1 to 5"),
    (standalone(draft_steps=5, draft_topk=3, simulate_accept_length=6.5), "simulate_accept_length=6.5", "1 to 6"),
    (config(model=""), "model=''", "smollm2-135m"),
    (config(model=5), "model=5", "smollm2-135m"),
    (config(speculation={"algorithm": "ngram"}), "speculation={'algorithm': 'ngram'}", "Speculation("),
    (config(device="tpu"), "device='tpu'", "auto, cpu, cuda or cuda:N"),
    (config(device="cuda:"), "device='cuda:'", "cuda:N"),
    (config(device="cuda:-1"), "device='cuda:-1'", "cuda:N"),
    (config(device=0), "device=0", "cuda:N"),
    (config(dtype="int8"), "dtype='int8'", "auto, float32, bfloat16, float16"),
    (config(load_format="pickle"), "load_format='pickle'", "auto, safetensors, gguf, dummy"),
    (config(max_running=0), "max_running=0", "at least 1"),
    (config(max_running=1.5), "max_running=1.5", "whole number"),
    (config(max_running=None), "max_running=None", "whole number"),
    (config(max_model_len=1), "max_model_len=1", "at least 2"),
    (config(page_size=0), "page_size=0", "at least 1"),
    (config(kv_pages=1), "kv_pages=1", "at least 2"),
    (config(kv_pages="many"), "kv_pages='many'", "whole number"),
    (config(prefill_chunk=0), "prefill_chunk=0", "at least 1"),
    (config(memory_fraction=0.0), "memory_fraction=0.0", "above 0 and up to 1"),
    (config(memory_fraction=True), "memory_fraction=True", "above 0 and up to 1"),
    (config(graphs="whole"), "graphs='whole'", "Graphs("),
    (config(draft_attention_backend="triton"), "draft_attention_backend='triton'", "no draft model is used"),
    (config(memory_fraction=1.1), "memory_fraction=1.1", "above 0 and up to 1"),
    (config(memory_fraction=math.nan), "memory_fraction=nan", "above 0 and up to 1"),
    (config(memory_fraction="half"), "memory_fraction='half'", "above 0 and up to 1"),
    (config(seed=-1), "seed=-1", "at least 0"),
    (config(seed=0.5), "seed=0.5", "whole number"),
    (config(seed=None), "seed=None", "whole number"),
    (config(prefix_cache="no"), "prefix_cache='no'", "True or False"),
    (sampling(temperature=-0.1), "temperature=-0.1", "0 (greedy) or a positive number"),
    (sampling(temperature=math.nan), "temperature=nan", "positive number"),
    (sampling(temperature=math.inf), "temperature=inf", "positive number"),
    (sampling(temperature="hot"), "temperature='hot'", "positive number"),
    (sampling(temperature=None), "temperature=None", "positive number"),
    (sampling(top_p=0), "top_p=0", "above 0 and up to 1"),
    (sampling(top_p=1.01), "top_p=1.01", "above 0 and up to 1"),
    (sampling(top_p=math.nan), "top_p=nan", "above 0 and up to 1"),
    (sampling(top_p="0.9"), "top_p='0.9'", "above 0 and up to 1"),
    (sampling(top_k=-1), "top_k=-1", "0 (off)"),
    (sampling(top_k=1.5), "top_k=1.5", "whole number"),
    (sampling(min_p=-0.1), "min_p=-0.1", "0 (off) to 1"),
    (sampling(min_p=2), "min_p=2", "0 (off) to 1"),
    (sampling(min_p=math.nan), "min_p=nan", "0 (off) to 1"),
    (sampling(max_new_tokens=0), "max_new_tokens=0", "at least 1"),
    (sampling(max_new_tokens=-5), "max_new_tokens=-5", "at least 1"),
    (sampling(max_new_tokens=1.5), "max_new_tokens=1.5", "whole number"),
    (sampling(max_new_tokens="9"), "max_new_tokens='9'", "whole number"),
    (sampling(max_new_tokens=None), "max_new_tokens=None", "whole number"),
    (sampling(stop=""), "stop=('',)", "not be empty"),
    (sampling(stop=["a", ""]), "stop=('a', '')", "not be empty"),
    (sampling(stop=5), "stop=5", "list of texts"),
    (sampling(stop=[5]), "stop=(5,)", "list of texts"),
    (sampling(stop_token_ids=7), "stop_token_ids=7", "list of token ids"),
    (sampling(stop_token_ids=["a"]), "stop_token_ids=('a',)", "list of token ids"),
    (sampling(stop_token_ids=[-1]), "stop_token_ids=(-1,)", "list of token ids"),
    (sampling(seed="x"), "seed='x'", "whole number"),
    (sampling(seed=1.5), "seed=1.5", "whole number"),
]

# Settings of an engine over the toy model (4 layers, 37 tokens, 512 positions), refused when it is built.
ENGINES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_model_len": 600}, "max_model_len=600", "at most 512"),
    ({"kv_pages": 2, "page_size": 1, "max_model_len": None}, "kv_pages=2", "at least 4"),
    ({"kv_pages": 20, "max_model_len": 79}, "max_model_len=79", "use at most that, or kv_pages=21"),
    ({"kv_pages": 10**12}, "kv_pages=1000000000000", "use at most"),
    ({"memory_fraction": 1e-9}, "memory_fraction=1e-09", "a higher memory_fraction"),
    ({"device": "cuda:7777"}, "device='cuda:7777'", "count from 0" if torch.cuda.is_available() else "cpu or auto"),
    ({"graphs": Graphs(decode="whole")}, "decode_graph='whole'", "needs a CUDA device"),
    ({"graphs": Graphs(prefill="piecewise")}, "prefill_graph='piecewise'", "needs a CUDA device"),
    *(
        ({"speculation": Speculation("standalone", draft=draft)}, f"draft={draft!r}", works)
        for draft, works in [
            ("toy-small", "37 tokens and toy has 31"),
            ("self:skip=4", "layers 0-3"),
            ("self:skip=0-3", "keep at least one"),
            ("self:skip=2-1", "layers 0-3"),
            ("self:skip=", "self:skip=FIRST-LAST"),
            ("self:skip=a-b", "self:skip=FIRST-LAST"),
            ("self:skip=1,,2", "self:skip=FIRST-LAST"),
            ("self:skip=-1", "self:skip=FIRST-LAST"),
            ("self:skip=1-99999999999", "layers 0-3"),
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
    ([[3], [4, 37]], SamplingParams(max_new_tokens=1), {}, "prompt 1='token 37'", "from 0 to 36"),
    ([[30, -1]], SamplingParams(max_new_tokens=1), {}, "prompt 0='token -1'", "from 0 to 36"),
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


@pytest.mark.parametrize(("make", "named", "works"), VALUES, ids=[row[1] for row in VALUES])
def test_a_bad_value_is_refused_where_it_is_given(make: Callable[[], Any], named: str, works: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        make()
    one_line(caught, named, works)


@pytest.mark.parametrize(("settings", "named", "works"), ENGINES, ids=[row[1] for row in ENGINES])
def test_an_engine_that_cannot_be_is_refused_when_it_is_built(
    toy_engine: Callable[..., Engine], settings: dict[str, Any], named: str, works: str
) -> None:
    with pytest.raises(SpecbatchError) as caught:
        toy_engine(**settings)
    one_line(caught, named, works)


@pytest.fixture(scope="module")
def engine(toy_engine: Callable[..., Engine]) -> Engine:
    return toy_engine()


@pytest.mark.parametrize(("prompts", "params", "options", "named", "works"), CALLS, ids=[row[3] for row in CALLS])
def test_a_bad_call_is_refused_before_any_work(
    engine: Engine, prompts: Any, params: Any, options: dict[str, Any], named: str, works: str
) -> None:
    ended: list[Any] = []
    with pytest.raises(SpecbatchError) as caught:
        engine.generate(prompts, params, on_completion=ended.append, **options)
    one_line(caught, named, works)
    assert ended == []
    assert engine.generate([LONG], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].finish_reason == "length"


def test_numbers_of_other_libraries_are_numbers() -> None:
    import numpy as np

    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_new_tokens=np.int32(4))  # type: ignore[arg-type]


def test_token_ids_of_other_libraries_are_token_ids(engine: Engine) -> None:
    import numpy as np

    params = SamplingParams(max_new_tokens=2, temperature=1.0, seed=np.int64(7))  # type: ignore[arg-type]
    found = engine.generate([np.array([3, 4])], params)  # type: ignore[list-item]
    assert found[0].prompt_token_ids == [3, 4]
