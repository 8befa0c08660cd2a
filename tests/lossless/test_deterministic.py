"""In deterministic mode no bit of a request's results depends on what is computed with it, or how."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import lossless
import pytest
import torch
import torch.nn.functional as F
from company import Company
from lossless import Case
from stand_ins import late_results, random_draft_lengths
from targets import SPECULATIONS, TARGETS, Targets

from specbatch import Completion, EngineConfig, SamplingParams, SpecbatchError, Speculation
from specbatch.engine.setup.prepare import prepare
from specbatch.kernels.attention.deterministic import span_attention
from specbatch.kernels.attention.latent.latent_attention import LatentDecodeRef, latent_prefill_ref
from specbatch.kernels.attention.prefill import prefill_backends
from specbatch.kernels.attention.queries import DecodeQueries
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef
from specbatch.kernels.common.rowwise import row_sum
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.elementwise import norm
from specbatch.kernels.gemm.deterministic import fixed_rows
from specbatch.kernels.gemm.head_gemm import head_gemm_ref
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.gemm.quantized import weight as packed_weight
from specbatch.kernels.moe import experts
from specbatch.kernels.recurrent import gated_delta, mamba2, row_by_row, short_conv
from specbatch.models.families import deepseek

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def differing(name: str, dtype: torch.dtype, rounds: int, state: str = "fp32", lengths: Any = (150, 9, 70)) -> int:
    """At how many positions a bit of the logits differs between a prompt pass of a text alone and random company."""
    company, rng = Company(name, dtype, state), Random(f"{name} {dtype}")
    texts = [[rng.randrange(3, 37) for _ in range(length)] for length in lengths]
    found = 0
    with use_deterministic():
        alone = [company.alone(text) for text in texts]
        for _ in range(rounds):
            for one, other in zip(alone, company.together(texts, rng), strict=True):
                found += int((one.view(torch.uint8) != other.view(torch.uint8)).any(1).sum())
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", BF16), ("deepseek-v3", BF16), ("nemotron-h-moe", FP32), ("qwen3.5", FP16)]
)
def test_logits_do_not_depend_on_company(name: str, dtype: torch.dtype) -> None:
    assert differing(name, dtype, 1, lengths=(90, 9, 30) if dtype == BF16 else (14, 20)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_of_every_family_do_not_depend_on_company(name: str, dtype: torch.dtype, state: str) -> None:
    assert differing(name, dtype, 3, state, (150, 70, 9, 33)) == 0


# -- what an engine returns ------------------------------------------------------------------------------------------

_SAMPLED = [SamplingParams(**{**vars(params), "max_new_tokens": lossless.LONGER}) for params in lossless.SAMPLED]


def _engine_cases() -> list[Any]:
    """Every pair of drafter and target, with schedules and memory settings in turn; quick: one of each kind."""
    quick = [
        Case("ngram-tree", "v1", "eager", "no-cache", "lfm2"),
        Case("mtp", "v2", "eager", "roomy", "qwen3.5"),
    ]
    drafters = [name for name, how in SPECULATIONS.items() if how.get("verification") != "block"]
    turns = itertools.cycle(itertools.product(("v1", "v2", "v2-late"), lossless.MEMORY))
    every = [
        Case(drafter, schedule, "eager", memory, target)
        for (drafter, target), (schedule, memory) in zip(itertools.product(drafters, TARGETS), turns, strict=False)
        if lossless.fits(drafter, target)
    ]
    return [
        *(pytest.param(case, id=str(case)) for case in quick),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in every if case not in quick),
    ]


@pytest.mark.parametrize("case", _engine_cases())
def test_results_do_not_depend_on_draft_schedule_and_memory(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    if case.schedule == "v2-late":
        late_results(monkeypatch)
    if case.is_auto:
        random_draft_lengths(monkeypatch)
    settings = case.settings() | {"dtype": "bfloat16", "deterministic": True}
    engine = targets.engine(case.target, case.drafter, case.schedule[:2], **settings)
    assert _results(engine.generate(targets.prompts(case.target), _SAMPLED)) == _one_by_one(targets, case.target)
    record = engine.record()
    assert record.caps["deterministic"] == "on"
    if case.drafter != "none":
        assert record.metrics["drafted_tokens"]


@cache
def _one_by_one(targets: Targets, name: str, count: int = len(_SAMPLED)) -> list[Any]:
    """The baseline's results of the first `count` requests, one at a time."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "max_running": 1, "prefix_cache": False}
    engine = targets.engine(name, "none", "v1", **settings)
    pairs = zip(targets.prompts(name)[:count], _SAMPLED[:count], strict=True)
    return [result for prompt, params in pairs for result in _results(engine.generate([prompt], params))]


def _results(done: list[Completion]) -> list[Any]:
    return [(item.token_ids, item.logprobs) for item in done]


# -- every rule is needed: without it bits differ --------------------------------------------------------------------


def _other_bits_at_some_places(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """A library whose order of additions depends on a row's place."""
    return _on_cpu(self, x) * torch.where(torch.arange(len(x)) % 4 == 1, 1 + 2.0**-7, 1).to(x.dtype)[:, None]


_on_cpu = Linear._on_cpu
_prefill = span_attention.span_prefill_attention


def _short_spans(*args: Any) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_attention, "SPAN", 32)
        return _prefill(*args)


def _keys_as_stored(queries: DecodeQueries, spans: Callable[..., Any] = span_attention.SpanDecodeAttention) -> Any:
    """The nodes of a tree are keys in the order in which they are stored."""
    return spans(queries) if queries.ancestors is None else DecodeAttentionRef(queries)


