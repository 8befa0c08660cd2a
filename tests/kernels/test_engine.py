"""Engines on Triton kernels in the interpreter: every path calls its kernels and gives the tokens of naive decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from company import Company
from crossed import first_quick, slow_but
from shared_prefixes import share_always
from stand_ins import fake_graphs, planned_draft_lengths
from targets import LATENT, Targets
from watched_calls import Watch

from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.kernels.attention import context_kv_triton, qkv_triton
from specbatch.kernels.attention.deterministic import span_attention_triton, span_latents_triton
from specbatch.kernels.attention.latent import latent_attention_triton
from specbatch.kernels.attention.prefill.prefill_backends import TritonPrefill
from specbatch.kernels.attention.ragged_batch import StaticRaggedBatch
from specbatch.kernels.attention.verify import verify_attention_triton
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.drafting import corpus_triton, draft_inputs_triton, ngram_triton, tree_draft_triton
from specbatch.kernels.elementwise import elementwise_triton, gather_rows_triton
from specbatch.kernels.gemm import head_gemm_triton
from specbatch.kernels.gemm.dense import skinny_gemm_triton
from specbatch.kernels.gemm.deterministic import fixed_order
from specbatch.kernels.moe import experts_triton
from specbatch.kernels.recurrent import gated_delta_prefill_triton, gated_delta_triton, mamba2_triton, short_conv_triton
from specbatch.kernels.sampling import (
    accept_and_commit_triton,
    accept_triton,
    argmax_topk_triton,
    grammar_mask_triton,
    sample_triton,
    tree_verify_triton,
    verify_budget_triton,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available: tests/test_gpu.py runs on it")

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "ngram-corpus": Speculation("ngram", draft_tokens=3, corpus="run", corpus_tokens=1024, corpus_min=1),
    "self": Speculation("standalone", draft="self:skip=1", draft_tokens=2),
    "self by block": Speculation("standalone", draft="self:skip=1", draft_tokens=2, verification="block"),
    "self by budget": Speculation("standalone", draft="self:skip=1", draft_tokens=3, verify_budget=2.5),
    "eagle3": Speculation("eagle3", draft="dummy"),
    "mtp-tree": Speculation("mtp", draft_steps=2, draft_topk=2, draft_tokens=3),
    "block": Speculation("dflash", draft="toy-block", draft_tokens=3),
    "dflash2": Speculation("dflash2", draft="dummy", draft_tokens=3),
    "dspark": Speculation("dspark", draft="dummy", draft_tokens=3),
    "dspark by budget": Speculation("dspark", draft="dummy", draft_tokens=3, verify_budget=3),
    "domino": Speculation("domino", draft="toy-block-gru", draft_tokens=3),
    "lilicorr": Speculation("lilicorr", draft="toy-block-lattice", draft_tokens=3),
    "uno": Speculation("uno", draft="dummy", draft_tokens=3),
    "xpress": Speculation("xpress", draft="toy-block-refiner", draft_tokens=3),
    "dflash2-tree": Speculation("dflash2", draft="toy-block-selector", draft_steps=3, draft_topk=2, draft_tokens=4),
    "dspark-tree": Speculation("dspark", draft="toy-block-rnn", draft_steps=3, draft_topk=2, draft_tokens=4),
    "ngram-tree": Speculation("ngram", draft_steps=2, draft_topk=2, ngram_min=1),
    "self-tree": Speculation("standalone", draft="self:skip=1", draft_steps=3, draft_topk=2, draft_tokens=4),
}


@pytest.fixture
def kernels(
    watch: Watch,
    use_prefill: Callable[[object], None],
    skinny_up_to: Callable[[int], None],
    force_kernels: Callable[..., None],
) -> set[str]:
    """Makes engines treat CPU tensors as a GPU's; collects the names of the kernels that are called."""
    called: set[str] = set()
    for module, names in {
        accept_triton: ["verify_inputs"],
        accept_and_commit_triton: ["score_partials", "commit", "commit_tree", "sample", "rejection_sample"],
        argmax_topk_triton: ["argmax", "argmax_embedding", "argmax_keys", "topk_logprobs"],
        grammar_mask_triton: ["grammar_mask", "grammar_step"],
        sample_triton: ["sample"],
        context_kv_triton: ["write_context_kv", "write_verified_kv"],
        elementwise_triton: ["rms_norm", "silu_and_mul", "gelu_and_mul"],
        latent_attention_triton: ["latent_prefill", "latent_verify", "latent_prefix_attention", "write_latent"],
        qkv_triton: ["split_qkv_rope", "write_latent"],
        tree_draft_triton: ["expand", "prune"],
        experts_triton: ["fused_moe"],
        gated_delta_prefill_triton: ["delta_prefill"],
        gated_delta_triton: ["delta_verify"],
        mamba2_triton: ["ssd_prefill", "ssd_verify"],
        ngram_triton: ["ngram_match"],
        corpus_triton: ["corpus_drafts", "corpus_extend", "corpus_insert"],
        draft_inputs_triton: ["pending_inputs", "beam_inputs", "buffer_features"],
        gather_rows_triton: ["gather_rows"],
        short_conv_triton: ["conv_prefill", "conv_verify"],
        head_gemm_triton: ["head_gemm"],
        skinny_gemm_triton: ["skinny_linear", "skinny_gated"],
        fixed_order: ["fixed_order_linear", "fixed_order_gated", "fixed_order_gemm"],
        span_attention_triton: ["prefill_attention", "decode_attention"],
        span_latents_triton: ["span_latent_prefill", "span_latent_verify"],
        tree_verify_triton: ["move_accepted_kv"],
        verify_attention_triton: ["verify_attention", "prefix_attention"],
        verify_budget_triton: ["spend", "learn"],
    }.items():
        for name in names:
            watch(module, name, before=lambda *_, name=name, **__: called.add(name))
    force_kernels()
    use_prefill(TritonPrefill())
    skinny_up_to(8)
    return called


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> list[tuple[bool, int]]:
    """Passes that one graph of prompts computes: whether no span has a prefix, and the number of spans."""
    fake_graphs(monkeypatch)
    return watch(StaticRaggedBatch, "load", before=lambda graph, spans, **_: (graph.fresh, len(spans.counts)))


