"""Prefix caching of models with recurrent layers does not change an engine's tokens or drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import Targets

from specbatch import Engine, SamplingParams, Speculation
from specbatch.memory.state_cache import StateCache

pytestmark = pytest.mark.slow

NEW = SamplingParams(max_new_tokens=9, ignore_eos=True)
DRAFTS = [("none", "v2"), ("ngram", "v1"), ("ngram", "v2"), ("ngram-tree", "v2")]


# Gated delta rule, Mamba2, short convolution.
@pytest.fixture(params=["qwen3.5", "nemotron-h", "lfm2"], scope="module")
def build(request: pytest.FixtureRequest, targets: Targets) -> Callable[..., Engine]:
    return partial(targets.engine, request.param, max_model_len=80)


@pytest.fixture(scope="module")
def plain(build: Callable[..., Engine]) -> Engine:
    return build(prefix_cache=False, max_running=16)


def expect_equal(plain: Engine, prompts: list[list[int]], done: list[list[int]]) -> None:
    """Equal to the baseline, except after two logits so close that rounding may decide."""
    for prompt, want, got in zip(prompts, plain.generate(prompts, NEW), done, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(want.token_ids, got, strict=True)) if a != b), None)
        if place is not None:
            best = plain.next_logits(prompt + got[:place]).topk(2).values
            assert best[0] - best[1] < 1e-4, f"token {place} after {prompt}"


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Prompts with common prefixes of several lengths; some are duplicates."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    prompts: list[list[int]] = [torch.randint(3, 37, (draw(st.integers(9, 30)),), generator=seed).tolist()]
    for _ in range(draw(st.integers(3, 9))):
        parent = draw(st.sampled_from(prompts))
        own = torch.randint(3, 37, (draw(st.integers(0, 9)),), generator=seed).tolist()
        prompts.append((parent[: draw(st.integers(1, len(parent)))] + own)[:45])
    return prompts


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=families(),
    draft=st.sampled_from(DRAFTS),
    page_size=st.sampled_from([1, 4, 5]),
    chunk=st.sampled_from([3, 7, 16, 2048]),
    spare=st.sampled_from([0, 12, 400]),
    slots=st.sampled_from([1, 3, 64]),
)
def test_prefix_cache_does_not_change_tokens(
    build: Callable[..., Engine],
    plain: Engine,
    prompts: list[list[int]],
    draft: tuple[str, str],
    page_size: int,
    chunk: int,
    spare: int,
    slots: int,
) -> None:
    rows = {"none": 1, "ngram": 4, "ngram-tree": 10}[draft[0]]
    pages = -(-(60 + 2 * rows) // page_size) + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "specbatch.engine.setup.builder.StateCache", lambda cache, size, _: StateCache(cache, size, slots)
        )
        engine = build(*draft, page_size=page_size, prefill_chunk=chunk, kv_pages=pages, max_model_len=55)
    for _ in range(2):
        expect_equal(plain, prompts, [item.token_ids for item in engine.generate(prompts, NEW)])
    states = engine.record().counters["states"]
    assert states["loaded"] or not engine.record().metrics["cached_tokens"]
    engine.forget_prefixes()
    state_cache = engine.parts.scheduler.state_cache
    assert state_cache is not None
    assert (len(state_cache), sorted(state_cache._free)) == (0, list(range(1, slots + 1)))
    assert engine.parts.scheduler.pool.free == pages


def proposals(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The drafts of each verify, and the tokens; one request at a time."""
    drafter, seen = engine.parts.worker.decode_step.drafter, []
    propose = drafter.propose

    def watched(step: Any) -> Any:
        proposal = propose(step)
        seen.append(proposal.tokens[0].tolist())
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    done = engine.generate(prompts, NEW, concurrency=1)
    return seen, [item.token_ids for item in done]


@pytest.mark.parametrize(("algorithm", "aux"), [("eagle3", (1, 2, 3)), ("dflash", None)])
def test_prefix_cache_does_not_change_drafts(
    build: Callable[..., Engine], algorithm: str, aux: tuple[int, ...] | None
) -> None:
    """A repeated prompt starts at a cached state; its earlier KV is in shared pages. So the drafts are
    the same, and so is their acceptance."""
    prompts = [[(7 * i * i + 3) % 31 + 3 for i in range(n)] for n in (30, 30, 30, 27, 30)]
    found = {}
    for cached in (False, True):
        speculation = Speculation(algorithm, "v1", draft="dummy", aux_layers=aux)
        engine = build(speculation=speculation, load_format="dummy", prefix_cache=cached)
        found[cached] = proposals(engine, prompts)
        assert engine.record().metrics["cached_tokens"] == cached * (28 + 28)  # of 27 tokens there is none
    assert found[True] == found[False]
    assert len(found[True][0]) > len(prompts)


def test_state_dtypes(build: Callable[..., Engine], request: pytest.FixtureRequest) -> None:
    """16-bit states halve the memory of matrices; a short convolution has none. All kinds resume from cached states."""
    taken = {}
    for dtype in ("fp32", "bf16", "fp16"):
        engine = build(state_dtype=dtype)
        taken[dtype] = engine.caps["state_bytes"]
        first, *others = engine.generate([[7] * 20 for _ in range(4)], NEW, concurrency=1)
        assert [item.metrics.cached_tokens for item in others] == [0, 16, 16]
        assert len(first.token_ids) == 9
    assert taken["bf16"] == taken["fp16"]
    assert (taken["bf16"] < taken["fp32"]) is ("lfm2" not in request.node.name)


def test_record_counts_states(build: Callable[..., Engine]) -> None:
    engine = build()
    prompts = [[5] * 13 + [kind] * 5 for kind in (1, 2, 3, 4)]
    engine.generate(prompts, NEW, concurrency=1)
    record = engine.record()
    assert record.counters["states"] == {"kept": 1, "loaded": 2, "evicted": 0}
    assert [row["cached_tokens"] for row in record.requests] == [0, 0, 12, 12]
    engine.forget_prefixes()
    assert engine.record().counters["states"]["evicted"] == 1
    engine.reset_record()
    assert engine.record().counters["states"] == {"kept": 0, "loaded": 0, "evicted": 0}