def _experts_in_any_order(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    *rest: Any,
    add: Any = experts.experts_ref,
    **how: Any,
) -> Any:
    return add(x, *((weights, chosen) if len(x) % 2 else (weights.flip(1), chosen.flip(1))), *rest, **how)


def _taps_in_any_order(
    inputs: Any, weight: torch.Tensor, *rest: Any, convolve: Any = short_conv._convolve
) -> torch.Tensor:
    taps = list(inputs)
    return convolve(taps, weight, *rest) if len(taps[0]) % 2 else convolve(taps[::-1], weight.flip(1), *rest)


# A rule, what takes the place of the code that follows it (owner, name, replacement), and a model that shows it.
WITHOUT: list[tuple[str, list[tuple[Any, str, Any]], str, torch.dtype, str]] = [
    ("rows of a GEMM", [(packed_weight, "linear_in_blocks", F.linear)], "qwen3-moe", FP32, "fp32"),
    (
        "place in a GEMM",  # with the check that finds it switched off
        [
            (Linear, "_on_cpu", _other_bits_at_some_places),
            (fixed_rows, "_block_sizes", {}),
            (fixed_rows, "find_block_sizes", lambda *_: (fixed_rows.ROWS,)),
        ],
        "llama",
        BF16,
        "fp32",
    ),
    ("spans of a prompt", [(prefill_backends, "span_prefill_attention", _short_spans)], "llama", FP32, "fp32"),
    (
        "spans of a verify",
        [(span_attention, "SpanDecodeAttention", lambda queries: DecodeAttentionRef(queries))],
        "llama",
        BF16,
        "fp32",
    ),
    ("keys of a tree", [(span_attention, "SpanDecodeAttention", _keys_as_stored)], "llama", FP32, "fp32"),
    ("rows of a GEMM of heads", [(deepseek, "head_gemm", head_gemm_ref)], "deepseek-v2", FP32, "fp32"),
    (
        "latents of a verify",
        [(span_attention, "SpanDecodeAttention", lambda queries: LatentDecodeRef(queries))],
        "deepseek-v3",
        FP32,
        "fp32",
    ),
    (
        "latents of a prompt",
        [(span_attention, "span_latent_prefill", latent_prefill_ref)],
        "deepseek-v2",
        FP32,
        "fp32",
    ),
    (
        "sum of a norm",
        [(norm, "row_sum", lambda x: row_sum(x if len(x) % 2 else x.roll(1, -1)))],
        "llama",
        FP32,
        "fp32",
    ),
    # torch's softplus, whose last elements are computed by other code
    ("one exponential", [(gated_delta, "softplus", F.softplus)], "qwen3.5", FP32, "fp32"),
    ("order of experts", [(experts, "experts_ref", _experts_in_any_order)], "qwen3.5-moe", FP32, "fp32"),
    ("order of taps", [(short_conv, "_convolve", _taps_in_any_order)], "lfm2", FP32, "fp32"),
    (
        "chunks of the delta rule",
        [(row_by_row, "delta_prefill", gated_delta.delta_prefill_ref)],
        "qwen3.5",
        FP32,
        "fp32",
    ),
    ("verify of Mamba-2 at once", [(row_by_row, "ssd_verify", mamba2.ssd_verify_ref)], "nemotron-h", FP32, "fp32"),
    (
        "states rounded when stored",
        [(row_by_row, "_delta_update", lambda s, k, u, dtype: s + k[..., None] * u[..., None, :])],
        "qwen3.5",
        FP32,
        "bf16",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "name", "dtype", "state"), [pytest.param(*rest, id=rule) for rule, *rest in WITHOUT]
)
def test_every_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch, changes: list[tuple[Any, str, Any]], name: str, dtype: torch.dtype, state: str
) -> None:
    for change in changes:
        monkeypatch.setattr(*change)
    assert differing(name, dtype, 1, state) > 0


def test_tokens_of_a_seed_depend_on_drafts_that_are_verified_by_rejection_sampling(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.drafters.choose.is_deterministic", lambda: False)
    engine, few = targets.engine("llama", "model", dtype="bfloat16", deterministic=True), 3
    found = _results(engine.generate(targets.prompts("llama")[:few], _SAMPLED[:few]))
    assert found != _one_by_one(targets, "llama", few)


def test_gemm_whose_bits_depend_on_the_place_takes_one_row_at_a_time() -> None:
    weight, x = torch.randn(8, 24), torch.randn(40, 24)
    calls: list[int] = []

    def gemm(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        y = x @ weight.T
        return torch.cat([y[:2], y[2:] * (1 + 2.0**-20)])

    assert fixed_rows.find_block_sizes(gemm, 24, FP32) == (1,)
    assert fixed_rows.find_block_sizes(lambda x: (x[:, None] * weight).sum(-1), 24, FP32) == (256, 16)
    assert fixed_rows.find_block_sizes(lambda x: x @ weight.T * (1 + (len(x) > 99)), 24, FP32) == (16,)
    fixed_rows.gemm_in_blocks(gemm, x, ("a weight",))
    assert calls[-40:] == [1] * 40


def test_what_it_does_not_cover_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.engine.setup.prepare.find_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(SpecbatchError, match="deterministic=True: its kernels were compared on Hopper only"):
        prepare(EngineConfig(deterministic=True), print)
    with pytest.raises(SpecbatchError, match="tensor_parallel=2: with deterministic=True"):
        EngineConfig(deterministic=True, tensor_parallel=2)
    block = Speculation("mtp", verification="block")
    with pytest.raises(SpecbatchError, match="verification='block': with deterministic=True"):
        EngineConfig(deterministic=True, speculation=block)