@pytest.fixture
def kernel_engine(toy_engine: Callable[..., Any], kernels: set[str]) -> tuple[Callable[..., Any], set[str]]:
    return toy_engine, kernels


@pytest.mark.parametrize("name", slow_but(["ngram"], SPECULATIONS))
def test_greedy_tokens(toy: Any, toy_engine: Callable[..., Any], request: pytest.FixtureRequest, name: str) -> None:
    prompts, params = [list(prompt) for prompt in toy.prompts()[8:9]], SamplingParams(max_new_tokens=4, ignore_eos=True)
    plain = toy_engine(speculation=SPECULATIONS[name]).generate(prompts, params)
    build, called = request.getfixturevalue("kernel_engine")
    done = build(speculation=SPECULATIONS[name]).generate(prompts, params)
    numbers = [[(item.metrics.drafted, item.metrics.accepted) for item in items] for items in (plain, done)]
    assert numbers[0] == numbers[1]
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:4] for prompt in prompts]
    expected = {"gather_rows", "verify_inputs", "rms_norm", "silu_and_mul", "split_qkv_rope", "verify_attention"}
    expected |= {"skinny_linear", "skinny_gated", "score_partials"}
    expected |= {"commit_tree", "move_accepted_kv"} if name.endswith("tree") else {"commit"}
    pairs, levels = {"pending_inputs", "buffer_features"}, {"topk_logprobs", "expand", "prune"}
    context, budget = {"write_context_kv", "write_verified_kv"}, {"argmax_keys", "spend", "learn"}
    own = {
        "none": set(),
        "ngram": {"ngram_match"},
        "ngram-corpus": {"ngram_match", "corpus_drafts", "corpus_extend", "corpus_insert"},
        "self": {"argmax"},
        "self by block": {"argmax"},
        "self by budget": {"argmax"} | budget,
        "eagle3": {"argmax_embedding"} | pairs,
        "mtp-tree": {"beam_inputs"} | levels | pairs,
        "block": {"argmax"} | context,
        "dflash2": {"argmax_embedding", "topk_logprobs"} | context,
        "dspark": {"argmax_embedding"} | context,
        "dspark by budget": {"argmax_embedding"} | budget | context,
        "domino": {"argmax_embedding"} | context,
        "lilicorr": {"argmax", "topk_logprobs"} | context,
        "uno": {"argmax"},
        "xpress": {"argmax"} | context,
        "dflash2-tree": levels | context,
        "dspark-tree": levels | context,
        "ngram-tree": {"ngram_match"},
        "self-tree": levels,
    }
    assert called == expected | own[name]


@pytest.mark.parametrize(
    "name",
    slow_but(["ngram"], ["none", "ngram", "ngram-tree", "self by budget", "self-tree", "eagle3", "mtp-tree", "block"]),
)
@pytest.mark.parametrize("decode", slow_but(["off"], ["off", "whole"]))
def test_shared_prefixes(
    toy: Any,
    kernel_engine: tuple[Callable[..., Any], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    decode: str,
) -> None:
    """Requests with and without them, of which one ends early."""
    share_always(monkeypatch)
    fake_graphs(monkeypatch)
    build, called = kernel_engine
    common = list(toy.prompts()[8])[:9]
    prompts = [[*common, 5], [7, 8], [*common, 6, 7], [*common[:5], 4]]
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (4, 3, 2, 3)]
    engine = build(speculation=SPECULATIONS[name], page_size=2, max_running=4, graphs=Graphs(decode))
    done = engine.generate(prompts, params)
    for item, prompt, asked in zip(done, prompts, params, strict=True):
        assert tuple(item.token_ids) == toy.greedy(tuple(prompt))[: asked.max_new_tokens]
    assert "prefix_attention" in called
    assert engine.record().caps["shared_prefixes"] == "once"


@pytest.mark.parametrize("name", slow_but(["ngram"], ["ngram", "eagle3", "block"]))
def test_deterministic_mode(toy: Any, kernel_engine: tuple[Callable[..., Any], set[str]], name: str) -> None:
    prompt, (build, called) = list(toy.prompts()[8]), kernel_engine
    engine = build(speculation=SPECULATIONS[name], deterministic=True)
    [done] = engine.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert tuple(done.token_ids) == toy.greedy(tuple(prompt))[:4]
    assert called >= {"fixed_order_linear", "fixed_order_gated", "fixed_order_gemm", "skinny_linear", "skinny_gated"}
    assert called >= {"prefill_attention", "decode_attention"}
    assert ("verify_attention" in called) == (name == "block")  # whose drafts see each other


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["llama"],
        [
            "llama",
            "qwen3-moe",
            "qwen3-next",
            "nemotron-h-moe",
            "lfm2",
            "gemma3",
            "gemma4",
            "gemma4-moe",
            "gemma4-e2b",
            *LATENT,
        ],
    ),
)
def test_logits_in_deterministic_mode_do_not_depend_on_company(kernels: set[str], name: str) -> None:
    """Up to rounding: the interpreter's GEMMs are numpy's. tests/lossless/test_deterministic_gpu.py compares bits."""
    company = Company(name, torch.float32, trees=False, attention=TritonPrefill())
    texts = [[5, 6, 7, 8, 9] * 2, [4, 5]]
    with use_deterministic():
        alone, together = [company.alone(text) for text in texts], company.together(texts, Random(3))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    attention = {"prefill_attention", "decode_attention"}
    if name in LATENT:
        attention = {"span_latent_prefill", "span_latent_verify", "write_latent", "head_gemm"}
    assert kernels >= {"fixed_order_linear"} | attention
    default = {"delta_prefill", "delta_verify", "ssd_prefill", "ssd_verify", "latent_prefill", "latent_verify"}
    assert kernels.isdisjoint(default)
    assert ("gelu_and_mul" in kernels) == (name.startswith("gemma"))


CONV = {"conv_prefill", "conv_verify"}
HYBRIDS = {
    ("qwen3-next", "mtp"): CONV | {"delta_prefill", "delta_verify", "fused_moe", "pending_inputs"},
    ("nemotron-h", "ngram-tree"): CONV | {"ssd_prefill", "ssd_verify", "commit_tree"},
    ("gpt-oss", "ngram-tree"): {"fused_moe", "verify_attention", "commit_tree"},
    ("gemma4-e2b", "ngram-tree"): {"split_qkv_rope", "verify_attention", "gelu_and_mul", "move_accepted_kv"},
    ("deepseek-v3", "mtp"): {"fused_moe", "latent_prefill", "latent_verify", "write_latent", "pending_inputs"},
    ("qwen3.5", "mtp-layers"): CONV | {"delta_verify", "verify_attention", "pending_inputs"},
    ("deepseek-v2", "ngram-tree"): {"latent_verify", "move_accepted_kv", "commit_tree"},
    ("lfm2", "ngram"): CONV,
}


@pytest.mark.parametrize(("name", "algorithm"), slow_but(list(HYBRIDS)[-1:], HYBRIDS))
def test_greedy_tokens_of_hybrids(targets: Targets, request: pytest.FixtureRequest, name: str, algorithm: str) -> None:
    """Two drafts each: a verify replays the accepted part of the previous one into the states."""
    prompt, expected = targets.prompts(name)[4], targets.greedy(name, 3)[4]
    called = request.getfixturevalue("kernels")
    drafts = {"draft_tokens": 2, "draft_steps": 2} if algorithm != "ngram-tree" else {"draft_steps": 2}
    engine = targets.engine(name, algorithm, more=drafts, max_running=1)
    [done] = engine.generate([prompt], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert done.token_ids == expected
    assert called >= HYBRIDS[name, algorithm]


@pytest.mark.parametrize(
    ("name", "algorithm", "decode"),
    first_quick(
        1,
        [
            ("deepseek-v2", "ngram", "off"),
            ("deepseek-v2", "ngram-tree", "off"),
            ("deepseek-v2", "none", "whole"),
            ("deepseek-v3", "mtp", "whole"),
        ],
    ),
)
def test_latents_share_prefixes(
    targets: Targets, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, algorithm: str,
    decode: str,
) -> None:  # fmt: skip
    """The tokens are those of the references, which read every prefix for itself."""
    share_always(monkeypatch)
    fake_graphs(monkeypatch)
    common, params = targets.prompts(name)[4][:9], SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompts = [[*common, 5], [*common, 6, 7], [*common[:5], 4]]
    expected = [done.token_ids for done in targets.engine(name, prefix_cache=False).generate(prompts, params)]
    called = request.getfixturevalue("kernels")
    settings = {"page_size": 2, "max_running": 3, "graphs": Graphs(decode)}
    engine = targets.engine(name, algorithm, more=None if algorithm == "none" else {"draft_steps": 2}, **settings)
    assert [done.token_ids for done in engine.generate(prompts, params)] == expected
    assert "latent_prefix_attention" in called
    assert engine.record().counters["sharing_iterations"]
    assert engine.record().caps["shared_prefixes"] == "once"


@pytest.mark.slow
def test_zero_drafts_before_and_after_some(
    toy: Any, toy_engine: Callable[..., Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [list(toy.prompts()[4])], SamplingParams(max_new_tokens=5, ignore_eos=True)
    asked = replace(SPECULATIONS["eagle3"], draft_tokens="auto")
    numbers = []
    for build in (toy_engine, request.getfixturevalue("kernel_engine")[0]):
        planned_draft_lengths(monkeypatch, [0, 2, 0, 1])
        [done] = build(speculation=asked, max_running=1).generate(prompts, params)
        assert tuple(done.token_ids) == toy.greedy(tuple(prompts[0]))[:5]
        numbers.append((done.metrics.drafted, done.metrics.accepted))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "name",
    slow_but(["none"], ["none", "ngram", "eagle3", "block", "self by block", "self by budget", "self-tree"]),
)
def test_sampled_tokens_with_a_seed(
    toy: Any, toy_engine: Callable[..., Any], request: pytest.FixtureRequest, name: str
) -> None:
    prompt = list(toy.prompts()[5])
    params = SamplingParams(
        temperature=0.8, top_k=9, top_p=0.95, seed=4, max_new_tokens=3, ignore_eos=True, logprobs=True
    )
    [expected] = toy_engine(speculation=SPECULATIONS[name]).generate([prompt], params)
    build, called = request.getfixturevalue("kernel_engine")
    [ours] = build(speculation=SPECULATIONS[name]).generate([prompt], params)
    assert ours.token_ids == expected.token_ids
    numbers = [(item.metrics.drafted, item.metrics.accepted) for item in (ours, expected)]
    assert numbers[0] == numbers[1]
    assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert called >= ({"sample", "commit_tree", "move_accepted_kv"} if name.endswith("tree") else {"sample", "commit"})
    assert ("rejection_sample" in called) == (name not in ("none", "ngram") and not name.endswith("tree"))
    assert "score_partials" not in called


@pytest.mark.parametrize(
    "name",
    slow_but(["ngram"], ["ngram", "ngram-corpus", "self", "eagle3", "block", "dspark", "dflash2-tree", "self-tree"]),
)
@pytest.mark.parametrize("temperature", slow_but([1.0], [0.0, 1.0]))
def test_grammars(
    toy: Any, toy_engine: Callable[..., Any], request: pytest.FixtureRequest, name: str, temperature: float
) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[5:7]]
    params = [
        SamplingParams(temperature=temperature, regex=regex, seed=2, max_new_tokens=4) for regex in ("[a-k]*", None)
    ]
    expected = toy_engine(speculation=SPECULATIONS[name]).generate(prompts, params)
    build, called = request.getfixturevalue("kernel_engine")
    done = build(speculation=SPECULATIONS[name]).generate(prompts, params)
    for ours, theirs in zip(done, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.metrics.drafted, ours.metrics.accepted) == (theirs.metrics.drafted, theirs.metrics.accepted)
    assert called >= {"grammar_mask", "grammar_step"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self", "block", "self-tree"])
def test_simulated_acceptance_is_that_of_the_reference(
    toy: Any, toy_engine: Callable[..., Any], request: pytest.FixtureRequest, name: str
) -> None:
    speculation = replace(SPECULATIONS[name], simulate_accept=AcceptanceProfile("", (0.8, 0.6, 0.7)))
    prompts, params = [list(prompt) for prompt in toy.prompts()[4:7]], SamplingParams(max_new_tokens=9, ignore_eos=True)
    plain = toy_engine(speculation=speculation).generate(prompts, params)
    build, _ = request.getfixturevalue("kernel_engine")
    done = build(speculation=speculation).generate(prompts, params)
    numbers = [[(item.metrics.accepted, item.metrics.verify_steps) for item in items] for items in (plain, done)]
    assert numbers[0] == numbers[1]
    assert len({accepted for accepted, _ in numbers[0]}) > 1
    assert [item.token_ids for item in done] == [item.token_ids for item in plain]


@pytest.mark.slow
def test_simulated_accept_length(toy: Any, kernel_engine: tuple[Callable[..., Any], set[str]]) -> None:
    build, _ = kernel_engine
    speculation = Speculation("ngram", draft_tokens=3, ngram_min=1, simulate_accept_length=1.0)
    prompts = [list(prompt) for prompt in toy.prompts()[4:6]]
    done = build(speculation=speculation).generate(prompts, SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:5] for prompt in prompts]
    assert all(item.metrics.accept_length == 1.0 for item in done)


@pytest.mark.slow
def test_padding_rows_and_piecewise_graphs(
    toy: Any, kernel_engine: tuple[Callable[..., Any], set[str]], loaded: list[tuple[bool, int]]
) -> None:
    build, _ = kernel_engine
    prompts = [list(prompt) for prompt in toy.prompts()[4:7]]
    drafts = Speculation("standalone", draft="self:skip=1-2", draft_tokens=1)
    engine = build(speculation=drafts, graphs=Graphs("whole", "piecewise"), max_running=4, prefill_chunk=20)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:3] for prompt in prompts]
    graphs = engine.record().counters["graphs"]
    assert graphs["decode"]["padded"] > 0
    assert all(item["replays"] and not item["fallbacks"] for item in graphs.values())
    assert int(engine.parts.worker.batch.lengths[0]) == 1
    assert loaded  # short prompts went through one graph


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4-e2b", "gpt-oss", "qwen3-next", "nemotron-h", "lfm2"])
def test_short_passes_are_one_graph_with_and_without_prefixes(
    targets: Targets, request: pytest.FixtureRequest, name: str, deterministic: bool
) -> None:
    """Windows, sinks, shared keys and recurrent states that start from cached ones."""
    prompts, expected = targets.prompts(name)[:5], targets.greedy(name, 3)[:5]
    request.getfixturevalue("kernels")
    loaded = request.getfixturevalue("loaded")
    graphs = Graphs("whole", "piecewise")
    engine = targets.engine(name, "none", graphs=graphs, prefill_chunk=24, deterministic=deterministic)
    for _ in range(2):
        done = engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
        assert [item.token_ids for item in done] == expected
    assert {fresh for fresh, _ in loaded} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_latents_from_graphs(
    targets: Targets, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Short prompts are one graph, whose spans the kernel reads from the device; longer ones are in segments."""
    prompts = targets.prompts("deepseek-v3")[2:5]
    expected = [tokens[:3] for tokens in targets.greedy("deepseek-v3", 3)[2:5]]
    called = request.getfixturevalue("kernels")
    fake_graphs(monkeypatch)
    graphs = Graphs("whole", "piecewise")
    engine = targets.engine("deepseek-v3", "none", graphs=graphs, prefill_chunk=8, deterministic=deterministic)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [item.token_ids for item in done] == expected
    assert all(item["replays"] and not item["fallbacks"] for item in engine.record().counters["graphs"].values())
    own = {"latent_prefill", "latent_verify"}
    assert called >= ({f"span_{name}" for name in own} | {"head_gemm"} if deterministic else own)
